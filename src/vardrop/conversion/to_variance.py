"""The swap: N(mu, sigma^2) weights become N(0, sigma^2) weights, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vardrop._core.checks import shown
from vardrop._core.errors import VardropError
from vardrop.conversion.selection import Where, check_selection, listed, selects
from vardrop.layers import Variational, check_method
from vardrop.noisy import named_modules_of, noisy_modules
from vardrop.posteriors import AdditiveGaussian, MultiplicativeGaussian, ZeroMean


@dataclass(frozen=True)
class Swap:
    """KL(N(mu, sigma^2) || N(0, sigma^2)) by layer, of a swap; print it to read it."""

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
def to_variance(net: nn.Module, where: Where | list[Where] | None = None) -> Swap:
    """Drop the means of Gaussian weights and keep their variances, in place.

        N(mu, sigma^2) -> N(0, sigma^2),   KL between the two = mu^2 / (2 sigma^2) = 1 / (2 alpha)

    Where alpha is large the two nets are nearly the same, yet the second has no means at all.
    Noise tensors are replaced: build the optimizer anew to go on training.

    Args:
        net: a net with Gaussian posteriors.
        where: which noisy layers, as for `convert`; all by default.

    >>> import torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Linear(3, 2), vd.variational_dropout(per="layer"))
    >>> print(to_variance(net))
    KL to the zero-mean net: 3 nats
      (net)  6 weights  3 nats, 0.5 per weight

    Neklyudov, Molchanov, Ashukha & Vetrov 2019, "Variance networks", sec. 5.
    """
    noisy = noisy_modules(net)
    check_selection("where", where)
    layers = {
        name: m
        for name, m in named_modules_of(net, Variational).items()
        if m.posterior is not None and selects(where, m, name)
    }
    if not layers:
        raise VardropError(
            f"Expected `where` to select layers with noisy weights, but got {shown(where)}. "
            f"The noisy modules are {listed([n or '(net)' for n in noisy])}."
        )
    _check_gaussian(layers)
    for layer in layers.values():
        check_method(ZeroMean(), layer.prior, layer.estimator)
    counted: set[int] = set()
    found = {name: _swap_kl(layer, counted) for name, layer in layers.items()}
    kl = {name: value for name, value in found.items() if value is not None}
    sizes = {name: _weights(layers[name]) for name in kl}
    # Everything is read before anything is written: tied layers lose their mean with the first.
    sigmas: dict[int, dict[str, Tensor]] = {}
    noise = [_sigmas(layer, sigmas) for layer in layers.values()]
    for layer, values in zip(layers.values(), noise, strict=True):
        layer.replace_posterior(ZeroMean(), values)
    return Swap(sizes, kl)


def _check_gaussian(layers: dict[str, Variational]) -> None:
    for name, layer in layers.items():
        if not isinstance(layer.posterior, AdditiveGaussian | MultiplicativeGaussian):
            raise VardropError(
                f"Expected module '{name or '(net)'}' to have a Gaussian posterior, but got "
                f"{layer.posterior!r}. Select others with `where`."
            )


def _weights(layer: Variational) -> int:
    return sum(t.mean.numel() for t in layer.noisy_tensors().values() if t.axes.input)


def _sigmas(
    layer: Variational, known: dict[int, dict[str, Tensor]]
) -> dict[str, dict[str, Tensor]]:
    """sigma of each noisy tensor by its name; the same parameter for the same mean."""
    found = {}
    for name, t in layer.noisy_tensors().items():
        sigma = t.variance().expand_as(t.mean).sqrt()
        found[name] = known.setdefault(id(t.mean), {"sigma": nn.Parameter(sigma.clone())})
    return found


def _swap_kl(layer: Variational, counted: set[int]) -> float | None:
    """The KL of the tensors that are not counted yet; None where all are."""
    found = [t for t in layer.noisy_tensors().values() if id(t.mean) not in counted]
    counted.update(id(t.mean) for t in found)
    terms = [torch.exp(-t.log_alpha()).expand_as(t.mean) for t in found]
    return sum(t.double().sum().item() / 2 for t in terms) if terms else None
