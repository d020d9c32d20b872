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

    It acts on the inputs and on the state of every layer of an LSTM, GRU or RNN; other layers stay
    as they are. With `learned`, every recurrent layer learns its rate, from `drop_rate` on.

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
    """Adaptive dropout: a unit is kept with probability sigmoid(scale x + shift) of its own x.

    It gates the outputs of each layer, before a ReLU; leave out the last layer with `exclude`.

    >>> import torch, vardrop as vd
    >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    >>> len(vd.plan(net, vd.standout(), exclude="2").changes)
    1

    Ba & Frey 2013, "Adaptive dropout for training deep neural networks", eq. 3 and 4.
    """
    return Recipe(gate=Standout(scale, shift))


def mc_dropout(drop_rate: float | None = None, length_scale: float | None = None) -> SwitchDropout:
    """Monte-Carlo dropout: the dropout that a trained net has becomes noise that can be switched.

    Every dropout keeps its own rate: dropout modules, and dropout inside torch's attention and
    recurrent layers and inside the modules of transformers. In a net without any, gates of
    `drop_rate` are put before the layers that `include` names; with a prior `length_scale` they add
    the KL of the paper, l^2 |W|^2 / (2 (1 - drop_rate)) for mean weights W.

    >>> import torch, vardrop as vd
    >>> net = torch.nn.Sequential(torch.nn.Dropout(0.2), torch.nn.Linear(3, 2))
    >>> vd.predict(vd.convert(net, vd.mc_dropout()), torch.ones(1, 3), samples=8).probs.shape
    torch.Size([1, 2])

    Gal & Ghahramani 2016, "Dropout as a Bayesian approximation", eq. 7. The authors' UCI runs use
    rates of 0.005 to 0.1 before every layer, input included, and a length scale of 0.01.
    """
    if drop_rate is None and length_scale is not None:
        raise VardropError(
            f"Expected `drop_rate` where there is a `length_scale`, but got {length_scale} alone. "
            "Dropout that the net has already has no KL; leave out `length_scale`."
        )
    if drop_rate is None:
        return SwitchDropout()
    return SwitchDropout(BinaryDropout(drop_rate, length_scale=length_scale))


def concrete_dropout(
    drop_rate: float = 0.1, length_scale: float = 1e-2, temperature: float | None = None
) -> Recipe:
    """Dropout with one learned rate per layer, relaxed; spatial for convolutions.

    Start at `drop_rate`; `temperature` None means 0.1 for dense layers and 2/3 for channels.
    Predict with the noise on: `vardrop.sampling`.

    >>> import torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Linear(3, 2), vd.concrete_dropout(drop_rate=0.5))
    >>> net.gate.drop_logit.item()
    0.0

    Gal, Hron & Kendall 2017, "Concrete dropout", eq. 3 and 5.
    """
    return Recipe(gate=ConcreteDropout(drop_rate, temperature, length_scale))


def beta_bernoulli(a: float = 0.3133, alpha: float = 1e-4) -> Recipe:
    """Beta-Bernoulli dropout: sparse gates on the inputs of dense layers and on channels.

    The authors start from a pretrained net, with a learning rate of 1e-2 for the gates and 1e-3
    for the weights (weight decay 1e-4); the gates' learning rate sets the trade-off between
    sparsity and accuracy. They use a = 2.127 for VGG.

    Expect the score to fall at the start, because a gate multiplies by E pi (0.24 at the default)
    until the weights have followed, and units to go after tens of epochs. For a budget of MACs or
    latency in a few epochs there is `vardrop.slim`.

    >>> import torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Linear(3, 2), vd.beta_bernoulli())
    >>> vd.relevance(net)["gate"].kept.tolist()
    [True, True, True]

    Lee et al. 2018, "Adaptive network sparsification with dependent variational beta-Bernoulli
    dropout", eq. 12 to 15.
    """
    return Recipe(gate=BetaBernoulli(alpha, a))


def dependent_beta_bernoulli(joint: bool = False, shift: float = 1.0, std: float = 1.0) -> Recipe:
    """Gates that open per input, on top of the Beta-Bernoulli gates of a trained net.

    Convert with `beta_bernoulli()` and train, then convert again with this: the first gates are
    frozen. `joint=True` converts a plain net and trains both together.

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

    The authors start from a pretrained net; the gates begin within 1 % of one.

    Expect no unit to go in a few epochs: log sigma starts far from the threshold. The learning rate
    of the noise decides how fast, and too high a one destroys the net. For a budget of MACs or
    latency in a few epochs there is `vardrop.slim`.

    >>> import torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Conv2d(1, 3, 3), vd.structured_pruning())
    >>> vd.relevance(net)["gate"].kind, net.gate.units
    ('output', 3)

    Neklyudov et al. 2017, "Structured Bayesian pruning via log-normal multiplicative noise",
    eq. 11 to 18.
    """
    return Recipe(gate=LogNormal(log_sigma=log_sigma))


def l0(penalty: float = 0.1, drop_rate: float = 0.05) -> Recipe:
    """L0 regularisation: hard concrete gates and a price on every weight that stays.

    `penalty` is per weight, before the division by the number of data (authors: 0.1 on MNIST). The
    gates start open, so that a trained net says what it said before; the authors start untrained
    nets at a `drop_rate` of 0.2 to 0.5.

    Expect units to go only where the penalty outweighs the loss, after tens of epochs. For a budget
    of MACs or latency in a few epochs there is `vardrop.slim`.

    >>> import torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Linear(3, 2), vd.l0(penalty=1.0))
    >>> bool(vd.kl(net) < 6)  # weights that are expected to stay
    True

    Louizos, Welling & Kingma 2018, "Learning sparse neural networks through L0 regularization",
    eq. 10 to 13.
    """
    return Recipe(gate=HardConcrete(penalty, drop_rate))


def bayesian_compression(log_sigma2: float = -9.0, threshold: float = -3.0) -> Recipe:
    """Group normal-Jeffreys gates on units beside Gaussian weights under N(0, 1).

    A unit is removed where log alpha of its gate is above `threshold` (authors: -2.8 to -5,
    chosen by layer). They keep the variances of the first layer's weights at or below 0.04.

    Expect fewer bytes, and units to go after tens of epochs. For a budget of MACs or latency in a
    few epochs there is `vardrop.slim`.

    >>> import torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Linear(3, 2), vd.bayesian_compression())
    >>> vd.relevance(net)["gate"].kept.tolist()
    [True, True, True]

    Louizos, Ullrich & Welling 2017, "Bayesian compression for deep learning", eq. 7 to 10.
    """
    gate = NormalJeffreys(log_sigma2, threshold)
    return Recipe(AdditiveGaussian(log_sigma2), Normal(), gate=gate, noisy_bias=True)
