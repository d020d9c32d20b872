"""The swap: N(mu, sigma^2) weights become N(0, sigma^2) weights, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vardrop.checks import shown
from vardrop.conversion.selection import Where, check_selection, listed, selects
from vardrop.errors import VardropError
from vardrop.layers import Ties, Variational
from vardrop.noisy import noisy_modules
from vardrop.posteriors import AdditiveGaussian, MultiplicativeGaussian, Tensors, ZeroMean


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
                f"{kl / self.weights[name]:.3g} a weight"
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
      (net)  6 weights  3 nats, 0.5 a weight

    Neklyudov, Molchanov, Ashukha & Vetrov 2019, "Variance networks", sec. 5.
    """
    noisy = noisy_modules(net)
    check_selection("where", where)
    layers = {
        name: m
        for name, m in noisy.items()
        if isinstance(m, Variational) and m.posterior is not None and selects(where, m, name)
    }
    if not layers:
        raise VardropError(
            f"Expected `where` to select layers with noisy weights, but got {shown(where)}. "
            f"The noisy modules are {listed([n or '(net)' for n in noisy])}."
        )
    _check_gaussian(layers)
    # Everything is read before anything is written: tied layers lose their mean with the first.
    sigmas = [_sigmas(m) for m in layers.values()]
    counted: set[int] = set()
    found = {name: _swap_kl(layer, counted) for name, layer in layers.items()}
    kl = {name: value for name, value in found.items() if value is not None}
    sizes = {name: layers[name].weight.numel() for name in kl}
    tied: Ties = {}
    for layer, values in zip(layers.values(), sigmas, strict=True):
        _replace(layer, values, tied)
    return Swap(sizes, kl)


def _check_gaussian(layers: dict[str, Variational]) -> None:
    for name, layer in layers.items():
        if not isinstance(layer.posterior, AdditiveGaussian | MultiplicativeGaussian):
            raise VardropError(
                f"Expected module '{name or '(net)'}' to have a Gaussian posterior, but got "
                f"{layer.posterior!r}. Select others with `where`."
            )


def _noisy_tensors(layer: Variational) -> list[tuple[str, Tensor, Tensors]]:
    """The name that `ZeroMean` gives a scale, the mean and the noise: the weight's, the bias's."""
    found: list[tuple[str, Tensor, Tensors]] = [("sigma", layer.weight, layer._tensors(0))]
    if layer.noisy_bias and layer.bias is not None:
        found.append(("bias_sigma", layer.bias, layer._tensors(2)))
    return found


def _sigmas(layer: Variational) -> dict[str, Tensor]:
    assert layer.posterior is not None
    return {
        name: layer.posterior.variance(mean, noise).expand_as(mean).sqrt()
        for name, mean, noise in _noisy_tensors(layer)
    }


def _swap_kl(layer: Variational, counted: set[int]) -> float | None:
    """The KL of the tensors that are not counted yet; None where all are."""
    assert layer.posterior is not None
    found = [(m, noise) for _, m, noise in _noisy_tensors(layer) if id(m) not in counted]
    counted.update(id(mean) for mean, _ in found)
    terms = [torch.exp(-layer.posterior.log_alpha(m, noise)).expand_as(m) for m, noise in found]
    return sum(t.double().sum().item() / 2 for t in terms) if terms else None


def _replace(layer: Variational, sigmas: dict[str, Tensor], tied: Ties) -> None:
    prior, estimator, gate = layer.prior, layer.estimator, layer.gate
    switch, noisy_bias = layer.sampling, layer.noisy_bias
    fitted = {name: getattr(layer, name) for i in (1, 3) for name in layer._names[i]}
    layer.gate = None  # it stays as it is: neither its mean nor its noise is a weight's
    layer.make_plain()
    layer.make_noisy(ZeroMean(), prior, estimator, None, noisy_bias, tied)
    layer.gate, layer.sampling = gate, switch
    for name, value in {**sigmas, **fitted}.items():
        getattr(layer, name).copy_(value)
