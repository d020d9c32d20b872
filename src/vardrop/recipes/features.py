"""Methods with noise on features: gates on units and channels."""

from __future__ import annotations

from vardrop._core.checks import check_type
from vardrop._core.errors import VardropError
from vardrop.gates import (
    BetaBernoulli,
    BinaryDropout,
    ConcreteDropout,
    DependentBetaBernoulli,
    HardConcrete,
    LogNormal,
    NormalJeffreys,
    Standout,
)
from vardrop.posteriors import AdditiveGaussian
from vardrop.priors import Normal
from vardrop.recipes.recipe import Recipe, SwitchDropout


def binary_dropout(drop_rate: float = 0.5) -> Recipe:
    """Binary dropout on the inputs of each layer, as a gate that can be switched.

    Args:
        drop_rate: the probability that an input is dropped.

    Returns:
        The recipe, for `convert`, `plan` and `fit`.

    >>> import torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Linear(3, 2), vd.binary_dropout(0.2))
    >>> net.gate.noise.drop_rate
    0.2

    Srivastava et al. 2014, "Dropout: a simple way to prevent neural networks from overfitting".
    """
    return Recipe(gate=BinaryDropout(drop_rate))


def recurrent_dropout(
    drop_rate: float = 0.25, learned: bool = False, length_scale: float | None = None
) -> Recipe:
    """Dropout for recurrent layers: one mask per sequence, the same at every step.

    It acts on the inputs and on the state of every layer of an LSTM, GRU or RNN. Other layers are
    unchanged.

    Args:
        drop_rate: the rate, or the initial rate if it is learned.
        learned: whether every recurrent layer learns its rate.
        length_scale: of the prior. None means 0.01 for learned rates, and no KL for fixed rates.

    Returns:
        The recipe, for `convert`, `plan` and `fit`.

    >>> import torch, vardrop as vd
    >>> net = vd.convert(torch.nn.LSTM(3, 2), vd.recurrent_dropout(0.2))
    >>> net(torch.zeros(5, 1, 3))[0].shape
    torch.Size([5, 1, 2])

    Gal & Ghahramani 2016, "A theoretically grounded application of dropout in recurrent neural
    networks", sec. 4; Gal, Hron & Kendall 2017, "Concrete dropout" (learned rates).
    """
    check_type("learned", learned, bool, "True or False")
    if learned:
        scale = 1e-2 if length_scale is None else length_scale
        return Recipe(gate=ConcreteDropout(drop_rate, None, scale, "sequence"))
    return Recipe(gate=BinaryDropout(drop_rate, "sequence", length_scale))


def standout(scale: float = 1.0, shift: float = 0.0) -> Recipe:
    """Adaptive dropout: a unit with pre-activation x is kept with a probability that depends on x.

    The probability is sigmoid(scale x + shift). The gate is on the outputs of each layer, before a
    ReLU. Leave out the last layer with `exclude`.

    Args:
        scale: the factor of x.
        shift: the shift. A larger one keeps more units.

    Returns:
        The recipe, for `convert`, `plan` and `fit`.

    >>> import torch, vardrop as vd
    >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    >>> len(vd.plan(net, vd.standout(), exclude="2").changes)
    1

    Ba & Frey 2013, "Adaptive dropout for training deep neural networks", eq. 3 and 4.
    """
    return Recipe(gate=Standout(scale, shift))


def mc_dropout(drop_rate: float | None = None, length_scale: float | None = None) -> SwitchDropout:
    """Monte-Carlo dropout: the existing dropout of a trained model becomes switchable noise.

    Every dropout keeps its rate: dropout modules, dropout inside the attention and recurrent layers
    of torch, and dropout inside the modules of transformers. In a model without dropout, gates are
    put before the layers that `include` selects.

    Args:
        drop_rate: the rate of the gates in a model without dropout. None adds no gates.
        length_scale: l of the prior. The gates then add the KL of the paper, l^2 |W|^2 / (2 (1 -
            drop_rate)) for mean weights W.

    Returns:
        The recipe, for `convert`, `plan` and `fit`.

    >>> import torch, vardrop as vd
    >>> net = torch.nn.Sequential(torch.nn.Dropout(0.2), torch.nn.Linear(3, 2))
    >>> vd.predict(vd.convert(net, vd.mc_dropout()), torch.ones(1, 3), samples=8).probs.shape
    torch.Size([1, 2])

    Gal & Ghahramani 2016, "Dropout as a Bayesian approximation", eq. 7. The authors' UCI runs use
    rates of 0.005 to 0.1 before every layer, including the first, and a length scale of 0.01.
    """
    if drop_rate is None and length_scale is not None:
        raise VardropError(
            f"Expected `drop_rate` where there is a `length_scale`, but got {length_scale} alone. "
            "Dropout that the net has already has no KL; leave out `length_scale`."
        )
    gate = None if drop_rate is None else BinaryDropout(drop_rate, length_scale=length_scale)
    return SwitchDropout(gate)


def concrete_dropout(
    drop_rate: float = 0.1, length_scale: float = 1e-2, temperature: float | None = None
) -> Recipe:
    """Dropout with one learned rate per layer, through a relaxed mask.

    For convolutions there is one mask per channel.

    Args:
        drop_rate: the initial rate.
        length_scale: of the prior.
        temperature: of the relaxation. None means 0.1 for dense layers and 2/3 for channels.

    Returns:
        The recipe, for `convert`, `plan` and `fit`.

    >>> import torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Linear(3, 2), vd.concrete_dropout(drop_rate=0.5))
    >>> net.gate.drop_logit.item()
    0.0

    Gal, Hron & Kendall 2017, "Concrete dropout", eq. 3 and 5.
    """
    return Recipe(gate=ConcreteDropout(drop_rate, temperature, length_scale))


def beta_bernoulli(a: float = 0.3133, alpha: float = 1e-4) -> Recipe:
    """Beta-Bernoulli dropout: sparse gates on the inputs of dense layers and on channels.

    The authors start from a pretrained model, with a learning rate of 1e-2 for the gates and 1e-3
    for the weights (weight decay 1e-4). The learning rate of the gates sets the trade-off between
    sparsity and accuracy.

    The accuracy falls at the start, because a gate multiplies by E pi (0.24 by default) until the
    weights have adapted. Units are removed after tens of epochs. For a budget of MACs or latency in
    a few epochs, use `vardrop.slim`.

    Args:
        a: the initial a of the posterior. The authors use 2.127 for VGG.
        alpha: of the prior. A small alpha favours closed gates.

    Returns:
        The recipe, for `convert`, `plan` and `fit`.

    >>> import torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Linear(3, 2), vd.beta_bernoulli())
    >>> vd.relevance(net)["gate"].kept.tolist()
    [True, True, True]

    Lee et al. 2018, "Adaptive network sparsification with dependent variational beta-Bernoulli
    dropout", eq. 12 to 15.
    """
    return Recipe(gate=BetaBernoulli(alpha, a))


def dependent_beta_bernoulli(joint: bool = False, shift: float = 1.0, std: float = 1.0) -> Recipe:
    """Gates that depend on the input, on top of the Beta-Bernoulli gates of a trained model.

    Convert with `beta_bernoulli()` and train, then convert again with this recipe. The first gates
    are frozen.

    Args:
        joint: whether to convert a plain model and train both kinds of gates together.
        shift: the initial shift of the activations.
        std: the initial standard deviation of the shift.

    Returns:
        The recipe, for `convert`, `plan` and `fit`.

    >>> import torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Linear(3, 2), vd.beta_bernoulli())  # and train
    >>> net = vd.convert(net, vd.dependent_beta_bernoulli())
    >>> type(net.gate.noise).__name__
    'DependentBetaBernoulli'

    Lee et al. 2018, "Adaptive network sparsification with dependent variational beta-Bernoulli
    dropout", eq. 16 to 21.
    """
    return Recipe(gate=DependentBetaBernoulli(joint=joint, shift=shift, std=std))


def structured_pruning(log_sigma: float = -5.0) -> Recipe:
    """Structured Bayesian pruning: log-normal gates, pruned by their signal-to-noise ratio.

    The authors start from a pretrained model. The initial gates differ from one by less than 1%.

    No unit is removed in the first epochs, because log sigma starts far from the threshold. A
    higher learning rate of the noise is faster, but too high a rate destroys the model. For a
    budget of MACs or latency in a few epochs, use `vardrop.slim`.

    Args:
        log_sigma: the initial log standard deviation of the gates.

    Returns:
        The recipe, for `convert`, `plan` and `fit`.

    >>> import torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Conv2d(1, 3, 3), vd.structured_pruning())
    >>> vd.relevance(net)["gate"].kind, net.gate.units
    ('output', 3)

    Neklyudov et al. 2017, "Structured Bayesian pruning via log-normal multiplicative noise",
    eq. 11 to 18.
    """
    return Recipe(gate=LogNormal(log_sigma=log_sigma))


def l0(penalty: float = 0.1, drop_rate: float = 0.05) -> Recipe:
    """L0 regularisation: hard concrete gates and a penalty on every retained weight.

    The gates start open, so the outputs of a trained model are unchanged at first.

    A unit is removed if the penalty outweighs its effect on the loss, after tens of epochs. For a
    budget of MACs or latency in a few epochs, use `vardrop.slim`.

    Args:
        penalty: per weight, before the division by the number of data. The authors use 0.1 on
            MNIST.
        drop_rate: the initial rate. The authors start untrained models at 0.2 to 0.5.

    Returns:
        The recipe, for `convert`, `plan` and `fit`.

    >>> import torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Linear(3, 2), vd.l0(penalty=1.0))
    >>> bool(vd.kl(net) < 6)  # the expected number of retained weights
    True

    Louizos, Welling & Kingma 2018, "Learning sparse neural networks through L0 regularization",
    eq. 10 to 13.
    """
    return Recipe(gate=HardConcrete(penalty, drop_rate))


def bayesian_compression(log_sigma2: float = -9.0, threshold: float = -3.0) -> Recipe:
    """Bayesian compression: normal-Jeffreys gates on units, and Gaussian weights under N(0, 1).

    The authors keep the variances of the weights of the first layer at or below 0.04.

    The method reduces bytes, and removes units after tens of epochs. For a budget of MACs or
    latency in a few epochs, use `vardrop.slim`.

    Args:
        log_sigma2: the initial log variance of weights and gates.
        threshold: a unit is removed if log alpha of its gate is above it. The authors chose -2.8 to
            -5, by layer.

    Returns:
        The recipe, for `convert`, `plan` and `fit`.

    >>> import torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Linear(3, 2), vd.bayesian_compression())
    >>> vd.relevance(net)["gate"].kept.tolist()
    [True, True, True]

    Louizos, Ullrich & Welling 2017, "Bayesian compression for deep learning", eq. 7 to 10.
    """
    gate = NormalJeffreys(log_sigma2, threshold)
    return Recipe(AdditiveGaussian(log_sigma2), Normal(), gate=gate, noisy_bias=True)
