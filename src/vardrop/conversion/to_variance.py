"""Replace N(mu, sigma^2) weights by N(0, sigma^2) weights, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vardrop._core.checks import describe_value
from vardrop._core.errors import VardropError
from vardrop.conversion.plan import Selection, check_selection, selects
from vardrop.conversion.rules import join_names
from vardrop.estimators import check_method
from vardrop.layers import Variational
from vardrop.noisy import named_modules_of, noisy_modules
from vardrop.posteriors import AdditiveGaussian, MultiplicativeGaussian, ZeroMean


@dataclass(frozen=True)
class Swap:
    """KL(N(mu, sigma^2) || N(0, sigma^2)) of every replaced layer. Print it.

    Args:
        weights: the number of weights by layer.
        kl: the KL in nats by layer.
    """

    weights: dict[str, int]
    kl: dict[str, float]  # in nats, summed over the layer

    @property
    def total(self) -> float:
        """The KL of all layers together."""
        return sum(self.kl.values())

    def __str__(self) -> str:
        lines = [f"KL to the zero-mean net: {self.total:.4g} nats"]
        for name, kl in self.kl.items():
            lines.append(
                f"  {name or '(net)'}  {self.weights[name]} weights  {kl:.4g} nats, "
                f"{kl / self.weights[name]:.3g} per weight"
            )
        return "\n".join(lines)


@torch.no_grad()
def to_variance(net: nn.Module, include: Selection | list[Selection] | None = None) -> Swap:
    """Drop the means of Gaussian weights and keep their variances, in place.

        N(mu, sigma^2) -> N(0, sigma^2),   KL between the two = mu^2 / (2 sigma^2) = 1 / (2 alpha)

    If alpha is large, the two models are nearly the same, although the second has no means.
    The noise tensors are replaced, so build a new optimizer to continue training.

    Args:
        net: a model with Gaussian posteriors.
        include: the noisy layers to change, as for `convert`. By default all.

    Returns:
        The KL of every layer.

    >>> import torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Linear(3, 2), vd.variational_dropout(per="layer"))
    >>> print(to_variance(net))
    KL to the zero-mean net: 3 nats
      (net)  6 weights  3 nats, 0.5 per weight

    Neklyudov, Molchanov, Ashukha & Vetrov 2019, "Variance networks", sec. 5.
    """
    noisy = noisy_modules(net)
    check_selection("include", include)
    layers = {
        name: m
        for name, m in named_modules_of(net, Variational).items()
        if m.posterior is not None and selects(include, m, name)
    }
    if not layers:
        raise VardropError(
            "Expected `include` to select layers with noisy weights, but got "
            f"{describe_value(include)}. "
            f"The noisy modules are {join_names([n or '(net)' for n in noisy])}."
        )
    for name, layer in layers.items():
        if not isinstance(layer.posterior, AdditiveGaussian | MultiplicativeGaussian):
            raise VardropError(
                f"Expected module '{name or '(net)'}' to have a Gaussian posterior, but got "
                f"{layer.posterior!r}. Select others with `include`."
            )
        check_method(ZeroMean(), layer.prior, layer.estimator)
    # All layers are read before one is changed, because tied layers lose their mean together.
    sigmas: dict[int, dict[str, Tensor]] = {}
    noise, sizes, kl = {}, {}, {}
    for name, layer in layers.items():
        tensors = layer.noisy_tensors()
        if new := [t for t in tensors.values() if id(t.mean) not in sigmas]:
            alphas = (torch.exp(-t.log_alpha()).expand_as(t.mean) for t in new)
            kl[name] = sum(a.double().sum().item() / 2 for a in alphas)
            sizes[name] = sum(t.mean.numel() for t in tensors.values() if t.axes.input)
        for t in new:
            sigma = t.variance().expand_as(t.mean).sqrt()
            sigmas[id(t.mean)] = {"sigma": nn.Parameter(sigma.clone())}
        noise[name] = {key: sigmas[id(t.mean)] for key, t in tensors.items()}
    for name, layer in layers.items():
        layer.replace_posterior(ZeroMean(), noise[name])
    return Swap(sizes, kl)
