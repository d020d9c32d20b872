"""Methods with noise on weights, and Gaussian dropout in both of its forms."""

from __future__ import annotations

from typing import Literal, TypeVar

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
    estimator: Estimator = local_reparameterization,
) -> Recipe:
    """Bayes by Backprop: N(mu, sigma^2) weights against N(0, 1), or any other prior.

    The authors draw one weight sample per batch (`estimator=weight_sample`), a scale mixture prior
    (`prior=MonteCarlo(ScaleMixture())`) and softplus(rho) with rho in (-5, -4), so log sigma^2
    near -9. Here local reparameterisation is the default, for its smaller gradient variance.

    >>> import torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Linear(3, 2), vd.bayes_by_backprop(prior=vd.Normal(std=0.1)))
    >>> bool(vd.kl(net) > 0)
    True

    Blundell et al. 2015, "Weight uncertainty in neural networks", eq. 2 and 8.
    """
    return Recipe(AdditiveGaussian(log_sigma2), _default(prior, Normal()), estimator)


def gaussian_dropout(drop_rate: float = 0.5, kind: Literal["A", "B"] = "A") -> Recipe:
    """Gaussian dropout with a fixed rate, alpha = drop_rate / (1 - drop_rate).

    `A` multiplies the inputs by N(1, alpha); `B` draws the pre-activation N(x w, alpha x^2 w^2).
    The authors use drop rate 0.5 on hidden units and 0.2 on the input.

    >>> import vardrop as vd
    >>> vd.gaussian_dropout(0.2).gate.alpha
    0.25

    A: Srivastava et al. 2014, sec. 10. B: Wang & Manning 2013, "Fast dropout training", eq. 7.
    """
    alpha = _alpha(drop_rate)
    if kind == "A":
        return Recipe(gate=GaussianDropout(alpha, learned=False))
    if kind == "B":
        return Recipe(MultiplicativeGaussian(alpha, per="layer", learned=False))
    raise VardropError(f"Expected `kind` to be 'A' or 'B', but got {kind!r}.")


def variational_dropout(
    kind: Literal["A", "B", "A2"] = "B",
    per: Sharing | None = None,
    drop_rate: float = 0.5,
    max_alpha: float | None = 1.0,
    prior: Prior | None = None,
) -> Recipe:
    """Gaussian dropout whose rates are learned, by the KL to a log-uniform prior.

    `A`: noise on the inputs, alpha `per` "input" or "layer", KL once per unit. `A2`: A with a third
    of the KL. `B`: noise on the weights, alpha `per` "weight", "input", "output" or "layer".
    Alpha starts at drop_rate / (1 - drop_rate) (authors: 0.5 hidden, 0.2 input) and is bounded by
    `max_alpha` (authors: 1; None lets it grow, which leads to variance networks).

    >>> import vardrop as vd
    >>> vd.variational_dropout(drop_rate=0.2).posterior.alpha
    0.25

    Kingma, Salimans & Welling 2015, "Variational dropout and the local reparameterization trick",
    sec. 3.1 (A), 3.2 (B), eq. 10 and 13.
    """
    alpha = _alpha(drop_rate)
    if kind == "B":
        posterior = MultiplicativeGaussian(alpha, _default(per, "weight"), max_alpha=max_alpha)
        return Recipe(posterior, _default(prior, LogUniform()))
    if kind not in ("A", "A2"):
        raise VardropError(f"Expected `kind` to be 'A', 'B' or 'A2', but got {kind!r}.")
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
    """Sparse variational dropout: additive noise, log-uniform prior; prune where log alpha > 3.

    The authors start at log sigma^2 = -10 (-15 from a pretrained VGG), with a KL warm-up, and use
    the sigmoid form of the KL; the exact one is the default here. Their code also draws weights
    with log alpha of 3 or more around zero while it trains (`train_clip=3.0`), which prunes faster:
    the data no longer hold such means up. After 24 epochs of LeNet-300-100 the compression was 59
    instead of 33 times.

    Expect fewer bytes (`vardrop.pack`), not less latency: single weights go and seldom whole units,
    so that the MACs stay. For a budget of MACs or latency there is `vardrop.slim`.

    >>> import torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Linear(3, 2), vd.sparse_vd())
    >>> vd.sparsity(net, threshold=3.0).total
    0.0

    Molchanov, Ashukha & Vetrov 2017, "Variational dropout sparsifies deep neural networks",
    eq. 10 and 14.
    """
    return Recipe(AdditiveGaussian(log_sigma2, train_clip), LogUniform(form))


def ard(log_sigma2: float = -10.0) -> Recipe:
    """Automatic relevance determination: as sparse VD, with the prior's precisions fitted.

    KL = 1/2 log(1 + theta^2 / sigma^2); a proper prior, the same behaviour for large alpha.

    >>> import torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Linear(3, 2), vd.ard())
    >>> vd.log_alpha(net)[""].shape
    torch.Size([2, 3])

    Kharitonov, Molchanov & Vetrov 2018, "Variational dropout via empirical Bayes", eq. 12.
    """
    return Recipe(AdditiveGaussian(log_sigma2), ARD())


def variance_layer(noise: Noise = "gaussian", estimator: Estimator | None = None) -> Recipe:
    """A variance layer: weights of mean zero, everything in the variance, no KL.

    Gaussian noise is drawn by local reparameterisation, `sign` and `uniform` noise by flipout
    (the authors draw one weight sample per batch). sigma starts at the layer's weights.

    >>> import torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Linear(3, 2), vd.variance_layer())
    >>> bool((net.weight == 0).all())
    True

    Neklyudov, Molchanov, Ashukha & Vetrov 2019, "Variance networks", sec. 3.
    """
    default = local_reparameterization if noise == "gaussian" else flipout
    return Recipe(ZeroMean(noise), estimator=_default(estimator, default))


def dropconnect(drop_rate: float = 0.5, estimator: Estimator = weight_sample) -> Recipe:
    """DropConnect: every weight dropped on its own, with a fixed rate.

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
