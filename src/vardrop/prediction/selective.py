"""Selective mean propagation: noise only where the likelihood feels it.

Weights with a small |kappa| (`functional.curvature.kappa`) take their mean; the others go on being
sampled. Where no kappa is given it is measured with y from the model, as there are no labels.

Neklyudov, Molchanov, Ashukha & Vetrov 2019, "Variance networks".
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from vardrop.errors import VardropError
from vardrop.functional.curvature import diagonal_fisher
from vardrop.functional.curvature import kappa as kappa_of
from vardrop.layers import Variational
from vardrop.posteriors import Axes, Posterior, Sharing, Tensors
from vardrop.prediction.modes import prepared
from vardrop.prediction.outputs import Likelihood

_DRAWS, _PROBES = 16, 4
_MASK = "sampled"


@dataclass(frozen=True)
class SelectedNoise(Posterior):
    """Another posterior, with its noise only where the tensor `sampled` is one."""

    whole: Posterior

    @property
    def gaussian(self) -> bool:
        return self.whole.gaussian

    @property
    def noise_per(self) -> Sharing | None:
        return self.whole.noise_per

    @property
    def symmetric(self) -> bool:  # type: ignore[override]
        return self.whole.symmetric

    @property
    def zero_mean(self) -> bool:  # type: ignore[override]
        return self.whole.zero_mean

    @property
    def learned(self) -> bool:
        return self.whole.learned

    def initial(self, weight: Tensor, axes: Axes) -> dict[str, Tensor]:
        return {**self.whole.initial(weight, axes), _MASK: torch.ones_like(weight)}

    def variance(self, weight: Tensor, tensors: Tensors) -> Tensor:
        return self.whole.variance(weight, tensors) * tensors.get(_MASK, 1)

    def draw(self, weight: Tensor, axes: Axes, batch: tuple[int, ...] = ()) -> Tensor:
        return self.whole.draw(weight, axes, batch)

    def deviation(self, weight: Tensor, noise: Tensor, tensors: Tensors) -> Tensor:
        return self.whole.deviation(weight, noise, tensors) * tensors.get(_MASK, 1)

    def log_alpha(self, weight: Tensor, tensors: Tensors) -> Tensor:
        return self.whole.log_alpha(weight, tensors)


class Selected(NamedTuple):
    """A copy of a net with part of its noise, and which share of the weights has it."""

    net: nn.Module
    share: float


def select(
    net: nn.Module,
    x: Tensor,
    threshold: float | None,
    kappa: Mapping[str, Tensor] | None,
    likelihood: Likelihood,
    noise_std: float,
) -> Selected:
    """Copy a net and keep the noise of the weights whose |kappa| exceeds the threshold."""
    if threshold is None or not threshold >= 0:
        raise VardropError(
            f"Expected `threshold` to be at least 0 for mode='selective', but got {threshold}. "
            "Take a quantile of |kappa|."
        )
    layers = _layers(net)
    found = kappa if kappa is not None else measure(net, x, likelihood, noise_std)
    first = {id(layer.weight): name for name, layer in reversed(layers.items())}
    owner = {name: first[id(layer.weight)] for name, layer in layers.items()}  # of a tied weight
    if missing := sorted(set(owner.values()) - set(found)):
        raise VardropError(f"Expected `kappa` of every noisy layer, but got none for {missing}.")
    selected = copy.deepcopy(net)
    sampled = total = 0
    for name, layer in _layers(selected).items():
        mask = found[owner[name]].abs() > threshold
        sampled, total = sampled + int(mask.sum()), total + mask.numel()
        assert layer.posterior is not None
        layer.posterior = SelectedNoise(layer.posterior)
        layer.register_buffer(_MASK, mask.expand_as(layer.weight).to(layer.weight.dtype))
        layer._names = ((*layer._names[0], _MASK), *layer._names[1:])
    return Selected(selected, sampled / total)


def _layers(net: nn.Module) -> dict[str, Variational]:
    found = {
        name: m
        for name, m in net.named_modules()
        if isinstance(m, Variational) and m.posterior is not None
    }
    if not found:
        raise VardropError(
            'Expected noisy weights for mode="selective", but got none. Use mode="sample".'
        )
    return found


def measure(
    net: nn.Module, x: Tensor, likelihood: Likelihood, noise_std: float
) -> dict[str, Tensor]:
    """kappa of every noisy weight by layer name, averaged over rows, draws and y ~ p(y | x, w).

    The expected Hessian is minus the Fisher matrix, whose diagonal needs first derivatives only.
    """
    layers = {id(m.weight): (n, m) for n, m in reversed(_layers(net).items())}  # a tied one once
    named = dict(reversed(layers.values()))
    keys = [f"{name}.weight".lstrip(".") for name in named]

    def curvature(leaves: Sequence[Tensor]) -> list[Tensor]:
        output = functional_call(net, dict(zip(keys, leaves, strict=True)), (x,))
        score = _score(output.detach(), likelihood, noise_std)
        return [-f / len(x) for f in diagonal_fisher(output, leaves, score, _PROBES)]

    with torch.enable_grad(), prepared(net, noise=False):
        variances = [layer.variance().detach() for layer in named.values()]
        found = kappa_of(
            variances, lambda: [m.draw_weight() for m in named.values()], curvature, _DRAWS
        )
    return dict(zip(named, found, strict=True))


def _score(output: Tensor, likelihood: Likelihood, noise_std: float) -> Callable[[], Tensor]:
    """Draws d log p(y | output) / d output for y from the model."""
    if likelihood == "categorical":
        probs = output.softmax(1).movedim(1, -1)

        def categorical() -> Tensor:
            drawn = torch.multinomial(probs.flatten(0, -2), 1).view(probs.shape[:-1])
            chosen = nn.functional.one_hot(drawn, probs.shape[-1])
            return (chosen - probs).movedim(-1, 1)

        return categorical
    if likelihood == "bernoulli":
        return lambda: torch.bernoulli(output.sigmoid()) - output.sigmoid()
    if likelihood == "gaussian":
        return lambda: torch.randn_like(output) / (noise_std or 1.0)
    mean, log_variance = output.chunk(2, dim=-1)

    def heteroscedastic() -> Tensor:
        noise = torch.randn_like(mean)
        return torch.cat([noise * torch.exp(-0.5 * log_variance), (noise.square() - 1) / 2], -1)

    return heteroscedastic
