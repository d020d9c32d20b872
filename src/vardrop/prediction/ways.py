"""The ways to draw outputs of a net: its mean, as its layers' estimators draw, or whole functions.

Each way is made once per call and then used as `way(x, samples)`, which gives blocks of outputs
(s, N, ...), and `way.rows(x)`, how many rows fit into the memory. Whole functions have a file of
their own.

Nets of modules in a row that treat every row of a batch alone are chains. There the draws of local
reparameterisation lie side by side as further rows, and what stands before the first noisy layer
runs once for all of them: up to three times as fast as vmap. Every module that may be in a chain is
in one table, with the shape of its output; any other net is no chain.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from vardrop.calls import call, mapped, one_tensor, rows, shapes, tensors_in, untouched
from vardrop.estimators import (
    LocalReparameterization,
    check_estimator,
    local_reparameterization,
)
from vardrop.functional import normal_like, standard_normal
from vardrop.gates import Dropout
from vardrop.layers import Conv1d, Conv2d, Conv3d, Linear, Variational
from vardrop.prediction.preparation import (
    Size,
    even,
    guarded,
    is_random,
    measured,
    per_axis,
    plain_forward,
    prepared,
    row_limit,
    watched,
)

_FUSED_STEPS = (nn.RNNBase, nn.RNNCellBase)  # torch's kernels know no vmap
_EXACT = (torch.float32, torch.float64)
_WORKING_SET = 2**24  # bytes beyond which fresh pages cost more on a CPU than a repeated call


class Way(Protocol):
    """One way to draw."""

    def rows(self, x: Any) -> int:
        """How many rows of x are drawn together within the memory."""

    def __call__(self, x: Any, samples: int) -> Iterator[Tensor]:
        """Blocks of outputs (s, N, ...), `samples` draws in all."""


_Run = Callable[[nn.Module, Any, int], Tensor]


class MeanPass:
    """One pass without noise, by the weight-scaling rule."""

    def __init__(self, net: nn.Module) -> None:
        self.net = prepared(net, noise=False)

    def rows(self, x: Any) -> int:
        return rows(x)

    def __call__(self, x: Any, samples: int) -> Iterator[Tensor]:
        with guarded(self.net):
            y = one_tensor(call(self.net, untouched(x)))
        yield y.unsqueeze(0)


class EstimatorDraws:
    """Fresh noise as each layer's estimator draws it, many draws at once.

    Nets whose modules stand in a row and treat every row of a batch alone hold the draws side by
    side as further rows; other nets run under vmap, or in a loop where vmap cannot carry them.
    """

    def __init__(
        self, net: nn.Module, memory: int, local: bool = False, block: int | None = None
    ) -> None:
        self.source, self.memory, self.local, self.block = net, memory, local, block
        self._twin: nn.Module | None = None
        self._plans: dict[tuple[torch.Size, ...], tuple[Chain | None, Size]] = {}

    @property
    def net(self) -> nn.Module:
        """The replica with its noise on, for nets that are no chain."""
        if self._twin is None:
            self._twin = prepared(self.source, noise=True, local=self.local)
        return self._twin

    def _known(self, x: Any) -> tuple[Chain | None, Size]:
        """The chain, if the net is one for such inputs, and what a draw holds."""
        key = shapes(x)
        if key not in self._plans:
            found = chain(self.source, x, self.local) if isinstance(x, Tensor) else None
            size = measured(self.net, x) if found is None else found.size
            self._plans[key] = found, size
        return self._plans[key]

    def rows(self, x: Any) -> int:
        return row_limit(self.source, self._known(x)[1], x, self.memory)

    def __call__(self, x: Any, samples: int) -> Iterator[Tensor]:
        found, size = self._known(x)
        on_cpu = tensors_in(x)[0].device.type == "cpu"
        most = min(self.memory, _WORKING_SET) if on_cpu else self.memory
        fit = max(1, most // size.bytes(rows(x)))
        sizes = even(samples, min(fit, self.block or samples))
        if found is not None:
            return side_by_side(found, x, sizes)
        return together(self.net, x, sizes)


def together(net: nn.Module, x: Any, sizes: list[int]) -> Iterator[Tensor]:
    """Outputs (s, N, ...) for every size by vmap: what depends on no noise runs once per block.

    A net that draws in place of its input needs a copy of it for every draw; one that vmap cannot
    carry at all, such as one with recurrent layers, runs in a loop.
    """
    runs: list[_Run] = [_vectorised, _vectorised_apart, _looped]
    if any(isinstance(m, _FUSED_STEPS) for m in net.modules()):
        runs = [_looped]
    for size in sizes:
        yield _first_that_runs(runs, net, x, size)


def _first_that_runs(runs: list[_Run], net: nn.Module, x: Any, size: int) -> Tensor:
    """The output of the first of the runs that works; those that do not are taken off the list."""
    while len(runs) > 1:
        try:
            return runs[0](net, x, size)
        except Exception as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            runs.pop(0)
        if len(runs) == 1:
            found = runs[0](net, x, size)  # raises if the net is at fault
            warnings.warn(
                f"Predicting by a slower loop: {_failing_module(net, x)} cannot run under vmap "
                f"({reason})",
                stacklevel=6,
            )
            return found
    return runs[0](net, x, size)


def _vectorised(net: nn.Module, x: Any, draws: int) -> Tensor:
    index = torch.arange(draws, device=tensors_in(x)[0].device)
    with guarded(net):  # a copy of x, because a forward may overwrite its input
        run = torch.vmap(lambda _: one_tensor(call(net, untouched(x))), randomness="different")
        return run(index)


def _vectorised_apart(net: nn.Module, x: Any, draws: int) -> Tensor:
    with guarded(net):
        run = torch.vmap(lambda row: one_tensor(call(net, untouched(row))), randomness="different")
        return run(mapped(lambda t: t.expand(draws, *t.shape), x))


def _looped(net: nn.Module, x: Any, draws: int) -> Tensor:
    with guarded(net):
        return torch.stack([one_tensor(call(net, untouched(x))) for _ in range(draws)])


def _failing_module(net: nn.Module, x: Any) -> str:
    """The innermost module that was entered and not left when vmap failed."""
    with ExitStack() as hooks:
        entered = watched(net, hooks)
        try:
            _vectorised_apart(net, x, 2)
        except Exception:
            name, module = entered[-1] if entered else ("(net)", net)
            return f"module '{name}' ({type(module).__name__})"
    return "the net"


Shape = tuple[int, ...]


def _same(module: Any, shape: Shape) -> Shape:
    return shape


def _flattened(module: nn.Flatten, shape: Shape) -> Shape | None:
    return (math.prod(shape),) if (module.start_dim, module.end_dim) == (1, -1) else None


def _softmaxed(module: nn.Softmax, shape: Shape) -> Shape | None:
    return None if module.dim in (None, 0) else shape


def _normalised(module: Any, shape: Shape) -> Shape | None:
    return None if module.running_mean is None else shape  # else it mixes rows


def _multiplied(module: nn.Linear, shape: Shape) -> Shape | None:
    fits = len(shape) > 0 and shape[-1] == module.in_features
    return (*shape[:-1], module.out_features) if fits else None


def _convolved(module: Any, shape: Shape) -> Shape | None:
    axes = len(module.kernel_size)
    if len(shape) != axes + 1 or shape[0] != module.in_channels:
        return None
    if module.padding == "same":
        return (module.out_channels, *shape[1:])
    size = _windows(module, shape[1:])
    return size and (module.out_channels, *size)


def _pooled(module: Any, shape: Shape, axes: int) -> Shape | None:
    size = _windows(module, shape[1:]) if len(shape) == axes + 1 else None
    return None if size is None or module.ceil_mode else (shape[0], *size)


def _windows(module: Any, size: Shape) -> Shape | None:
    """How many windows fit along each axis."""
    padding = 0 if module.padding == "valid" else module.padding
    kernel, stride, pad, dilation = (
        per_axis(value, len(size))
        for value in (module.kernel_size, module.stride, padding, getattr(module, "dilation", 1))
    )
    found = tuple(
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, k, s, p, d in zip(size, kernel, stride, pad, dilation, strict=True)
    )
    return found if min(found) > 0 else None


# Modules that treat every row alone and, but for dropout, draw nothing: the shape after each.
_ROWWISE: dict[type[nn.Module], Callable[[Any, Shape], Shape | None]] = {
    **dict.fromkeys(
        (
            nn.ReLU,
            nn.LeakyReLU,
            nn.Tanh,
            nn.Sigmoid,
            nn.GELU,
            nn.SiLU,
            nn.ELU,
            nn.Softplus,
            nn.Identity,
            nn.LayerNorm,
            nn.GroupNorm,
            nn.Dropout,
            Dropout,
        ),
        _same,
    ),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), _normalised),
    **dict.fromkeys((nn.Linear, Linear), _multiplied),
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d, Conv1d, Conv2d, Conv3d), _convolved),
    **dict.fromkeys((nn.MaxPool1d, nn.AvgPool1d), partial(_pooled, axes=1)),
    **dict.fromkeys((nn.MaxPool2d, nn.AvgPool2d), partial(_pooled, axes=2)),
    nn.Flatten: _flattened,
    nn.Softmax: _softmaxed,
}


class Chain(NamedTuple):
    """The modules before the first noisy layer, that layer and what follows; the largest output.

    What stands before is known to draw nothing, so that it may run once for all draws.
    """

    before: list[nn.Module]
    first: Variational
    after: list[nn.Module]
    floors: dict[nn.Module, float]  # of the noisy layers
    size: Size


def chain(net: nn.Module, x: Tensor, local: bool = False) -> Chain | None:
    """A net as a chain whose noise begins with local reparameterisation of a layer, or None."""
    modules = _links(net)
    start = next((i for i, m in enumerate(modules) if is_random(m)), -1)
    first = modules[start]
    if start < 0 or not isinstance(first, Variational):
        return None
    size = _known_size(modules, start, x)
    if size is None or torch.is_autocast_enabled(first.weight.device.type):
        return None
    found = {m: _local(m, local) for m in modules if isinstance(m, Variational)}
    floors: dict[nn.Module, float] = {m: e.floor for m, e in found.items() if e is not None}
    if len(floors) < len(found) or not all(map(plain_forward, modules)):
        return None
    modules = [_private(m) for m in modules]
    return Chain(modules[:start], first, _reordered(modules[start + 1 :]), floors, size)


def _known_size(modules: list[nn.Module], start: int, x: Tensor) -> Size | None:
    """The largest output from `start` on, if all modules are known to treat every row alone."""
    shape: Shape | None = tuple(x.shape[1:])
    largest = 1
    for i, module in enumerate(modules):
        rule = _ROWWISE.get(type(module))
        shape = None if rule is None or shape is None else rule(module, shape)
        if shape is None:
            return None
        largest = max(largest, math.prod(shape)) if i >= start else 1
    return Size(largest)


def _links(net: nn.Module) -> list[nn.Module]:
    """The modules of nested `nn.Sequential`s in the order of their calls; else the net itself."""
    if type(net) is nn.Sequential and plain_forward(net):
        return [link for child in net for link in _links(child)]
    return [net]


def _local(layer: Variational, local: bool) -> LocalReparameterization | None:
    """The layer's local reparameterisation, if it draws so and in full precision."""
    estimator = local_reparameterization if local else layer.estimator
    if layer.gate is not None or layer.posterior is None:
        return None
    if type(estimator) is not LocalReparameterization or layer.weight.dtype not in _EXACT:
        return None
    if local:
        check_estimator(estimator, layer.posterior)
    return estimator


def _private(module: nn.Module) -> nn.Module:
    """The module, or a copy in the mode of prediction where it has modes or works in place."""
    modal = isinstance(module, nn.modules.batchnorm._BatchNorm | nn.Dropout)
    return prepared(module, noise=True) if modal or getattr(module, "inplace", False) else module


class _LocalLayer:
    """A layer with local reparameterisation, without gradients: its variances serve every draw."""

    def __init__(self, layer: Variational, floor: float) -> None:
        self.channels_last = type(layer) is Conv2d  # faster for convolutions and pooling
        affine = layer.affine()
        weight, bias = (v.to(affine.weight.mean.dtype) for v in affine.variances(floor))
        if self.channels_last:
            laid_out = replace(affine.weight, mean=self._laid_out(affine.weight.mean))
            affine = replace(affine, weight=laid_out)
        self.affine, self.variances = affine, (self._laid_out(weight), bias)

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
        mean = self.affine.mean_output((x,))
        return mean if mean is None or mean.dim() < x.dim() else self._laid_out(mean)

    def _deviation(self, squares: Tensor) -> Tensor:
        return self._laid_out(self.affine.variance_output((squares,), self.variances).sqrt_())

    def _laid_out(self, y: Tensor) -> Tensor:
        # One input channel fits both layouts, and torch then takes the slower one.
        return y.contiguous(memory_format=torch.channels_last) if self.channels_last else y


def side_by_side(found: Chain, x: Tensor, sizes: list[int]) -> Iterator[Tensor]:
    """Outputs (s, N, ...) for every size, the draws laid side by side as rows.

    What follows the first noisy layer belongs to nobody else, so it is overwritten in place.
    """
    for module in found.before:
        x = module(x)
    first = _LocalLayer(found.first, found.floors[found.first])
    steps = [
        _LocalLayer(cast(Variational, m), found.floors[m]) if m in found.floors else m
        for m in found.after
    ]
    mean, std = first.moments(x)
    for size in sizes:
        y = _repeated(mean, std, size)
        for step in steps:
            y = y.relu_() if type(step) is nn.ReLU else step(y)
        yield y.view(size, std.shape[0], *y.shape[1:])


def _reordered(modules: list[nn.Module]) -> list[nn.Module]:
    """Pooling by the maximum goes before a ReLU, with which it commutes: fewer elements."""
    found = list(modules)
    for i, (a, b) in enumerate(pairwise(modules)):
        if type(a) is nn.ReLU and isinstance(b, nn.MaxPool1d | nn.MaxPool2d):
            found[i], found[i + 1] = b, a
    return found


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
