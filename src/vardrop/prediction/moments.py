"""Moment propagation: one analytic pass that carries mean and variance through a net.

A `Gaussian` travels through the net's own forward in the place of the input, so residual sums and
functional calls need no tracing; every torch function it meets has a rule by its name, and
noisy layers and gates add their variance. Units are taken as independent and as normal where a
non-linearity needs their shape: exact through one affine layer, an approximation below it.

Wang & Manning 2013, "Fast dropout training", sec. 3; Frey & Hinton 1999 (rectified moments).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from vardrop.errors import VardropError
from vardrop.gates import BinaryDropout, Gate
from vardrop.layers import Variational
from vardrop.noisy import Noisy
from vardrop.prediction.modes import drops, prepared
from vardrop.prediction.moment_pooling import POOLING
from vardrop.prediction.moment_rules import BASIC, Pair, UnsupportedError

RULES = {**BASIC, **POOLING}


class Gaussian:
    """A tensor of independent normal numbers; a variance of None means that they are certain.

    With `rectified` the moments are those before a ReLU that has not been taken yet: a pooling by
    the maximum takes it along, at less cost and more exactly.
    """

    def __init__(self, mean: Tensor, variance: Tensor | None, rectified: bool = False) -> None:
        self.raw, self.rectified = Pair(mean, variance), rectified

    def _taken(self) -> Pair:
        if self.rectified:
            self.raw, self.rectified = Pair(*RULES["relu"](self.raw)), False
        return self.raw

    @property
    def mean(self) -> Tensor:
        """The mean."""
        return self._taken().mean

    @property
    def known_variance(self) -> Tensor | None:
        """The variance, or None where the numbers are certain."""
        return self._taken().variance

    @property
    def variance(self) -> Tensor:
        """The variance, zero where the numbers are certain."""
        return torch.zeros_like(self.mean) if self.known_variance is None else self.known_variance

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return _apply(function, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        if name in ("shape", "dtype", "device", "ndim", "requires_grad", "is_nested", "layout"):
            return getattr(self.raw.mean, name)
        if name in ("dim", "size", "numel", "is_floating_point"):
            return getattr(self.raw.mean, name)
        method = getattr(Tensor, name, None)
        if method is None or name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: _apply(method, (self, *args), kwargs)

    def __add__(self, other: Any) -> Any:
        return _apply(torch.add, (self, other), {})

    __radd__ = __add__

    def __mul__(self, other: Any) -> Any:
        return _apply(torch.mul, (self, other), {})

    __rmul__ = __mul__

    def __len__(self) -> int:
        return len(self.raw.mean)


def _apply(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    name = getattr(function, "__name__", repr(function))
    if name in ("relu", "relu_") and isinstance(args[0], Gaussian):
        return Gaussian(*args[0]._taken(), rectified=True)
    if name not in RULES:
        raise UnsupportedError(name)
    if name == "max_pool2d" and args[0].rectified:
        return Gaussian(*RULES[name](args[0].raw, *args[1:], **kwargs, rectified=True))
    options = {k: _unwrapped(v) for k, v in kwargs.items()}
    return Gaussian(*RULES[name](*(_unwrapped(a) for a in args), **options))


def _unwrapped(value: Any) -> Any:
    return value._taken() if isinstance(value, Gaussian) else value


def propagate(net: nn.Module, x: Tensor) -> Gaussian:
    """Mean and variance of a noisy net's output, in one pass.

    >>> import torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Linear(2, 1, bias=False), vd.bayes_by_backprop(log_sigma2=0.0))
    >>> propagate(net, torch.ones(1, 2)).variance
    tensor([[2.]])
    """
    if x.dtype == torch.float16:
        raise VardropError(
            "Expected `x` in a dtype that holds variances, but got float16, in which they vanish. "
            "Use net.float() and x.float(), or bfloat16."
        )
    if x.dim() == 4:  # convolutions are faster with the channels last
        x = x.contiguous(memory_format=torch.channels_last)
    with prepared(net, noise=False), _analytic(net) as entered, torch.no_grad():
        try:
            output = net(Gaussian(x, None))
        except UnsupportedError as error:
            name, module = entered[-1] if entered else ("(net)", net)
            raise VardropError(
                f"Expected modules with known moments, but got '{name}' "
                f"({type(module).__name__}), which calls {error}. "
                'Predict with mode="sample".'
            ) from None
    if not isinstance(output, Gaussian):
        raise VardropError(
            f"Expected the net to return one tensor, but got {type(output).__name__}. "
            "Wrap the net in a module that picks the output."
        )
    return output


def output_draws(output: Gaussian, samples: int, seed: int) -> Tensor:
    """Normal draws (S, N, ...) from the output's moments, from a generator of their own."""
    generator = torch.Generator(output.mean.device).manual_seed(seed)
    noise = torch.randn(
        (samples, *output.mean.shape), generator=generator,
        dtype=output.mean.dtype, device=output.mean.device,
    )  # fmt: skip
    return torch.addcmul(output.mean, output.variance.sqrt(), noise)


@contextmanager
def _analytic(net: nn.Module) -> Iterator[list[tuple[str, nn.Module]]]:
    """Let noisy modules pass on moments for a while; yields the modules that are being run."""
    entered: list[tuple[str, nn.Module]] = []
    with ExitStack() as stack:
        for name, module in net.named_modules():
            entry = (name or "(net)", module)
            stack.callback(
                module.register_forward_pre_hook(lambda *_, e=entry: entered.append(e)).remove
            )
            stack.callback(module.register_forward_hook(lambda *_: entered.pop() and None).remove)
            if (rule := _module_rule(module)) is not None:
                # An attribute of the object hides the forward of its class.
                module.__dict__["forward"] = rule
                stack.callback(module.__dict__.pop, "forward")
        yield entered


def _module_rule(module: nn.Module) -> Callable[..., Gaussian] | None:
    if isinstance(module, Variational):
        return lambda x: _noisy_layer(module, x)
    if isinstance(module, Gate):
        return lambda x: _gate(module, x)
    if isinstance(module, nn.Dropout):
        return lambda x: _scaled(x, None, torch.tensor(module.p / (1 - module.p)).to(x.mean))
    if isinstance(module, Noisy) or drops(module):
        return _refuse
    return None


def _refuse(*_: Any, **__: Any) -> Gaussian:
    raise UnsupportedError("noise of its own")


def _noisy_layer(layer: Variational, x: Gaussian) -> Gaussian:
    """E y = op(m, M); Var y = op(m^2 + v, V) + op(v, M^2) for x ~ (m, v), w ~ (M, V)."""
    op = getattr(layer, "_op", functional.linear if isinstance(layer, nn.Linear) else None)
    if op is None or isinstance(layer, nn.modules.conv._ConvTransposeNd):
        raise UnsupportedError("a noisy product without known moments")
    if layer.gate is not None and layer.gate.side == "input":
        x = _gate(layer.gate, x)
    y = Gaussian(op(x.mean, layer.weight, layer.bias), _output_variance(layer, op, x))
    return _gate(layer.gate, y) if layer.gate is not None and layer.gate.side == "output" else y


def _output_variance(layer: Variational, op: Callable[..., Tensor], x: Gaussian) -> Tensor | None:
    certain = x.known_variance is None
    parts = []
    if layer.posterior is not None:
        if not layer.posterior.adds_variances(layer.weight, layer.axes):
            raise UnsupportedError(f"weights that share noise, {layer.posterior!r}")
        affine = layer._affine(op, None)
        bias = None
        if affine.bias is not None and affine.bias_tensors is not None:
            bias = layer.posterior.variance(affine.bias, affine.bias_tensors)
        second = x.mean.square() if certain else x.mean.square().add_(x.variance)
        variance = layer.variance().to(second.dtype)
        parts.append(op(second, variance, None if bias is None else bias.to(second.dtype)))
    if not certain and not (layer.posterior and layer.posterior.zero_mean):
        parts.append(op(x.variance, layer.weight.square(), None))
    return None if not parts else parts[0] if len(parts) == 1 else parts[0].add_(parts[1])


def _gate(gate: Gate, x: Gaussian) -> Gaussian:
    mean = gate.noise.mean(x.mean, gate.axis, gate.tensors)
    if type(gate.noise) is BinaryDropout:
        alpha = torch.tensor(gate.noise.drop_rate / (1 - gate.noise.drop_rate)).to(x.mean)
    elif (log_alpha := gate.noise.log_alpha(gate.tensors)) is not None:
        shape = [1] * x.mean.dim()
        shape[gate.axis] = log_alpha.numel()
        alpha = log_alpha.exp().to(x.mean).view(shape)
    else:
        raise UnsupportedError(f"{type(gate.noise).__name__}, whose variance is not known")
    return _scaled(x, mean, alpha)


def _scaled(x: Gaussian, mean: Tensor | None, alpha: Tensor) -> Gaussian:
    """x times noise of mean `mean` and variance alpha mean^2."""
    square = x.mean.square()
    second = square if x.known_variance is None else square + x.known_variance
    variance = alpha * second + x.variance
    if mean is None:
        return Gaussian(x.mean, variance)
    return Gaussian(x.mean * mean, variance * mean.square())
