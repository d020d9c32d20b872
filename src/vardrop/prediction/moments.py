"""Moment propagation: one analytic pass that carries mean and variance through a network.

The forward of the network runs, on a `RandomTensor` from its first noisy module on. Every torch
function has a rule for mean and variance, or raises an error that names the module. The rules
take all elements of a tensor as independent, and as normal if a non-linearity needs their shape.
One noisy layer is exact, up to its first non-linearity. After more layers the variance is usually
too small, because units that share the noise of the layers before them are correlated.

Wang & Manning 2013, "Fast dropout training", sec. 3; Frey & Hinton 1999 (rectified moments).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from functools import cache, partial, singledispatch
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional

from vardrop._core.calls import Batch, Pick, output_tensor, tensors_in
from vardrop._core.errors import VardropError
from vardrop.functional import (
    GeneratorNoise,
    RandomOpMode,
    draw_from,
    function_moments,
    max_moments,
    noise_source,
    relu_moments,
    standard_normal,
)
from vardrop.gates import Gate
from vardrop.gates.base import along
from vardrop.layers import Conv1d, Conv2d, Conv3d, Variational
from vardrop.noisy import named_modules_of
from vardrop.prediction.eval_copy import (
    compute_variances,
    has_untracked_randomness,
    is_stochastic,
    make_eval_copy,
    track_active_module,
)

_Function = Callable[..., Tensor]
_Kwargs = dict[str, object]
_AveragePool = nn.AvgPool1d | nn.AvgPool2d | nn.AdaptiveAvgPool1d | nn.AdaptiveAvgPool2d
_SHAPE_METHODS = ("dim", "size", "numel", "is_floating_point", "stride", "is_contiguous")
_PASS_BYTES = 1024  # per input element, that activations of a pass may take


class Moments(NamedTuple):
    """Mean and variance of a tensor."""

    mean: Tensor
    variance: Tensor


class UnsupportedError(Exception):
    """An operation without a rule."""


class RandomTensor:
    """A tensor of independent normal numbers, in place of a tensor of the network.

    With `rectified` the moments are those before a ReLU that is still to be applied: max pooling
    then applies it at less cost and more exactly.
    """

    def __init__(self, raw: Moments, rectified: bool = False) -> None:
        self.raw, self.rectified = raw, rectified

    @property
    def moments(self) -> Moments:
        """Mean and variance."""
        if self.rectified:
            self.raw, self.rectified = _relu(self.raw), False
        return self.raw

    @classmethod
    def __torch_function__(
        cls, func: _Function, types: object, args: Sequence[Any] = (), kwargs: _Kwargs | None = None
    ) -> RandomTensor:
        return _apply(getattr(func, "__name__", repr(func)), args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if callable(getattr(Tensor, name, None)) and name not in _SHAPE_METHODS:
            return lambda *args, **kwargs: _apply(name, (self, *args), kwargs)
        attribute = getattr(self.raw.mean, name)
        if isinstance(attribute, Tensor):
            raise UnsupportedError(name)
        return attribute

    def __len__(self) -> int:
        return len(self.raw.mean)


# Operators, by the rule that they use. Other operators, such as `x[0]`, are a TypeError in Python.
_OPERATORS = {
    "add": "add", "radd": "add", "sub": "sub", "rsub": "rsub", "mul": "mul", "rmul": "mul",
    "truediv": "div", "neg": "neg", "eq": "eq", "ne": "ne", "bool": "bool",
}  # fmt: skip
_IN_PLACE = {"iadd": "add", "isub": "sub", "imul": "mul", "itruediv": "div"}
for _name in (*_OPERATORS, *_IN_PLACE):
    call = lambda self, *args, name=f"__{_name}__": _apply(name, (self, *args), {})  # noqa: E731
    setattr(RandomTensor, f"__{_name}__", call)


def _apply(name: str, args: Sequence[Any], kwargs: _Kwargs) -> RandomTensor:
    """Apply one torch function by its name, in place if the name or an option asks for it."""
    bare = name.strip("_")
    in_place = bool(kwargs.pop("inplace", False)) or bare in _IN_PLACE or name == f"{bare}_"
    bare = (_OPERATORS | _IN_PLACE).get(bare, bare)
    x, *others = args
    if bare not in RULES or "out" in kwargs:
        raise UnsupportedError(bare)
    if not isinstance(x, RandomTensor) and (in_place or bare not in ("add", "sub", "mul")):
        raise UnsupportedError(f"{bare} with a random argument after the first")
    random = [a for a in args if isinstance(a, RandomTensor)]
    if len(random) > 1 and (bare not in ("add", "sub") or random[0] is random[1]):
        raise UnsupportedError(f"{bare} of random tensors that depend on each other")
    if bare == "max_pool2d":
        raw = _max_pool(x, *others, **kwargs)
    elif bare == "relu":
        raw = x.moments
    else:
        pairs = (a.moments if isinstance(a, RandomTensor) else a for a in args)
        raw = RULES[bare](*pairs, **kwargs)
    if not in_place:
        return RandomTensor(raw, bare == "relu")
    x.raw, x.rectified = raw, bare == "relu"
    return x


def _relu(x: Moments) -> Moments:
    mean, second = relu_moments(*x)
    return Moments(mean, torch.addcmul(second, mean, mean, value=-1).clamp_(min=0))


def _leaky_relu(x: Moments, negative_slope: float = 0.01) -> Moments:
    mean, second = relu_moments(*x)
    leaky = negative_slope * x.mean + (1 - negative_slope) * mean
    square = (1 - negative_slope**2) * second + negative_slope**2 * (x.mean.square() + x.variance)
    return Moments(leaky, (square - leaky.square()).clamp(min=0))


def _activate(function: _Function, x: Moments, *args: object, **kwargs: object) -> Moments:
    return Moments(*function_moments(lambda t: function(t, *args, **kwargs), *x))


def _move(function: _Function, x: Moments, *args: object, **kwargs: object) -> Moments:
    """Move elements to other places, with their variances."""
    return Moments(*(function(t, *args, **kwargs) for t in x))


def _multiply(
    op: _Function,
    x: Moments,
    weight: Tensor,
    bias: Tensor | None = None,
    *args: object,
    **options: object,
) -> Moments:
    """y = op(x, w) + b for a certain w: the variance passes through w^2 and takes no bias."""
    mean = op(x.mean, weight, bias, *args, **options)
    return Moments(mean, op(x.variance, weight.square(), None, *args, **options))


def _batch_norm(x: Moments, mean: Tensor | None, variance: Tensor | None, **kwargs: Any) -> Moments:
    if variance is None or kwargs.get("training"):
        raise UnsupportedError("batch_norm with the statistics of the batch")
    scale, weight = (variance + kwargs.get("eps", 1e-5)).reciprocal(), kwargs.get("weight")
    scale = scale if weight is None else scale * weight.square()
    y = functional.batch_norm(x.mean, mean, variance, **kwargs)
    return Moments(y, x.variance * along(1, y, scale))


def _add(a: Any, b: Any, *, alpha: float = 1) -> Moments:
    (m, v), (n, w) = (t if isinstance(t, Moments) else (t, torch.zeros(())) for t in (a, b))
    mean = m + alpha * n
    return Moments(mean, torch.broadcast_to(v + alpha**2 * w, mean.shape))


def _scale(a: Any, b: Any) -> Moments:
    x, factor = (a, b) if isinstance(a, Moments) else (b, a)
    return Moments(x.mean * factor, x.variance * factor**2)


def _mean(x: Moments, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> Moments:
    dims = tuple(range(x.mean.dim())) if dim is None else _per_axis(dim, 1)
    mean, variance = (t.mean(dims, keepdim) for t in x)
    return Moments(mean, variance / math.prod(x.mean.shape[d] for d in dims))


def _per_axis(size: int | Sequence[int], axes: int) -> tuple[int, ...]:
    """A size as one number per axis, from one number for all axes or one for each."""
    return tuple(size) if isinstance(size, Sequence) else (size,) * axes


def _average_pool(
    kind: Callable[..., _AveragePool], axes: int, x: Moments, *args: object, **kwargs: object
) -> Moments:
    """A mean of d elements has the mean of their variances, divided by d once more."""
    pool = kind(*args, **kwargs)
    mean, variance = (pool(t) for t in x)
    if isinstance(pool, nn.AvgPool1d | nn.AvgPool2d):
        window = math.prod(_per_axis(pool.kernel_size, axes))
        divisor = getattr(pool, "divisor_override", None) or window
        several = pool.ceil_mode or not pool.count_include_pad
    else:
        pairs = list(zip(x.mean.shape[-axes:], mean.shape[-axes:], strict=True))
        divisor = math.prod(n // m for n, m in pairs)
        several = any(n % m for n, m in pairs)
    if several:
        raise UnsupportedError("average pooling with windows of several sizes")
    return Moments(mean, variance / divisor)


def _max_pool(x: RandomTensor, *args: Any, **kwargs: Any) -> Moments:
    """The largest of each window, from its distribution function (see `max_moments`)."""
    pool = nn.MaxPool2d(*args, **kwargs)
    kernel = high, wide = _per_axis(pool.kernel_size, 2)
    others = ((pool.stride, kernel), (pool.dilation, (1, 1)), (pool.padding, (0, 0)))
    plain = all(_per_axis(size, 2) == wanted for size, wanted in others)
    if not plain or pool.ceil_mode or pool.return_indices:
        raise UnsupportedError("max_pool2d with overlap, padding, dilation, ceil_mode or indices")
    rows, columns = (n // k * k for n, k in zip(x.raw.mean.shape[-2:], kernel, strict=True))
    means, variances = (
        [t[..., i:rows:high, j:columns:wide] for i in range(high) for j in range(wide)]
        for t in x.raw
    )
    return Moments(*max_moments(means, variances, x.rectified))


def _multiply_noise(x: Moments, mean: Tensor, variance: Tensor) -> Moments:
    """x times independent noise."""
    spread = variance * (x.mean.square() + x.variance) + x.variance * mean.square()
    return Moments(x.mean * mean, spread)


def _dropout(x: Moments, p: float = 0.5, training: bool = True) -> Moments:
    if not training:
        return x
    variance = x.mean.new_tensor(p / (1 - p))
    return _multiply_noise(x, torch.ones_like(variance), variance)


_MOVES = (
    "flatten unflatten reshape view squeeze unsqueeze transpose permute movedim contiguous clone "
    "detach to float double"
)
_ACTIVATIONS = "tanh sigmoid gelu silu softplus elu hardtanh"
_PRODUCTS = "linear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d"

RULES: dict[str, Callable[..., Moments]] = {
    "relu": _relu, "leaky_relu": _leaky_relu, "batch_norm": _batch_norm, "mean": _mean,
    "max_pool2d": _max_pool, "dropout": _dropout,
    "add": _add, "sub": lambda a, b, *, alpha=1: _add(a, b, alpha=-alpha),
    "rsub": lambda a, b: _add(b, a, alpha=-1),
    "mul": _scale, "div": lambda x, d: _scale(x, 1 / d), "neg": partial(_scale, -1),
    "avg_pool1d": partial(_average_pool, nn.AvgPool1d, 1),
    "avg_pool2d": partial(_average_pool, nn.AvgPool2d, 2),
    "adaptive_avg_pool1d": partial(_average_pool, nn.AdaptiveAvgPool1d, 1),
    "adaptive_avg_pool2d": partial(_average_pool, nn.AdaptiveAvgPool2d, 2),
    **{name: partial(_move, getattr(Tensor, name)) for name in _MOVES.split()},
    **{name: partial(_activate, getattr(functional, name)) for name in _ACTIVATIONS.split()},
    **{name: partial(_multiply, getattr(functional, name)) for name in _PRODUCTS.split()},
}  # fmt: skip


@cache
def _analytic_kind(kind: type) -> type:
    """A class with this name, because code may ask for the class of its modules."""
    return type(kind.__name__, (Analytic, kind), {"__module__": kind.__module__})


class Analytic(nn.Module):
    """A module with noise whose forward gives the moments of its output."""

    def forward(self, x: Tensor | RandomTensor, *args: object, **kwargs: object) -> RandomTensor:
        """Mean and variance of the noisy module's output."""
        if args or kwargs:
            raise UnsupportedError("a noisy module with several inputs")
        moments = x.moments if isinstance(x, RandomTensor) else (x, None)
        return RandomTensor(through(self, *moments))


@singledispatch
def through(module: nn.Module, mean: Tensor, variance: Tensor | None) -> Moments:
    """The moments of the output of a noisy module. Without `variance` the input is certain."""
    raise UnsupportedError("noise without known moments")


@through.register
def _(layer: Variational, mean: Tensor, variance: Tensor | None) -> Moments:
    gate, op = layer.gate, layer.op
    if op is None:
        raise UnsupportedError("a noisy product without known moments")
    if gate is not None and gate.side == "input":
        mean, variance = through(gate, mean, variance)
    if layer.posterior is None:
        y = _multiply(op, _pair(mean, variance), layer.weight, layer.bias)
    else:
        affine = layer.affine()
        if not layer.posterior.adds_variances(affine.weight.mean, affine.weight.axes):
            raise UnsupportedError(f"weights that share noise, {layer.posterior!r}")
        center, spread = affine.moments((mean,), affine.variances(), variance)
        center = torch.zeros_like(spread) if center is None else center.expand_as(spread)
        y = Moments(center, spread)
    return through(gate, *y) if gate is not None and gate.side == "output" else y


def _pair(mean: Tensor, variance: Tensor | None) -> Moments:
    return Moments(mean, torch.zeros_like(mean) if variance is None else variance)


@through.register
def _(gate: Gate, mean: Tensor, variance: Tensor | None) -> Moments:
    """x times the gate's noise, which has to be drawn separately for every element."""
    name, moments = type(gate.noise).__name__, gate.noise.moments(gate.tensors)
    if moments is None:
        raise UnsupportedError(f"{name}, whose variance is not known")
    granularity = getattr(gate.noise, "granularity", "channel")
    elements = math.prod(mean.shape[1:])
    if elements > {"element": elements, "example": 1}.get(granularity, gate.units):
        raise UnsupportedError(f"{name} with one draw for several elements")
    noise = (along(gate.axis, mean, t.to(mean)) for t in moments)
    return _multiply_noise(_pair(mean, variance), *noise)


@through.register
def _(module: nn.Dropout, mean: Tensor, variance: Tensor | None) -> Moments:
    return _dropout(_pair(mean, variance), module.p)


class MomentDraws:
    """Normal draws at the output, from a mean and a variance that one pass carries there.

    Args:
        net: the model.
        pick: takes the tensor out of what the model returns.
        memory: bytes that activations may take at once.

    >>> import torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Linear(2, 1, bias=False), vd.bayes_by_backprop(log_sigma2=0.0))
    >>> MomentDraws(net, lambda output: output, memory=2**28).propagate(torch.ones(1, 2)).variance
    tensor([[2.]])
    """

    def __init__(self, net: nn.Module, pick: Pick, memory: int) -> None:
        for name, layer in named_modules_of(net, Variational).items():
            draws_weights = layer.estimator.whole_weights_per is not None
            kernel = isinstance(layer, Conv1d | Conv2d | Conv3d) and layer.posterior is not None
            if kernel and draws_weights:
                raise VardropError(
                    f"Moment propagation is not supported for {layer.estimator!r} (module "
                    f"'{name}'), because its noise is shared by the positions of an example. "
                    "Convert with estimator=vardrop.local_reparameterization, or use "
                    'mode="sample".'
                )
        copy = compute_variances(make_eval_copy(net, noise=False), draws_outputs=False)
        self.net, self.pick, self.memory = copy, pick, memory
        for module in self.net.modules():
            if is_stochastic(module):
                kind: type = type(module)
                module.__class__ = _analytic_kind(kind)

    def describe(self, x: Batch) -> str:
        return "one pass that carries mean and variance"

    def max_examples(self, x: Batch, samples: int) -> int:
        elements = sum(t[:1].numel() for t in tensors_in(x))
        return max(1, self.memory // (elements * _PASS_BYTES))

    @torch.no_grad()
    def propagate(self, x: Batch) -> Moments:
        """Mean and variance of the output."""
        if not isinstance(x, Tensor):
            raise VardropError(
                f'Expected `x` to be one tensor for mode="moments", but got {type(x).__name__}. '
                'Predict with mode="sample".'
            )
        if x.dtype == torch.float16:
            raise VardropError(
                "Expected `x` in a dtype that holds variances, but got float16, in which they "
                "vanish. Use net.float() and x.float(), or bfloat16."
            )
        if x.dim() == 4:  # convolutions are faster with the channels last
            x = x.contiguous(memory_format=torch.channels_last)
        try:
            output = _run(self.net, self.pick, x)
        except UnsupportedError as error:
            with track_active_module(self.net) as active, suppress(UnsupportedError):
                _run(self.net, self.pick, x)  # once more, to name the module
            place = active[-1] if active else "the net"
            raise VardropError(
                f"Expected modules with known moments, but got {place}, which calls {error}. "
                'Predict with mode="sample".'
            ) from None
        return output.moments if isinstance(output, RandomTensor) else _pair(output, None)

    def draws(self, x: Batch, samples: int) -> Iterator[Tensor]:
        yield self.draw_output(self.propagate(x), samples)

    def draw_output(self, output: Moments, samples: int) -> Tensor:
        """Draws (s, N, ...) with the same numbers for every example.

        So the prediction of an example does not depend on other examples.
        """
        mean, variance = output
        with draw_from(GeneratorNoise(noise_source().seed or 0)):
            noise = standard_normal((samples, 1, *mean.shape[1:]), mean)
        return torch.addcmul(mean, variance.sqrt(), noise)


def _run(net: nn.Module, pick: Pick, x: Tensor) -> Tensor | RandomTensor:
    def raise_unsupported(function: Any, *_: object) -> NoReturn:
        raise UnsupportedError(f"{function.overloadpacket.__name__}, a random function")

    with RandomOpMode(raise_unsupported) if has_untracked_randomness(net) else nullcontext():
        try:
            output = net(x.clone())  # which the network may overwrite
            is_picked = isinstance(output, RandomTensor) and pick is output_tensor
            return output if is_picked else pick(output)
        except (RuntimeError, TypeError) as error:
            if RandomTensor.__name__ not in str(error):
                raise
            raise UnsupportedError(f"code that takes only tensors: {error}") from error
