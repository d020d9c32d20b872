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
from functools import partial, reduce
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from vardrop._core.calls import call, mapped, one_tensor, rows, shapes, tensors_in, untouched
from vardrop._core.modules import clone_modules
from vardrop.estimators import (
    LocalReparameterization,
    check_estimator,
    local_reparameterization,
)
from vardrop.functional import normal_like, standard_normal
from vardrop.gates import Dropout
from vardrop.layers import Conv1d, Conv2d, Conv3d, Linear, Variational
from vardrop.noisy import Noisy, evaluating, sampling
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
_CACHED = 2**18  # elements of the largest output that stay in the cache with what is made of them
_FEWEST_ROWS = 96  # that a convolution is given at once
_LANES = 16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 1  # of a float register


class Way(Protocol):
    """One way to draw."""

    def rows(self, x: Any) -> int:
        """How many rows of x are drawn together within the memory."""

    def __call__(self, x: Any, samples: int) -> Iterator[Tensor]:
        """Blocks of outputs (s, N, ...), `samples` draws in all."""


_Run = Callable[[nn.Module, Any, int], Tensor]


class SpreadDraws:
    """Draws of a net whose tensors are spread over processes, one after the other.

    A copy of such a net is none, so its own modules are switched meanwhile, and switched back.
    """

    def __init__(self, net: nn.Module, run: Callable[[Any], Any], noise: bool) -> None:
        self.net, self.run, self.noise = net, run, noise

    def rows(self, x: Any) -> int:
        return rows(x)

    def __call__(self, x: Any, samples: int) -> Iterator[Tensor]:
        with evaluating(self.net), sampling(self.net, self.noise), guarded(self.net):
            for _ in range(samples if self.noise else 1):
                yield one_tensor(self.run(untouched(x))).unsqueeze(0)


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
            found = None if found is None else found.laid_out()
            # On a replica: several threads may be running the other.
            size = measured(clone_modules(self.net), x) if found is None else found.size
            self._plans[key] = found, size
        return self._plans[key]

    def rows(self, x: Any) -> int:
        return row_limit(self.source, self._known(x)[1], x, self.memory)

    def __call__(self, x: Any, samples: int) -> Iterator[Tensor]:
        found, size = self._known(x)
        on_cpu = tensors_in(x)[0].device.type == "cpu"
        working = found is None and on_cpu  # a chain sees to the cache by itself
        most = min(self.memory, _WORKING_SET) if working else self.memory
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

    What stands before is known to draw nothing, so that it may run once for all draws. `widths` has
    the noise that each noisy layer needs for a row.
    """

    before: list[nn.Module]
    first: LocalLayer
    after: list[nn.Module]
    widths: list[int]
    size: Size

    def laid_out(self) -> Chain:
        """The chain with its layers in the memory layout that is fastest."""
        after = [m.laid_out() if isinstance(m, LocalLayer) else m for m in self.after]
        return self._replace(first=self.first.laid_out(), after=after)


def chain(net: nn.Module, x: Tensor, local: bool = False) -> Chain | None:
    """A net as a chain whose noise begins with local reparameterisation of a layer, or None."""
    modules = links(net)
    start = next((i for i, m in enumerate(modules) if is_random(m)), -1)
    first = modules[start]
    if start < 0 or not isinstance(first, Variational | LocalLayer):
        return None
    shapes = _known_shapes(modules, x)
    if shapes is None or torch.is_autocast_enabled(x.device.type):
        return None
    layers = {m: local_layer(m, local) for m in modules if isinstance(m, Variational | LocalLayer)}
    known = {m: layer for m, layer in layers.items() if layer is not None}
    if len(known) < len(layers) or not all(map(plain_forward, modules)):
        return None
    widths = [math.prod(s) for m, s in zip(modules, shapes, strict=True) if m in known]
    steps = [known[m] if m in known else _private(m) for m in modules]
    size = Size(max(math.prod(s) for s in shapes[start:]))
    return Chain(steps[:start], known[first], _reordered(steps[start + 1 :]), widths, size)


def _known_shapes(modules: list[nn.Module], x: Tensor) -> list[Shape] | None:
    """The shape of a row after each module, if all are known to treat every row alone."""
    shape: Shape | None = tuple(x.shape[1:])
    found: list[Shape] = []
    for module in modules:
        rule = _ROWWISE.get(module.kind if isinstance(module, LocalLayer) else type(module))
        shape = None if rule is None or shape is None else rule(module, shape)
        if shape is None:
            return None
        found.append(shape)
    return found


def links(net: nn.Module) -> list[nn.Module]:
    """The modules of nested `nn.Sequential`s in the order of their calls; else the net itself."""
    if type(net) is nn.Sequential and plain_forward(net):
        return [link for child in net for link in links(child)]
    return [net]


def _private(module: nn.Module) -> nn.Module:
    """The module, or a copy in the mode of prediction where it has modes or works in place."""
    modal = isinstance(module, nn.modules.batchnorm._BatchNorm | nn.Dropout)
    return prepared(module, noise=True) if modal or getattr(module, "inplace", False) else module


_CONVOLUTIONS: dict[type[Variational], Callable[..., Tensor]] = {
    Conv1d: functional.conv1d,
    Conv2d: functional.conv2d,
    Conv3d: functional.conv3d,
}
_GEOMETRY = ("in_features", "out_features", "in_channels", "out_channels", "kernel_size", "stride",
             "padding", "dilation")  # fmt: skip


class LocalLayer(Noisy):
    """A dense layer or convolution with local reparameterisation, its variances computed once.

    y ~ N(op(x, weight) + bias, op(x^2, variance) + bias_variance): buffers, no gradients, no KL.
    """

    kind: type[Variational]
    op: Callable[..., Tensor]
    channels_last: bool
    weight: Tensor | None
    bias: Tensor | None
    variance: Tensor
    bias_variance: Tensor
    square: Tensor | None  # of the weight, where moments are carried through the layer
    sign: Tensor | None  # of the deviation, where an output was scaled by a negative number
    outputs: int | None  # how many of the outputs are meant, where others were added

    def __init__(self, layer: Variational, floor: float) -> None:
        super().__init__()
        geometry = {k: v for k, v in vars(layer).copy().items() if k in _GEOMETRY}
        own = {"kind": type(layer), "op": _product(layer), "channels_last": False, "outputs": None}
        vars(self).update(geometry, **own)  # what nn.Module does on setting an attribute is slow
        affine = layer.affine()
        mean, bias = affine.weight.mean.detach(), affine.mean_bias
        variance, bias_variance = (v.detach().to(mean.dtype) for v in affine.variances(floor))
        self._buffers.update(
            weight=None if affine.weight.posterior.zero_mean else mean,
            bias=None if bias is None else bias.detach(),
            variance=variance,
            bias_variance=bias_variance,
            square=None,
            sign=None,
        )

    def forward(self, x: Tensor, noise: Tensor | None = None) -> Tensor:
        """A draw while sampling or for given noise, else the mean."""
        mean = self.mean(x)
        if not (self.is_sampling or noise is not None):
            return mean if self.weight is not None else mean.expand_as(self.spread(x * x))
        std = self.deviation(x * x)
        return torch.addcmul(mean, std, normal_like(std) if noise is None else noise)

    def mean(self, x: Tensor) -> Tensor:
        """E y; only the bias, or zero, where the weights have no mean."""
        if self.weight is not None:
            return self._meant(self.op(x, self.weight, self.bias))
        bias = torch.zeros_like(self.bias_variance) if self.bias is None else self.bias
        return self._per_output(bias)

    def spread(self, squares: Tensor) -> Tensor:
        """Var y for squared inputs."""
        return self._meant(self.op(squares, self.variance, self.bias_variance))

    def _meant(self, y: Tensor) -> Tensor:
        return y if self.outputs is None else y[:, : self.outputs]

    def deviation(self, squares: Tensor) -> Tensor:
        """What multiplies the noise of every output."""
        std = self.spread(squares).sqrt_()
        return std if self.sign is None else std.mul_(self._per_output(self.sign))

    def _per_output(self, values: Tensor) -> Tensor:
        return values.view(-1, *(1,) * (self.variance.dim() - 2))

    def moments(self, x: Tensor, squares: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and deviation of the output, in the memory layout of the layer."""
        std = self._like_weight(self.deviation(squares))  # of squares that are in the cache
        return self._like_weight(self.mean(x)), std

    def drawn(self, x: Tensor, noise: Tensor) -> Tensor:
        """One draw of the output for every row, for as much flat noise; x is overwritten."""
        mean = self.mean(x)
        std = self._like_weight(self.deviation(x.mul_(x)))
        y = _viewed(noise, std)
        return torch.addcmul(self._like_weight(mean), std, y, out=y)

    def _like_weight(self, y: Tensor) -> Tensor:
        # One input channel fits both layouts, and torch then takes the slower one.
        return _channels_last(y) if self.channels_last and y.stride(1) != 1 else y

    def output_shape(self, x: Tensor) -> Shape:
        """The shape of a row of the output for such rows."""
        found = _ROWWISE[self.kind](self, tuple(x.shape[1:]))
        assert found is not None
        return found

    def with_squares(self) -> LocalLayer:
        """The layer, with the squares of its mean weights."""
        self.square = None if self.weight is None else self.weight.square()
        return self

    def scale_outputs(self, scale: Tensor, shift: Tensor) -> None:
        """Let the layer give scale y + shift in the place of y, per output."""
        rows = scale.view(-1, *(1,) * (self.variance.dim() - 1))
        self.variance, self.bias_variance = (
            self.variance * rows.square(),
            self.bias_variance * scale.square(),
        )
        self.weight = None if self.weight is None else self.weight * rows
        self.square = None if self.square is None else self.square * rows.square()
        self.bias = shift if self.bias is None else self.bias * scale + shift
        if bool((scale < 0).any()):
            self.sign = scale.sign()  # of one folding: a second one would stand in a row with it

    def laid_out(self) -> LocalLayer:
        """The layer in the memory layout that is fastest.

        Outputs come in whole registers, with outputs of zeros after them where there are too few:
        of 50 the last two take longer than sixteen.
        """
        if self.kind is not Conv2d:
            return self
        grouped = self.variance.shape[1] != vars(self)["in_channels"]
        more = 0 if grouped or not self.variance.is_cpu else -len(self.variance) % _LANES
        twin = clone_modules(self)
        twin.channels_last, twin.outputs = True, len(self.variance) if more else None
        twin.variance = _channels_last(_longer(self.variance, more))
        twin.bias_variance = _longer(self.bias_variance, more)
        if self.weight is not None:
            twin.weight = _channels_last(_longer(self.weight, more))
            twin.bias = None if self.bias is None else _longer(self.bias, more)
        return twin


def _longer(values: Tensor, more: int) -> Tensor:
    return torch.cat([values, values.new_zeros(more, *values.shape[1:])]) if more else values


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def _product(layer: Variational) -> Callable[..., Tensor]:
    """The product of a layer as a function that holds no tensor."""
    if type(layer) is Linear:
        return functional.linear
    convolution = cast(Any, layer)
    geometry = {k: getattr(convolution, k) for k in ("stride", "padding", "dilation", "groups")}
    if convolution.padding_mode == "zeros":
        return partial(_CONVOLUTIONS[type(layer)], **geometry)
    around = list(convolution._reversed_padding_repeated_twice)
    product = partial(_CONVOLUTIONS[type(layer)], **{**geometry, "padding": 0})
    return partial(_padded, product, around, convolution.padding_mode)


def _padded(
    product: Callable[..., Tensor], around: list[int], mode: str, x: Tensor, *tensors: Tensor
) -> Tensor:
    return product(functional.pad(x, around, mode), *tensors)


def local_layer(layer: nn.Module, local: bool = False) -> LocalLayer | None:
    """The layer with its variances, if it draws by local reparameterisation in full precision."""
    if isinstance(layer, LocalLayer):
        return layer
    if not isinstance(layer, Variational) or not has_known_product(layer):
        return None
    estimator = local_reparameterization if local else layer.estimator
    if layer.posterior is None or type(estimator) is not LocalReparameterization:
        return None
    if local:
        check_estimator(estimator, layer.posterior)
    return LocalLayer(layer, estimator.floor)


def has_known_product(layer: Variational) -> bool:
    """Whether a `LocalLayer` can hold the product of a layer with noisy weights."""
    known = type(layer) in (Linear, *_CONVOLUTIONS) and layer.weight.dtype in _EXACT
    return known and layer.gate is None and layer.posterior is not None


def side_by_side(found: Chain, x: Tensor, sizes: list[int]) -> Iterator[Tensor]:
    """Outputs (s, N, ...) for every size, the draws laid side by side as rows.

    Rows are taken in blocks that stay in the cache. What follows the first noisy layer belongs to
    nobody else, so it is overwritten in place.
    """
    for module in found.before:
        x = module(x)
    mean, std = found.first.moments(x, x * x)
    count = std.shape[0]
    block = count * max(sizes)
    if std.is_cpu:
        block = max(_FEWEST_ROWS, _CACHED // found.size.row)
    for size in sizes:
        if count * size <= block:
            yield _drawn(found, mean, std, size)
            continue
        out: Tensor | None = None
        for start in range(0, count, block):
            rows = slice(start, start + block)
            part = mean[rows] if mean.dim() == std.dim() else mean, std[rows]
            at = 0
            for draws in even(size, max(1, block // part[1].shape[0])):
                y = _drawn(found, *part, draws)
                out = y.new_empty(size, count, *y.shape[2:]) if out is None else out
                out[at : at + draws, rows], at = y, at + draws
        assert out is not None
        yield out


def _drawn(found: Chain, mean: Tensor, std: Tensor, draws: int) -> Tensor:
    """Outputs (draws, N, ...) from the moments of the first noisy layer."""
    rows = draws * std.shape[0]
    flat = standard_normal((rows * sum(found.widths),), std)
    noise = iter(flat.split([rows * width for width in found.widths]))
    y = _repeated(mean, std, next(noise))
    for step in found.after:
        if isinstance(step, LocalLayer):
            y = step.drawn(y, next(noise))
        elif type(step) is nn.ReLU:
            y = y.relu_()
        else:
            y = _largest(y, step) if type(step) is nn.MaxPool2d else step(y)
    return y.view(draws, std.shape[0], *y.shape[1:])


def _reordered(modules: list[nn.Module]) -> list[nn.Module]:
    """Pooling by the maximum goes before a ReLU, with which it commutes: fewer elements."""
    found = list(modules)
    for i, (a, b) in enumerate(pairwise(modules)):
        if type(a) is nn.ReLU and isinstance(b, nn.MaxPool1d | nn.MaxPool2d):
            found[i], found[i + 1] = b, a
    return found


def _largest(y: Tensor, pool: nn.MaxPool2d) -> Tensor:
    """Pooling by the maximum; of channels-last windows side by side by elementwise maxima.

    Which are faster, since torch looks for the places of the maxima too.
    """
    (height, width), stride = (per_axis(v, 2) for v in (pool.kernel_size, pool.stride))
    rows, columns = y.shape[-2] // height * height, y.shape[-1] // width * width
    plain = per_axis(pool.padding, 2) == (0, 0) and per_axis(pool.dilation, 2) == (1, 1)
    if y.is_contiguous() or stride != (height, width) or not plain or pool.return_indices:
        found: Tensor = pool(y)
        return found
    flat = reduce(torch.maximum, [y[..., j:columns:width] for j in range(width)])
    return reduce(torch.maximum, [flat[:, :, i:rows:height] for i in range(height)])


def _viewed(noise: Tensor, like: Tensor) -> Tensor:
    """Flat noise in the shape and the memory layout of another tensor."""
    if like.dim() == 4 and not like.is_contiguous():
        n, c, h, w = like.shape
        return noise.view(n, h, w, c).permute(0, 3, 1, 2)
    return noise.view(like.shape)


def _repeated(mean: Tensor, std: Tensor, noise: Tensor) -> Tensor:
    """Independent draws of one layer's output, side by side as rows, in its memory layout."""
    channels_last = std.dim() == 4 and not std.is_contiguous()
    if channels_last:
        mean, std = _last(mean), _last(std)
    y = noise.view(-1, *std.shape)
    y = torch.addcmul(mean, std, y, out=y).flatten(0, 1)
    return y.permute(0, 3, 1, 2) if channels_last else y


def _last(x: Tensor) -> Tensor:
    return x.permute(0, 2, 3, 1) if x.dim() == 4 else x.view(-1)
