"""Chains: nets of modules in a row that treat every row of a batch alone.

In such a net the draws can be laid side by side as further rows behind the first noisy layer, which
spares the cost of vmap. What lies behind it belongs to nobody else, so it is overwritten in place.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from vardrop.estimators import LocalReparameterization
from vardrop.functional import normal_like, standard_normal
from vardrop.layers import Conv1d, Conv2d, Conv3d, Linear, Variational
from vardrop.noisy import Noisy
from vardrop.prediction.modes import drops, prepared
from vardrop.prediction.shapes import ELEMENTWISE, links

_MODELESS = {
    *ELEMENTWISE, nn.Softmax, nn.Flatten, nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.LayerNorm,
    nn.GroupNorm, nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool1d, nn.AvgPool2d, nn.AdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d,
}  # fmt: skip
_ROW_BY_ROW = {*_MODELESS, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.Dropout}
_LAYERS = {Linear, Conv1d, Conv2d, Conv3d}
_LAST = torch.channels_last  # faster for convolutions and pooling, on CPU and GPU alike


class Chain(NamedTuple):
    """The modules before the first noisy layer, that layer, and those behind it."""

    before: list[nn.Module]
    first: Variational
    behind: list[nn.Module]

    @property
    def modes_matter(self) -> bool:
        """Whether a module does something else in training mode."""
        others = (*self.before, *self.behind)
        return not all(type(m) in _MODELESS or isinstance(m, Variational) for m in others)


def chain(net: nn.Module) -> Chain | None:
    """The net as a chain whose noise begins with local reparameterisation of a layer, or None."""
    modules = links(net)
    if any(m._forward_hooks or m._forward_pre_hooks for m in net.modules()):
        return None
    start = next((i for i, m in enumerate(modules) if _has_noise(m)), None)
    if start is None or not all(_row_by_row(m) for m in modules[start:]):
        return None
    first = modules[start]
    if not isinstance(first, Variational):
        return None
    return Chain(modules[:start], first, modules[start + 1 :])


def _has_noise(module: nn.Module) -> bool:
    return any(isinstance(m, Noisy) or drops(m) for m in module.modules())


def _row_by_row(module: nn.Module) -> bool:
    if isinstance(module, Variational):
        fits = module.gate is None and module.posterior is not None and type(module) in _LAYERS
        narrow = torch.finfo(module.weight.dtype).bits < 32 or torch.is_autocast_enabled(
            module.weight.device.type
        )
        if narrow:  # variances need more range or precision than the products have
            return False
        return fits and type(module.estimator) is LocalReparameterization
    if isinstance(module, nn.Flatten) and module.start_dim != 1:
        return False
    if isinstance(module, nn.Softmax) and module.dim in (None, 0):
        return False
    return type(module) in _ROW_BY_ROW


class _Drawer:
    """A layer with local reparameterisation whose variances serve every draw of a call."""

    def __init__(self, layer: Variational) -> None:
        posterior, estimator = layer.posterior, layer.estimator
        assert posterior is not None
        assert isinstance(estimator, LocalReparameterization)
        self.op: Callable[..., Tensor] = (
            functional.linear if type(layer) is Linear else layer._op  # type: ignore[assignment]
        )
        self.weight, self.bias, self.zero_mean = layer.weight, layer.bias, posterior.zero_mean
        self.variance = posterior.variance(self.weight, layer._tensors(0))
        self.floor = self.variance.new_full((layer.outputs,), estimator.floor)
        if layer.noisy_bias:
            self.floor += posterior.variance(self.bias, layer._tensors(2))
        self.trailing, self.channels_last = layer.spatial, type(layer) is Conv2d
        if self.channels_last:
            self.weight = self.weight.contiguous(memory_format=_LAST)
            self.variance = self.variance.contiguous(memory_format=_LAST)

    def moments(self, x: Tensor) -> tuple[Tensor | None, Tensor]:
        """Mean and deviation of the output."""
        std = self._deviation(x * x)  # first, while the variances are in the cache
        return self._mean(x), std

    def __call__(self, x: Tensor) -> Tensor:
        """One draw of the output for every row; x is overwritten."""
        mean = self._mean(x)
        std = self._deviation(x.mul_(x))
        y = std.mul_(normal_like(std))
        return y if mean is None else y.add_(mean)

    def _mean(self, x: Tensor) -> Tensor | None:
        if not self.zero_mean:
            return self._laid_out(self.op(x, self.weight, self.bias))
        return None if self.bias is None else self.bias.view(-1, *(1,) * self.trailing)

    def _deviation(self, squared: Tensor) -> Tensor:
        return self._laid_out(self.op(squared, self.variance, self.floor).sqrt_())

    def _laid_out(self, y: Tensor) -> Tensor:
        # One input channel fits both layouts, and torch then takes the slower one.
        return y.contiguous(memory_format=_LAST) if self.channels_last else y


def chain_draws(
    net: nn.Module, parts: Chain, x: Tensor, sizes: list[int]
) -> Generator[Tensor, None, None]:
    """Outputs (s, N, ...) for every size, the draws laid side by side as rows."""
    with prepared(net, noise=True) if parts.modes_matter else nullcontext():
        for module in parts.before:
            x = module(x)
        mean, std = _Drawer(parts.first).moments(x)
        rows = std.shape[0]
        steps = [_Drawer(m) if isinstance(m, Variational) else m for m in parts.behind]
        for size in sizes:
            y = _repeated(mean, std, size)
            for step in steps:
                y = y.relu_() if type(step) is nn.ReLU else step(y)
            yield y.view(size, rows, *y.shape[1:])


def _repeated(mean: Tensor | None, std: Tensor, draws: int) -> Tensor:
    """Independent draws of one layer's output, side by side as rows, in its memory layout."""
    channels_last = std.dim() == 4 and not std.is_contiguous()
    if channels_last:
        mean, std = None if mean is None else _last(mean), _last(std)
    y = standard_normal((draws, *std.shape), std).mul_(std)
    y = (y if mean is None else y.add_(mean)).flatten(0, 1)
    return y.permute(0, 3, 1, 2) if channels_last else y


def _last(x: Tensor) -> Tensor:
    return x.permute(0, 2, 3, 1) if x.dim() == 4 else x.view(-1)
