"""Methods with noise on weights, and Gaussian dropout in both of its forms."""

from __future__ import annotations

from typing import Literal, TypeVar

from vardrop._core.checks import check_choice
from vardrop._core.errors import VardropError
from vardrop.estimators import Estimator, flipout, local_reparameterization, weight_sample
from vardrop.gates import GaussianDropout
from vardrop.posteriors import (
    AdditiveGaussian,
    Bernoulli,
    MultiplicativeGaussian,
    Noise,
    Sharing,
    ZeroMean,
    check_drop_rate,
)
from vardrop.priors import ARD, LogUniform, Normal, Prior
from vardrop.recipes.recipe import Recipe

_T = TypeVar("_T")


def bayes_by_backprop(
    prior: Prior | None = None,
    log_sigma2: float = -9.0,
    estimator: Estimator | None = None,
) -> Recipe:
    """Bayes by Backprop: N(mu, sigma^2) weights against N(0, 1), or any other prior.

    The authors use one weight sample per batch (`estimator=weight_sample`), a scale mixture prior
    (`prior=MonteCarlo(ScaleMixture())`) and sigma = softplus(rho) with rho in (-5, -4), so log
    sigma^2 is near -9.

    Args:
        prior: of the weights. None uses N(0, 1).
        log_sigma2: the initial log variance of the weights.
        estimator: how the noise is drawn. None chooses by the model: `flipout` if it uses weights
            at several positions of an example (convolutions, attention, embeddings), and otherwise
            `local_reparameterization`, which has the smaller gradient variance. Both are then exact
            for q(w).

    Returns:
        The recipe, for `convert`, `plan` and `fit`.

    >>> import torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Linear(3, 2), vd.bayes_by_backprop(prior=vd.Normal(std=0.1)))
    >>> bool(vd.kl(net) > 0)
    True

    Blundell et al. 2015, "Weight uncertainty in neural networks", eq. 2 and 8.
    """
    return Recipe(AdditiveGaussian(log_sigma2), _default(prior, Normal()), estimator)


def gaussian_dropout(drop_rate: float = 0.5, kind: Literal["A", "B"] = "A") -> Recipe:
    """Gaussian dropout with a fixed rate, alpha = drop_rate / (1 - drop_rate).

    `A` multiplies the inputs by N(1, alpha). `B` draws the pre-activation N(x w, alpha x^2 w^2).
    The authors use drop rate 0.5 on hidden units and 0.2 on the input.

    Args:
        drop_rate: above 0 and below 1.
        kind: "A" for noise on the inputs, "B" for noise on the weights.

    Returns:
        The recipe, for `convert`, `plan` and `fit`.

    >>> import vardrop as vd
    >>> vd.gaussian_dropout(0.2).gate.alpha
    0.25

    A: Srivastava et al. 2014, sec. 10. B: Wang & Manning 2013, "Fast dropout training", eq. 7.
    """
    check_choice("kind", kind, ("A", "B"))
    alpha = _alpha(drop_rate)
    if kind == "A":
        return Recipe(gate=GaussianDropout(alpha, learned=False))
    return Recipe(MultiplicativeGaussian(alpha, per="layer", learned=False))


def variational_dropout(
    kind: Literal["A", "B", "A2"] = "B",
    per: Sharing | None = None,
    drop_rate: float = 0.5,
    max_alpha: float | None = 1.0,
    prior: Prior | None = None,
) -> Recipe:
    """Gaussian dropout with learned rates, through the KL to a log-uniform prior.

    `A` has noise on the inputs, and its KL counts once per unit. `A2` is `A` with a third of the
    KL. `B` has noise on the weights.

    Args:
        kind: "A", "A2" or "B".
        per: which weights share an alpha. "weight", "input", "output" or "layer" for B, "input" or
            "layer" for A.
        drop_rate: alpha starts at drop_rate / (1 - drop_rate). The authors use 0.5 for hidden units
            and 0.2 for inputs.
        max_alpha: the upper bound of alpha. The authors use 1. With None alpha can grow, which
            leads to variance networks.
        prior: of the weights. None uses `LogUniform()`.

    Returns:
        The recipe, for `convert`, `plan` and `fit`.

    >>> import vardrop as vd
    >>> vd.variational_dropout(drop_rate=0.2).posterior.alpha
    0.25

    Kingma, Salimans & Welling 2015, "Variational dropout and the local reparameterization trick",
    sec. 3.1 (A), 3.2 (B), eq. 10 and 13.
    """
    check_choice("kind", kind, ("A", "B", "A2"))
    alpha = _alpha(drop_rate)
    if kind == "B":
        posterior = MultiplicativeGaussian(alpha, _default(per, "weight"), max_alpha=max_alpha)
        return Recipe(posterior, _default(prior, LogUniform()))
    if per not in (None, "input", "layer"):
        raise VardropError(f"Expected `per` to be 'input' or 'layer' for A, but got {per!r}.")
    if not isinstance(prior, LogUniform | None):
        raise VardropError(f"Expected `prior` to be a LogUniform for A, but got {prior!r}.")
    gate = GaussianDropout(
        alpha,
        per="layer" if per == "layer" else "unit",
        max_alpha=max_alpha,
        prior=_default(prior, LogUniform()),
        kl_scale=1 / 3 if kind == "A2" else 1.0,
    )
    return Recipe(gate=gate)


def sparse_vd(
    log_sigma2: float = -10.0,
    form: Literal["exact", "sigmoid", "bound"] = "exact",
    train_clip: float | None = None,
) -> Recipe:
    """Sparse variational dropout: additive noise and a log-uniform prior.

    Weights with log alpha above 3 are pruned. The authors start at log sigma^2 = -10 (-15 from a
    pretrained VGG), with a KL warm-up, and use the sigmoid form of the KL. Their code also draws
    weights with log alpha of 3 or more around zero during training (`train_clip=3.0`). This prunes
    faster, because the data term no longer supports such means: after 24 epochs of LeNet-300-100
    the compression was 59 times instead of 33 times.

    The method reduces bytes (`vardrop.pack`), but not latency, because it removes single weights
    and seldom whole units. For a budget of MACs or latency, use `vardrop.slim`.

    Args:
        log_sigma2: the initial log variance of the weights.
        form: of the KL.
        train_clip: the log alpha from which weights are drawn around zero in training, or None.

    Returns:
        The recipe, for `convert`, `plan` and `fit`.

    >>> import torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Linear(3, 2), vd.sparse_vd())
    >>> vd.sparsity(net, threshold=3.0).total
    0.0

    Molchanov, Ashukha & Vetrov 2017, "Variational dropout sparsifies deep neural networks",
    eq. 10 and 14.
    """
    return Recipe(AdditiveGaussian(log_sigma2, train_clip), LogUniform(form))


def ard(log_sigma2: float = -10.0) -> Recipe:
    """Automatic relevance determination: sparse VD with a normal prior of fitted precisions.

    KL = 1/2 log(1 + theta^2 / sigma^2). The prior is proper, and for large alpha the KL behaves
    like the KL of sparse VD.

    Args:
        log_sigma2: the initial log variance of the weights.

    Returns:
        The recipe, for `convert`, `plan` and `fit`.

    >>> import torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Linear(3, 2), vd.ard())
    >>> vd.log_alpha(net)[""].shape
    torch.Size([2, 3])

    Kharitonov, Molchanov & Vetrov 2018, "Variational dropout via empirical Bayes", eq. 12.
    """
    return Recipe(AdditiveGaussian(log_sigma2), ARD())


def variance_layer(noise: Noise = "gaussian", estimator: Estimator | None = None) -> Recipe:
    """Variance layer: weights of mean zero, which store everything in their variance, and no KL.

    sigma starts at the weights of the layer. The authors draw one weight sample per batch.

    Args:
        noise: "gaussian", "sign" or "uniform".
        estimator: how the noise is drawn. None uses local reparameterisation for Gaussian noise,
            and flipout for other noise.

    Returns:
        The recipe, for `convert`, `plan` and `fit`.

    >>> import torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Linear(3, 2), vd.variance_layer())
    >>> bool((net.weight == 0).all())
    True

    Neklyudov, Molchanov, Ashukha & Vetrov 2019, "Variance networks", sec. 3.
    """
    default = local_reparameterization if noise == "gaussian" else flipout
    return Recipe(ZeroMean(noise), estimator=_default(estimator, default))


def dropconnect(drop_rate: float = 0.5, estimator: Estimator = weight_sample) -> Recipe:
    """DropConnect: each weight is dropped independently, with a fixed rate.

    Args:
        drop_rate: the probability that a weight is dropped.
        estimator: how the noise is drawn.

    Returns:
        The recipe, for `convert`, `plan` and `fit`.

    >>> import torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Linear(3, 2), vd.dropconnect(0.2))
    >>> vd.predict(net, torch.ones(1, 3), samples=8).probs.shape
    torch.Size([1, 2])

    Wan et al. 2013, "Regularization of neural networks using DropConnect", eq. 3.
    """
    return Recipe(Bernoulli(drop_rate), estimator=estimator)


def _default(argument: _T | None, default: _T) -> _T:
    """The argument, or the default if it is None. Other false values are checked by the caller."""
    return default if argument is None else argument


def _alpha(drop_rate: float) -> float:
    check_drop_rate(drop_rate)
    if drop_rate == 0:
        raise VardropError(
            "Expected `drop_rate` to be above 0 for Gaussian noise, but got 0. "
            "Leave the layer plain instead."
        )
    return drop_rate / (1 - drop_rate)
