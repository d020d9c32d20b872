"""Whole functions: models drawn from the posterior, with their weights and masks fixed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from vardrop._core.calls import call, untouched
from vardrop._core.checks import check_integer, check_net
from vardrop._core.errors import VardropError
from vardrop._core.integrations import position_span
from vardrop._core.modules import clone_modules
from vardrop.functional import GeneratorNoise, draw_from, generator, restore_state_on_error
from vardrop.gates import functional_dropout_rates
from vardrop.layers import Variational, plain_types
from vardrop.noisy import named_modules_of
from vardrop.prediction.eval_copy import (
    check_noise,
    is_stochastic,
    make_eval_copy,
    use_call_generator,
)
from vardrop.prediction.split import Examples, Split, attempt, split_at_noise, trace_model

_SEEDS = 2**62
_POSITIONS = 64  # of a sequence, that are drawn together


def resolve_seed(seed: int | None) -> int:
    """The seed, or one from the global generator, which `torch.manual_seed` makes repeatable."""
    if seed is None:
        return int(torch.randint(_SEEDS, (), generator=generator(torch.device("cpu"))))
    check_integer("seed", seed, at_least=-(2**63))
    return seed


class FixedNoise(nn.Module):
    """A gate, head or dropout whose noise is drawn from the same seed for every example and call.

    So it is one function of an example, even if the noise depends on the input. Examples are along
    axis 0 of its only input. In a model that may get a sequence in pieces, with positions along
    axis 1, `start` is the first position of the piece, so that a position always has the same
    noise. `end` is the position after the last one, for layers that get only the last positions.
    """

    is_sampling = True  # a recurrent layer asks its gate whether there are masks

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.seed = module, 0
        self.start: int | None = None
        self.end: int | None = None
        # A layer asks its gate where it acts, and on how many units.
        self.side, self.units = getattr(module, "side", None), getattr(module, "units", 0)

    def forward(self, x: Tensor) -> Tensor:
        """The module's output for the held noise; an exported graph would draw it anew."""
        if torch.compiler.is_exporting():
            raise VardropError(
                "Expected a drawn function without held noise in a graph, but got that of "
                f"{type(self.module).__name__}, which a graph would draw anew. Freeze the net with "
                "vardrop.freeze and export that, or set the rate of its dropout to 0."
            )
        if self.start is None or x.dim() < 3:
            return self._drawn(x, self.seed)
        start = self.start if self.end is None else max(self.start, self.end - x.shape[1])
        block, before = divmod(start, _POSITIONS)
        pieces = _padded(x, before).split(_POSITIONS, 1)
        seeds = (self.seed if self._one_draw else self.seed ^ i for i in count(block))
        found = [self._drawn(piece, seed) for piece, seed in zip(pieces, seeds, strict=False)]
        return torch.cat(found, 1).narrow(1, before, x.shape[1])

    @property
    def _one_draw(self) -> bool:
        """Whether all positions share their noise."""
        noise = getattr(self.module, "noise", None)
        return getattr(noise, "granularity", None) == "example"

    @restore_state_on_error
    def _drawn(self, x: Tensor, seed: int) -> Tensor:
        with draw_from(GeneratorNoise(seed)), use_call_generator(self.module):
            return torch.vmap(self._row, randomness="same")(x)

    def _row(self, row: Tensor) -> Tensor:
        return self.module(row.unsqueeze(0)).squeeze(0)

    def train(self, mode: bool = True) -> FixedNoise:
        """Set the mode of this module alone: what is held goes on drawing in every mode."""
        self.training = mode
        return self

    def redraw(self) -> None:
        """Take another seed from the current generator."""
        self.seed = resolve_seed(None)


def _padded(x: Tensor, before: int) -> Tensor:
    """x with zeros along axis 1: so many before, and as many after as make whole pieces."""
    after = -(before + x.shape[1]) % _POSITIONS
    return functional.pad(x, (0, 0) * (x.dim() - 2) + (before, after))


def _ended(net: nn.Module, args: Any, output: Any) -> None:
    _place(net, 0, None)


def _place(net: nn.Module, start: int, end: int | None) -> None:
    for module in named_modules_of(net, FixedNoise).values():
        module.start, module.end = start, end


def track_positions(net: nn.Module) -> None:
    """Let fixed noise continue where a cache of keys and values ends, in a model that takes one."""
    span = position_span(net)
    if span is None:
        return

    def start(net: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        _place(net, *span(args, kwargs))

    _place(net, 0, None)
    net.register_forward_pre_hook(start, with_kwargs=True)
    net.register_forward_hook(_ended, always_call=True)


class FunctionSampler:
    """A private net without noise of its own, whose weights and masks can be drawn again."""

    def __init__(self, net: nn.Module) -> None:
        check_noise(net)
        source = make_eval_copy(net, noise=True)
        self._drawn: dict[object, Callable[[], None]] = {}
        self._means: dict[int, nn.Parameter] = {}
        function = clone_modules(source)
        held: dict[nn.Module, FixedNoise] = {}
        inside: set[nn.Module] = set()  # of a module that is held as a whole
        for own, copied in zip(list(source.modules()), list(function.modules()), strict=True):
            if copied in inside:
                continue
            if isinstance(own, Variational):
                _check_held(own)
                self._fix_layer(own, cast(Variational, copied))
                inside.update(copied.get_submodule(name) for name in own.sublayers())
            elif is_stochastic(own):
                held[copied] = _hold(copied)
                inside.update(copied.modules())
        self.net = clone_modules(function, held)
        # Convolutions are faster with the channels last, on CPU and GPU alike.
        self.channels_last = any(type(m) is nn.Conv2d for m in self.net.modules())
        self._held = list(held.values())
        track_positions(self.net)
        self.split: Split | None = None

    def _fix_layer(self, source: Variational, layer: Variational) -> None:
        for part, own in source.sublayers().items():
            self._fix_layer(own, cast(Variational, layer.get_submodule(part)))
        gate, layer.gate = layer.gate, None
        layer.make_plain()
        names = (*layer.weight_axes, *layer.bias_names)
        held = {n: b for n, b in layer.named_buffers(recurse=False) if n in names}  # if frozen
        for name, mean in {**dict(layer.named_parameters(recurse=False)), **held}.items():
            setattr(layer, name, self._own(mean))
        plain = plain_types().get(type(layer))
        if gate is None and plain is not None:
            layer.__class__ = plain  # type: ignore[assignment]
        else:
            layer.add_noise()  # without noise of its own: it goes on applying its gate
            layer.gate = gate
        if source.posterior is not None:
            # Tied layers have the same key and share their weight, which is then drawn once.
            self._drawn.setdefault(source.kl_key(), _weight_drawer(source, layer))

    def _own(self, mean: Tensor) -> nn.Parameter:
        """A copy to draw into; the same one for tied parameters."""
        last = mean.dim() == 4
        kept = mean.detach().clone(
            memory_format=torch.channels_last if last else torch.preserve_format
        )
        return self._means.setdefault(id(mean), nn.Parameter(kept, requires_grad=False))

    def redraw(self) -> nn.Module:
        """Draw another function; the same object is returned every time."""
        with torch.no_grad():
            for fill in self._drawn.values():
                fill()
        for module in self._held:
            module.redraw()
        return self.net

    def prepare(self, x: Any) -> Any:
        """Run the part of the model that is the same in every function; `x` if there is none."""
        if self.channels_last and isinstance(x, Tensor) and x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        self.split, _ = attempt(lambda: self._split(x))
        return x if self.split is None else self.split.prefix(untouched(x))

    def _split(self, x: Any) -> Split:
        """Split the model at the first module that differs between functions."""
        drawn = set(map(id, self._means.values()))
        leaves = {
            m
            for m in self.net.modules()
            if isinstance(m, FixedNoise) or any(id(p) in drawn for p in m.parameters(recurse=False))
        }
        sources = {m for m in self.net.modules() if not leaves.isdisjoint(m.modules())}
        return split_at_noise(self.net, trace_model(self.net, x, leaves), sources)

    def __call__(self, values: Any) -> Any:
        """What the present function returns, from the values of `prepare`."""
        if self.split is None:
            return call(self.net, untouched(values))
        return self.split.suffix(1, *map(Examples, values))


def _weight_drawer(source: Variational, layer: Variational) -> Callable[[], None]:
    def fill() -> None:
        for name, tensor in source.noisy_tensors().items():
            getattr(layer, name).copy_(tensor.sample(tensor.draw()))

    return fill


def _hold(module: nn.Module) -> FixedNoise:
    _check_held(module)
    return FixedNoise(module)


def _check_held(module: nn.Module) -> None:
    if rates := functional_dropout_rates(module):
        raise VardropError(
            f"Expected noise that can be held fixed, but got dropout inside "
            f"{type(module).__name__}, which draws in every call anew. Set its "
            f"`{next(iter(rates))}` to 0."
        )


def function_seeds(seed: int, count: int) -> list[int]:
    """A seed for every draw; the first ones are the same for every count."""
    found = torch.randint(_SEEDS, (count,), generator=torch.Generator().manual_seed(seed))
    return [int(s) for s in found]


def draws(net: nn.Module, n: int, seed: int | None = None) -> Iterator[nn.Module]:
    """Draw n functions from the posterior of a net, one by one, each a net of its own.

    Args:
        net: a net with noisy modules or dropout.
        n: how many functions.
        seed: makes the sequence repeatable; the global generator is then left alone.

    >>> import torch, vardrop as vd
    >>> from vardrop.prediction import draws
    >>> net = vd.convert(torch.nn.Linear(2, 1), vd.bayes_by_backprop())
    >>> [tuple(f(torch.ones(4, 2)).shape) for f in draws(net, 2)]
    [(4, 1), (4, 1)]
    """
    check_net(net)
    check_integer("n", n)
    return _draws(net, n, resolve_seed(seed))


def _draws(net: nn.Module, n: int, seed: int) -> Iterator[nn.Module]:
    sampler = FunctionSampler(net)
    for function_seed in function_seeds(seed, n):
        yield _next(sampler, function_seed)


@restore_state_on_error
def _next(sampler: FunctionSampler, seed: int) -> nn.Module:
    with draw_from(GeneratorNoise(seed)):
        sampler.redraw()
    return copy.deepcopy(sampler.net).eval().requires_grad_(False)


@restore_state_on_error
def draw(net: nn.Module, seed: int | None = None) -> nn.Module:
    """Draw one function from the posterior of a net: a net of plain layers with frozen weights.

    The output of a row is the same in every batch. Gates and dropout hold one mask for all rows. A
    model of language that takes `past_key_values` is one function of a sequence, with the cache and
    without: `draw(model).generate(...)` samples text from one function.

    Args:
        net: a net with noisy modules or dropout; it stays as it is.
        seed: makes the draw repeatable; the global generator is then left alone.

    >>> import torch, vardrop as vd
    >>> from vardrop.prediction import draw
    >>> f = draw(vd.convert(torch.nn.Linear(2, 1), vd.bayes_by_backprop()), seed=0)
    >>> type(f), bool((f(torch.ones(1, 2)) == f(torch.ones(1, 2))).all())
    (<class 'torch.nn.modules.linear.Linear'>, True)
    """
    return next(draws(net, 1, seed))
