"""Moment propagation: one analytic pass that carries mean and variance through a net.

A `RandomTensor` travels through the net's own forward in the place of the input, so residual sums
and functional calls need no tracing; every torch function it meets has a rule by its name, and
noisy layers and gates add their variance. Units are taken as independent and as normal where a
non-linearity needs their shape: exact through one affine layer, an approximation below it. What has
no rule is refused by name, noise that a forward draws by itself too.

Wang & Manning 2013, "Fast dropout training", sec. 3; Frey & Hinton 1999 (rectified moments).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from functools import singledispatch
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional

from vardrop._core.errors import VardropError
from vardrop.functional import NoiseCalls, function_moments, max_moments, relu_moments
from vardrop.gates import Gate
from vardrop.gates.base import along
from vardrop.layers import Variational
from vardrop.noisy import replica
from vardrop.prediction.preparation import (
    Size,
    even,
    is_random,
    may_draw,
    per_axis,
    prepared,
    watched,
)
from vardrop.prediction.ways import LocalLayer

_BLOCK = 2**17  # elements that stay in the cache together


class Pair(NamedTuple):
    """Mean and variance of a tensor; None is a variance of zero."""

    mean: Tensor
    variance: Tensor | None

    @property
    def spread(self) -> Tensor:
        """The variance as a tensor."""
        return torch.zeros_like(self.mean) if self.variance is None else self.variance


class UnsupportedError(Exception):
    """An operation without a rule."""


Rule = Callable[..., Any]
RULES: dict[str, Rule] = {}


class RandomTensor:
    """A tensor of independent normal numbers that stands for the net's own tensors.

    With `rectified` the moments are those before a ReLU that has not been taken yet: a pooling by
    the maximum takes it along, at less cost and more exactly.
    """

    def __init__(self, raw: Pair, rectified: bool = False) -> None:
        self.raw, self.rectified = raw, rectified

    @property
    def moments(self) -> Pair:
        """Mean and variance."""
        if self.rectified:
            self.raw, self.rectified = _relu(self.raw), False
        return self.raw

    def assign(self, other: RandomTensor) -> RandomTensor:
        """Take the value of another, as an operation in place does."""
        self.raw, self.rectified = other.raw, other.rectified
        return self

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return _apply(getattr(function, "__name__", repr(function)), args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in ("dim", "size", "numel", "is_floating_point", "stride", "is_contiguous"):
            return getattr(self.raw.mean, name)
        if callable(getattr(Tensor, name, None)):
            return lambda *args, **kwargs: _apply(name, (self, *args), kwargs)
        found = getattr(self.raw.mean, name)
        if isinstance(found, Tensor):
            raise UnsupportedError(name)
        return found

    def __len__(self) -> int:
        return len(self.raw.mean)


def _operator(name: str) -> Callable[..., Any]:
    return lambda self, *args: _apply(name, (self, *args), {})


for _name in (
    "add", "radd", "iadd", "sub", "rsub", "isub", "mul", "rmul", "imul", "truediv", "rtruediv",
    "itruediv", "matmul", "rmatmul", "pow", "rpow", "neg", "abs", "getitem", "setitem", "lt", "le",
    "gt", "ge", "eq", "ne", "bool", "float", "int", "floordiv", "mod", "invert",
):  # fmt: skip
    setattr(RandomTensor, f"__{_name}__", _operator(f"__{_name}__"))


def _apply(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """One torch function by its name; in place where the name or an option says so."""
    known, in_place = _known(name)
    first = isinstance(args[0], RandomTensor)  # else it is a later argument that is random
    in_place = (bool(kwargs.pop("inplace", False)) or in_place) and first
    if known == "relu" and first:
        found: Any = RandomTensor(args[0].moments, rectified=True)
    elif known not in RULES or "out" in kwargs:
        raise UnsupportedError(known)
    elif known == "max_pool2d" and args[0].rectified:
        found = RandomTensor(RULES[known](args[0].raw, *args[1:], **kwargs, rectified=True))
    else:
        same = len(args) > 1 and args[0] is args[1]
        found = _wrapped(RULES[f"{known} self" if same else known](*_opened(args), **kwargs))
    return args[0].assign(found) if in_place else found


def _known(name: str) -> tuple[str, bool]:
    """A name as the rules have it, and whether it works in place."""
    if name.startswith("__"):
        bare = name.strip("_")
        in_place = bare[1:] in ("add", "sub", "mul", "truediv") and bare[0] == "i"
        bare = bare[1:] if in_place else bare
    else:
        in_place, bare = name.endswith("_"), name.removesuffix("_")
    return _ALIASES.get(bare, bare), in_place


_ALIASES = {
    "radd": "add", "rmul": "mul", "truediv": "div", "true_divide": "div", "divide": "div",
    "multiply": "mul", "subtract": "sub", "negative": "neg", "concat": "cat", "concatenate": "cat",
}  # fmt: skip


def _rebuilt(container: Any, items: list[Any]) -> Any:
    return type(container)(items)


@singledispatch
def _opened(value: Any) -> Any:
    """A value with the moments in the place of its random tensors."""
    return value


@_opened.register
def _(value: RandomTensor) -> Pair:
    return value.moments


@_opened.register(list)
@_opened.register(tuple)
def _(value: Sequence[Any]) -> Any:
    return _rebuilt(value, [_opened(v) for v in value])


@singledispatch
def _wrapped(found: Any) -> Any:
    """A result with random tensors in the place of moments."""
    return found


@_wrapped.register
def _(found: Pair) -> RandomTensor:
    return RandomTensor(found)


@_wrapped.register(list)
@_wrapped.register(tuple)
def _(found: Sequence[Any]) -> Any:
    return _rebuilt(found, [_wrapped(f) for f in found])


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, rule))
        return rule

    return register


def _register(make: Callable[[Any], Rule], *functions: Any) -> None:
    RULES.update({function.__name__: make(function) for function in functions})


@_rule("relu")
def _relu(x: Pair) -> Pair:
    if x.variance is None:
        return Pair(x.mean.relu(), None)
    mean, second = relu_moments(x.mean, x.variance)
    return Pair(mean, torch.addcmul(second, mean, mean, value=-1).clamp_(min=0))


@_rule("leaky_relu")
def _leaky_relu(x: Pair, negative_slope: float = 0.01) -> Pair:
    if x.variance is None:
        return Pair(functional.leaky_relu(x.mean, negative_slope), None)
    mean, second = relu_moments(x.mean, x.variance)
    leaky = negative_slope * x.mean + (1 - negative_slope) * mean
    whole = x.mean.square() + x.variance
    square = (1 - negative_slope**2) * second + negative_slope**2 * whole
    return Pair(leaky, (square - leaky.square()).clamp(min=0))


def _by_quadrature(function: Callable[..., Tensor]) -> Rule:
    def rule(x: Pair, *args: Any, **kwargs: Any) -> Pair:
        if x.variance is None:
            return Pair(function(x.mean, *args, **kwargs), None)
        return Pair(*function_moments(lambda t: function(t, *args, **kwargs), x.mean, x.variance))

    return rule


_register(
    _by_quadrature,
    torch.tanh,
    torch.sigmoid,
    functional.gelu,
    functional.silu,
    functional.softplus,
    functional.elu,
    functional.hardtanh,
)


def _affine(function: Callable[..., Tensor]) -> Rule:
    """y = op(x, w) + b for a certain w: the variance passes through w^2 and takes no bias."""

    def rule(
        x: Pair, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Pair:
        mean = function(x.mean, weight, bias, *args, **kwargs)
        if x.variance is None:
            return Pair(mean, None)
        return Pair(mean, function(x.variance, weight.square(), None, *args, **kwargs))

    return rule


_register(
    _affine,
    functional.linear,
    torch.conv1d,
    torch.conv2d,
    torch.conv3d,
    torch.conv_transpose1d,
    torch.conv_transpose2d,
    torch.conv_transpose3d,
)


@_rule("batch_norm")
def _batch_norm(
    x: Pair,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *_: Any,
) -> Pair:
    if running_mean is None or running_var is None or training:
        raise UnsupportedError("batch_norm by the statistics of the batch")
    shape = (-1, *(1,) * (x.mean.dim() - 2))
    scale = torch.rsqrt(running_var + eps) * (1 if weight is None else weight)
    shift = (0 if bias is None else bias) - running_mean * scale
    mean = x.mean * scale.view(shape) + shift.view(shape)
    return Pair(mean, None if x.variance is None else x.variance * scale.square().view(shape))


def _moving(function: Callable[..., Any]) -> Rule:
    """Elements change their places, or are left out: so do their variances."""

    def rule(x: Pair, *args: Any, **kwargs: Any) -> Any:
        mean = function(x.mean, *args, **kwargs)
        variance = None if x.variance is None else function(x.variance, *args, **kwargs)
        if isinstance(mean, Tensor):
            return Pair(mean, variance)
        spreads = [None] * len(mean) if variance is None else variance
        return tuple(Pair(m, v) for m, v in zip(mean, spreads, strict=True))

    return rule


_register(
    _moving, torch.flatten, torch.reshape, torch.squeeze, torch.unsqueeze, torch.transpose,
    torch.permute, torch.movedim, torch.flip, torch.chunk, torch.split, torch.unbind, torch.narrow,
    torch.clone, torch.detach, Tensor.view, Tensor.contiguous, Tensor.t, Tensor.unflatten,
    Tensor.to, Tensor.float, Tensor.double, Tensor.select,
)  # fmt: skip


@_rule("getitem")
def _getitem(x: Pair, index: Any) -> Pair:
    parts = index if isinstance(index, tuple) else (index,)
    if not all(isinstance(p, int | slice | None) or p is Ellipsis for p in parts):
        # An element that is taken twice would no longer be independent.
        raise UnsupportedError("getitem with an index that is no number or slice")
    return Pair(x.mean[index], None if x.variance is None else x.variance[index])


def _joining(function: Callable[..., Tensor]) -> Rule:
    def rule(tensors: Sequence[Any], *args: Any, **kwargs: Any) -> Pair:
        pairs = [_pair(t) for t in tensors]
        mean = function([p.mean for p in pairs], *args, **kwargs)
        if all(p.variance is None for p in pairs):
            return Pair(mean, None)
        return Pair(mean, function([p.spread for p in pairs], *args, **kwargs))

    return rule


_register(_joining, torch.cat, torch.stack)


@singledispatch
def _pair(value: Any) -> Pair:
    """A value that is certain, or moments, as moments."""
    return Pair(torch.as_tensor(value), None)


@_pair.register
def _(value: Pair) -> Pair:
    return value


@_rule("add")
def _add(a: Any, b: Any, *, alpha: float = 1) -> Pair:
    a, b = _pair(a), _pair(b)
    mean = a.mean + alpha * b.mean
    if a.variance is None and b.variance is None:
        return Pair(mean, None)
    variance = a.spread + alpha**2 * b.spread
    return Pair(mean, torch.broadcast_to(variance, mean.shape))


@_rule("add self")
def _double(a: Pair, _: Pair, *, alpha: float = 1) -> Pair:
    return _mul(a, 1 + alpha)


@_rule("sub")
def _sub(a: Any, b: Any, *, alpha: float = 1) -> Pair:
    return _add(a, b, alpha=-alpha)


@_rule("sub self")
def _nothing(a: Pair, _: Pair, *, alpha: float = 1) -> Pair:
    return _mul(a, 1 - alpha)


@_rule("rsub")
def _rsub(a: Any, b: Any, *, alpha: float = 1) -> Pair:
    return _add(b, a, alpha=-alpha)


@_rule("neg")
def _neg(a: Pair) -> Pair:
    return Pair(-a.mean, a.variance)


@_rule("mul")
def _mul(a: Any, b: Any) -> Pair:
    a, b = _pair(a), _pair(b)
    mean = a.mean * b.mean
    if a.variance is None and b.variance is None:
        return Pair(mean, None)
    va, vb = a.spread, b.spread
    return Pair(mean, va * b.mean.square() + vb * a.mean.square() + va * vb)


@_rule("mul self", "square")
def _square(a: Pair, _: Pair | None = None) -> Pair:
    mean = a.mean.square()
    if a.variance is None:
        return Pair(mean, None)
    return Pair(mean + a.variance, 2 * a.variance.square() + 4 * mean * a.variance)


@_rule("div")
def _div(a: Any, b: Any) -> Pair:
    a, b = _pair(a), _pair(b)
    if b.variance is not None:
        raise UnsupportedError("division by a random tensor")
    return Pair(a.mean / b.mean, None if a.variance is None else a.variance / b.mean.square())


@_rule("rtruediv")
def _rdiv(a: Any, b: Any) -> Pair:
    return _div(b, a)


@_rule("matmul", "mm", "bmm")
def _matmul(a: Any, b: Any) -> Pair:
    a, b = _pair(a), _pair(b)
    mean = a.mean @ b.mean
    if a.variance is None and b.variance is None:
        return Pair(mean, None)
    if a.variance is None:
        return Pair(mean, a.mean.square() @ b.spread)
    second = b.mean.square() if b.variance is None else b.mean.square() + b.variance
    variance = a.variance @ second
    return Pair(mean, variance if b.variance is None else variance + a.mean.square() @ b.variance)


@_rule("sum")
def _sum(x: Pair, *args: Any, **kwargs: Any) -> Pair:
    total = x.mean.sum(*args, **kwargs)
    return Pair(total, None if x.variance is None else x.variance.sum(*args, **kwargs))


def _averaging(function: Callable[..., Tensor]) -> Rule:
    """A mean of n independent elements has the mean of their variances divided by n."""

    def rule(x: Pair, *args: Any, **kwargs: Any) -> Pair:
        mean = function(x.mean, *args, **kwargs)
        if x.variance is None:
            return Pair(mean, None)
        if x.mean.numel() % mean.numel():
            raise UnsupportedError(f"{function.__name__} over windows of different sizes")
        count = x.mean.numel() / mean.numel()
        return Pair(mean, function(x.variance, *args, **kwargs) / count)

    return rule


_register(_averaging, functional.adaptive_avg_pool1d, functional.adaptive_avg_pool2d, torch.mean)


@_rule("avg_pool1d", "avg_pool2d")
def _avg_pool(x: Pair, kernel_size: Any, *args: Any, **kwargs: Any) -> Pair:
    pool = functional.avg_pool2d if x.mean.dim() == 4 else functional.avg_pool1d
    mean = pool(x.mean, kernel_size, *args, **kwargs)
    if x.variance is None:
        return Pair(mean, None)
    window = math.prod(per_axis(kernel_size, x.mean.dim() - 2))
    return Pair(mean, pool(x.variance, kernel_size, *args, **kwargs) / window)


@_rule("max_pool2d")
def _max_pool2d(
    x: Pair,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
    rectified: bool = False,
) -> Pair:
    """The largest of a window, and with `rectified` the largest of it and zero."""
    if x.variance is None:
        mean = x.mean.relu() if rectified else x.mean
        pooled = functional.max_pool2d(mean, kernel_size, stride, padding, dilation, ceil_mode)
        return Pair(pooled, None)
    height, width = per_axis(kernel_size, 2)
    apart = stride is None or stride in (kernel_size, (height, width))
    plain = padding in (0, (0, 0)) and dilation in (1, (1, 1)) and not ceil_mode
    if not (apart and plain):
        raise UnsupportedError("max_pool2d with overlap, padding or dilation")
    halves = (x.mean,), (x.variance,)
    if not torch.compiler.is_compiling():  # a graph has any number of rows
        rows = max(1, _BLOCK * len(x.mean) // x.mean.numel())
        halves = x.mean.split(rows), x.variance.split(rows)
    parts = [
        max_moments(_windows(m, height, width), _windows(v, height, width), rectified)
        for m, v in zip(*halves, strict=True)
    ]
    return Pair(torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]))


def _windows(t: Tensor, height: int, width: int) -> list[Tensor]:
    rows, columns = t.shape[-2] // height * height, t.shape[-1] // width * width
    t = t[..., :rows, :columns]
    return [t[..., i::height, j::width] for i in range(height) for j in range(width)]


@_rule("dropout")
def _dropout(x: Pair, p: float = 0.5, training: bool = True, train: bool | None = None) -> Pair:
    on = training if train is None else train
    return _scaled(x, None, x.mean.new_tensor(p / (1 - p))) if on and p > 0 else x


def _dropping_together(x: Pair, p: float = 0.5, training: bool = True) -> Pair:
    if training and p > 0:
        raise UnsupportedError("dropout of several elements together")
    return x


RULES.update(dict.fromkeys(("dropout1d", "dropout2d", "dropout3d"), _dropping_together))


def _scaled(x: Pair, mean: Tensor | None, variance: Tensor) -> Pair:
    """x times independent noise; a mean of None is one."""
    square = x.mean.square()
    second = square if x.variance is None else square + x.variance
    if mean is None:
        return Pair(x.mean, variance * second + x.spread)
    return Pair(x.mean * mean, variance * second + x.spread * mean.square())


def noisy_layer(layer: Variational, x: Pair) -> Pair:
    """E y = op(m, M); Var y = op(m^2 + v, V) + op(v, M^2) for x ~ (m, v), w ~ (M, V)."""
    if layer.op is None:
        raise UnsupportedError("a noisy product without known moments")
    if layer.gate is not None and layer.gate.side == "input":
        x = gated(layer.gate, x)
    y = _noisy_product(layer, x) if layer.posterior is not None else _product(layer, layer.op, x)
    return gated(layer.gate, y) if layer.gate is not None and layer.gate.side == "output" else y


def _noisy_product(layer: Variational, x: Pair) -> Pair:
    affine = layer.affine()
    if not affine.weight.adds_variances():
        raise UnsupportedError(f"weights that share noise, {layer.posterior!r}")
    mean, variance = affine.moments((x.mean,), affine.variances(), x.variance)
    return Pair(torch.zeros_like(variance) if mean is None else mean.expand_as(variance), variance)


def _product(layer: Variational, op: Callable[..., Tensor], x: Pair) -> Pair:
    y = op(x.mean, layer.weight, layer.bias)
    variance = None if x.variance is None else op(x.variance, layer.weight.square(), None)
    return Pair(y, variance)


def gated(gate: Gate, x: Pair) -> Pair:
    """x times a gate's noise, with the moments of its draws."""
    found = gate.noise.moments(gate.tensors)
    if found is None:
        raise UnsupportedError(f"{type(gate.noise).__name__}, whose variance is not known")
    together = getattr(gate.noise, "granularity", "channel") != "element"
    if together and math.prod(x.mean.shape[1:]) > gate.units:
        raise UnsupportedError(f"{type(gate.noise).__name__} for several elements together")
    mean, variance = (along(gate.axis, x.mean, m.to(x.mean)) for m in found)
    return _scaled(x, mean, variance)


class Analytic(nn.Module):
    """Stands for a module with noise: passes on the moments of its output."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: RandomTensor, *args: Any, **kwargs: Any) -> RandomTensor:
        """Mean and variance of the noisy module's output."""
        if args or kwargs:
            raise UnsupportedError("a noisy module with several inputs")
        return RandomTensor(through(self.module, x.moments))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:  # what a net asks of its module
            return getattr(super().__getattr__("module"), name)


@singledispatch
def through(module: nn.Module, x: Pair) -> Pair:
    """The moments of the output of a module with noise."""
    raise UnsupportedError("noise of its own")


through.register(Variational, noisy_layer)
through.register(Gate, gated)


@through.register
def _(module: LocalLayer, x: Pair) -> Pair:
    mean, squares = module.mean(x.mean), x.mean * x.mean
    if x.variance is not None:
        squares = squares.add_(x.variance)
    variance = module.spread(squares)
    if module.square is not None and x.variance is not None:
        variance = variance.add_(module.op(x.variance, module.square, None))
    return Pair(mean.expand_as(variance), variance)


@through.register
def _(module: nn.Dropout, x: Pair) -> Pair:
    return _dropout(x, module.p)


def _refuse_draw(function: Any, *_: Any) -> NoReturn:
    raise UnsupportedError(f"{function.overloadpacket.__name__}, noise of its own")


def analytic(quiet: nn.Module) -> nn.Module:
    """A net through which a `RandomTensor` can pass, from a prepared one without noise."""
    return replica(quiet, {m: Analytic(m) for m in quiet.modules() if is_random(m)})


def propagate(net: nn.Module, x: Tensor) -> Pair:
    """Mean and variance of a noisy net's output, in one pass.

    >>> import torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Linear(2, 1, bias=False), vd.bayes_by_backprop(log_sigma2=0.0))
    >>> propagate(net, torch.ones(1, 2)).variance
    tensor([[2.]])
    """
    return passed(analytic(prepared(net, noise=False)), x)


def passed(net: nn.Module, x: Tensor) -> Pair:
    """Mean and variance of the output of a net that `analytic` made."""
    if x.dtype == torch.float16:
        raise VardropError(
            "Expected `x` in a dtype that holds variances, but got float16, in which they vanish. "
            "Use net.float() and x.float(), or bfloat16."
        )
    if x.dim() == 4:  # convolutions are faster with the channels last
        x = x.contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        try:
            output = _run(net, x)
        except UnsupportedError as error:
            raise VardropError(
                f"Expected modules with known moments, but got {_failing(net, x)}, which calls "
                f'{error}. Predict with mode="sample".'
            ) from None
    if not isinstance(output, RandomTensor):
        raise VardropError(
            f"Expected the net to return one tensor, but got {type(output).__name__}. "
            "Wrap the net in a module that picks the output."
        )
    return output.moments


def _run(net: nn.Module, x: Tensor) -> Any:
    with NoiseCalls(_refuse_draw) if may_draw(net) else nullcontext():
        return net(RandomTensor(Pair(x, None)))


def _failing(net: nn.Module, x: Tensor) -> str:
    """The module in which an operation without a rule is called."""
    with ExitStack() as hooks:
        entered = watched(net, hooks)
        try:
            _run(net, x)
        except UnsupportedError:
            name, module = entered[-1] if entered else ("(net)", net)
            inner = module.module if isinstance(module, Analytic) else module
            return f"'{name}' ({type(inner).__name__})"
    return "the net"


def output_noise(like: Tensor, samples: int, seed: int) -> Tensor:
    """Standard normal numbers (samples, 1, ...), the same for every row of an output (N, ...).

    So the answer to a row depends on no other row.
    """
    own = torch.Generator(like.device).manual_seed(seed)
    shape = (samples, 1, *like.shape[1:])
    return torch.randn(shape, generator=own, dtype=like.dtype, device=like.device)


def output_draws(output: Pair, samples: int, seed: int, memory: int) -> Iterator[Tensor]:
    """Normal draws (s, N, ...) from the output's moments, from a generator of their own."""
    mean, std = output.mean, output.spread.sqrt()
    noise = output_noise(mean, samples, seed)
    most = max(1, memory // Size(mean.numel()).bytes(1))
    for part in noise.split(even(samples, most)):
        yield torch.addcmul(mean, std, part)
