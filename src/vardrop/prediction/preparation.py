"""A net as one call needs it: a private replica with its noise on or off, and what it will hold.

The net that the user has is never touched, so several threads may predict with it at a time.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

from vardrop._core.calls import call, parts, rows, tensors_in, untouched
from vardrop._core.encoder import disable_encoder_fastpath
from vardrop._core.errors import VardropError
from vardrop._core.modules import clone_modules
from vardrop._core.values import Value
from vardrop.estimators import check_estimator, local_reparameterization
from vardrop.functional import (
    GeneratorNoise,
    RandomOpMode,
    call_with_generator,
    draw_from,
    redirect_random_ops,
)
from vardrop.gates import DROPOUT_TYPES, drop_rate
from vardrop.layers import Variational
from vardrop.noisy import Noisy, named_modules_of

_TENSORS = 6  # of the largest activation's size that live at once


def is_random(module: nn.Module) -> bool:
    """Whether a module draws noise of its own, by the switch or in training mode."""
    return isinstance(module, Noisy) or drop_rate(module) > 0


def check_noise(net: nn.Module) -> None:
    """Raise unless the net has a source of noise."""
    if not any(map(is_random, net.modules())):
        kinds = sorted({type(m).__name__ for m in net.modules()})
        raise VardropError(
            f"Expected `net` to have noisy modules or dropout, but got {', '.join(kinds)}. "
            'Call vardrop.convert(net, recipe) first, or vardrop.predict(net, x, mode="mean").'
        )


def prepared(net: nn.Module, noise: bool, local: bool = False) -> nn.Module:
    """A replica in eval mode with its noise on or off, and nothing done in place.

    With `local`, layers with noisy weights draw by local reparameterisation, whatever their own.
    """
    twin = clone_modules(net)
    for module in twin.modules():
        disable_encoder_fastpath(module)
        if (switchable := DROPOUT_TYPES.get(type(module))) is not None:
            module.__class__ = switchable  # the same dropout, from a generator of one's own
        if getattr(module, "inplace", False) is True:
            vars(module)["inplace"] = False
        _switch(module, noise, local)
    return twin


@functools.singledispatch
def _switch(module: nn.Module, noise: bool, local: bool) -> None:
    """Set the mode of a module that belongs to this call."""
    module.training = noise and drop_rate(module) > 0


@_switch.register
def _(module: Noisy, noise: bool, local: bool) -> None:
    module.training, module.sampling = False, noise


@_switch.register
def _(module: Variational, noise: bool, local: bool) -> None:
    module.training, module.sampling = False, noise
    if local and module.posterior is not None:
        check_estimator(local_reparameterization, module.posterior)
        module.estimator = local_reparameterization


_DRAWING = (
    nn.RNNBase,
    nn.MultiheadAttention,
    nn.RReLU,
    nn.FractionalMaxPool2d,
    nn.FractionalMaxPool3d,
)


def guarded(net: nn.Module) -> AbstractContextManager[object]:
    """A context in which all noise of a net comes from the generator of the call.

    Modules of torch and of this library that ask for a generator need none; a forward, a posterior
    or a hook that others wrote may draw by itself, so torch's random functions are watched there.
    """
    return redirect_random_ops() if may_draw(net) else nullcontext()


def may_draw(net: nn.Module) -> bool:
    """Whether a forward could draw noise that no switch reaches."""
    return any(map(_draws_unasked, net.modules()))


def _draws_unasked(module: nn.Module) -> bool:
    known = type(module).__module__.startswith(("torch.nn.modules.", "vardrop."))
    values = (v for v in vars(module).copy().values() if isinstance(v, Value))
    foreign = any(not type(v).__module__.startswith("vardrop.") for v in values)
    return not known or foreign or isinstance(module, _DRAWING) or not plain_forward(module)


def plain_forward(module: nn.Module) -> bool:
    """Whether a call of the module is the forward of its class and nothing else."""
    return not (module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def whole_rows(net: nn.Module) -> list[nn.Sequential]:
    """The Sequentials that are called as a whole and once: the net, and those in a row inside it.

    The forward of another module may call the parts of one by themselves, and keep what they give.
    """
    found, inner = [], [net]
    while inner:
        row = inner.pop()
        if type(row) is nn.Sequential and plain_forward(row):
            found.append(row)
            inner += row
    calls = Counter(part for row in found for part in row)
    return [row for row in found if all(calls[part] == 1 for part in row)]


class Size(NamedTuple):
    """What one draw holds: elements per row, and elements whatever the rows."""

    row: int
    draw: int = 0

    def bytes(self, rows: int) -> int:
        """The memory of one draw."""
        return (self.row * rows + self.draw) * _TENSORS * torch.get_default_dtype().itemsize


def measured(net: nn.Module, x: Any, from_start: bool = False) -> Size:
    """The largest output after the first noise, from a pass of a private net on two rows.

    With `from_start`, the largest of all outputs.
    """
    try:
        return _measured(net, next(parts(x, 2)), from_start)
    except Exception:
        if rows(x) <= 2:
            raise
        return _measured(net, x, from_start)  # a forward may be made for batches of one size


def _measured(net: nn.Module, x: Any, noisy: bool) -> Size:
    largest, weights, count = 1, 0, rows(x)

    def answer(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal noisy
        noisy = True
        return call_with_generator(function, args, kwargs)

    def record(module: nn.Module, _: object, output: object) -> None:
        nonlocal largest, weights
        if not noisy:
            return
        drawn = _drawn_weights(module)
        largest = max(largest, sum(t.numel() for t in tensors_in(output)) // count, drawn.row)
        weights = max(weights, drawn.draw)

    # From a generator of its own: the draws of a call do not depend on whether it was measured.
    with ExitStack() as hooks, draw_from(GeneratorNoise(0)), RandomOpMode(answer):
        for module in net.modules():
            if is_random(module) or not any(True for _ in module.children()):
                hooks.callback(module.register_forward_hook(record).remove)
        call(net, untouched(x))
    return Size(largest, weights)


@functools.singledispatch
def _drawn_weights(module: nn.Module) -> Size:
    """How many weights a module draws: for every row, and for every draw."""
    return Size(0)


@_drawn_weights.register
def _(module: Variational) -> Size:
    weights = sum(t.mean.numel() for t in module.noisy_tensors().values())
    return {None: Size(0), "example": Size(weights), "batch": Size(0, weights)}[
        module.estimator.whole_weights_per
    ]


def row_limit(net: nn.Module, size: Size, x: Any, memory: int) -> int:
    """How many rows one draw can hold; all of them where rows are normalised together."""
    fit, norms = max(1, memory // size.bytes(1)), nn.modules.batchnorm._NormBase
    count = rows(x)
    together = fit < count and any(
        m.running_mean is None for m in named_modules_of(net, norms).values()
    )
    return count if together else fit


def per_axis(value: Any, axes: int) -> tuple[int, ...]:
    """A size of torch's, which may be one number for all axes, as one number for each."""
    sizes = tuple(value) if isinstance(value, Sequence) else (value,)
    return sizes * axes if len(sizes) == 1 else sizes


def even(samples: int, most: int) -> list[int]:
    """Blocks of about one size, none larger than `most`."""
    size = -(-samples // -(-samples // most))
    return [min(size, samples - start) for start in range(0, samples, size)]


def watched(net: nn.Module, hooks: ExitStack) -> list[tuple[str, nn.Module]]:
    """The modules of a private net that are being run, by name, innermost last."""
    entered: list[tuple[str, nn.Module]] = []
    for name, module in net.named_modules():
        entry = (name or "(net)", module)
        before = module.register_forward_pre_hook(lambda *_, e=entry: entered.append(e))
        after = module.register_forward_hook(lambda *_: entered.pop() and None)
        hooks.callback(before.remove)
        hooks.callback(after.remove)
    return entered
