"""Whole functions: models drawn from the posterior, with their weights and masks fixed."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import count
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from vardrop._core.calls import Batch, call_net, clone_batch
from vardrop._core.checks import check_integer, check_net
from vardrop._core.errors import VardropError
from vardrop._core.integrations import position_span
from vardrop._core.modules import clone_modules
from vardrop.functional import GeneratorNoise, draw_from, restore_state_on_error
from vardrop.functional.random import resolve_seed
from vardrop.gates import functional_dropout_rates
from vardrop.layers import Variational, plain_types
from vardrop.noisy import named_modules_of
from vardrop.prediction.eval_copy import (
    check_noise,
    is_stochastic,
    make_eval_copy,
    use_call_generator,
)
from vardrop.prediction.rows import Split, attempt, split_at_noise
from vardrop.prediction.trace import trace_model

_POSITIONS = 64  # of a sequence, that are drawn together


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
        _check_fixable(module)
        self.module, self.seed = module, 0
        self.start: int | None = None
        self.end: int | None = None
        # A layer asks its gate where it acts, and on how many units.
        self.side, self.units = getattr(module, "side", None), getattr(module, "units", 0)

    def forward(self, x: Tensor) -> Tensor:
        """The module's output for the fixed noise."""
        if torch.compiler.is_exporting():
            raise VardropError(
                f"Exporting a drawn function is not supported for {type(self.module).__name__}, "
                "because the graph would draw its noise again in every call. Export "
                "vardrop.freeze(net), or set the rate of the dropout to 0."
            )
        if self.start is None or x.dim() < 3:
            return self._run(x, self.seed)
        start = self.start if self.end is None else max(self.start, self.end - x.shape[1])
        block, before = divmod(start, _POSITIONS)
        after = -(before + x.shape[1]) % _POSITIONS
        pieces = functional.pad(x, (0, 0) * (x.dim() - 2) + (before, after)).split(_POSITIONS, 1)
        # One draw for all positions, or one per block of positions.
        noise = getattr(self.module, "noise", None)
        shared = getattr(noise, "granularity", None) == "example"
        seeds = (self.seed if shared else self.seed ^ i for i in count(block))
        parts = [self._run(piece, seed) for piece, seed in zip(pieces, seeds, strict=False)]
        return torch.cat(parts, 1).narrow(1, before, x.shape[1])

    @restore_state_on_error
    def _run(self, x: Tensor, seed: int) -> Tensor:
        with draw_from(GeneratorNoise(seed)), use_call_generator(self.module):
            run_example = lambda example: self.module(example.unsqueeze(0)).squeeze(0)  # noqa: E731
            return torch.vmap(run_example, randomness="same")(x)

    def train(self, mode: bool = True) -> FixedNoise:
        """Set the mode of this module alone: the module inside draws in every mode."""
        self.training = mode
        return self


def _check_fixable(module: nn.Module) -> None:
    if rates := functional_dropout_rates(module):
        raise VardropError(
            f"Drawing a function is not supported for the dropout inside {type(module).__name__}, "
            f"which draws again in every call. Set its `{next(iter(rates))}` to 0."
        )


def track_positions(net: nn.Module) -> None:
    """Let fixed noise continue where a cache of keys and values ends, in a model that takes one."""
    span = position_span(net)
    if span is None:
        return

    def set_span(
        net: nn.Module, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> None:
        """Before a call; without arguments the whole sequence."""
        start, end = (0, None) if kwargs is None else span(args, kwargs)
        for module in named_modules_of(net, FixedNoise).values():
            module.start, module.end = start, end

    set_span(net)
    net.register_forward_pre_hook(set_span, with_kwargs=True)
    net.register_forward_hook(lambda net, *_: set_span(net), always_call=True)


class FunctionSampler:
    """A copy of a model without noise, whose weights and masks can be drawn again."""

    def __init__(self, net: nn.Module) -> None:
        source = make_eval_copy(net, noise=True)
        self._noisy: dict[object, tuple[Variational, Variational]] = {}
        self._weights: dict[int, nn.Parameter] = {}
        function = clone_modules(source)
        fixed: dict[nn.Module, FixedNoise] = {}
        inner: set[nn.Module] = set()  # submodules that belong to a noisy module
        pairs = zip(list(source.modules()), list(function.modules()), strict=True)
        for module, copied in pairs:
            if copied in inner:
                continue
            if isinstance(module, Variational):
                _check_fixable(module)
                self._fix_layer(module, cast(Variational, copied))
                inner.update(copied.get_submodule(name) for name in module.sublayers())
            elif is_stochastic(module):
                fixed[copied] = FixedNoise(copied)
                inner.update(copied.modules())
        self.net = clone_modules(function, fixed)
        # Convolutions are faster with the channels last, on CPU and GPU alike.
        self.channels_last = any(type(m) is nn.Conv2d for m in self.net.modules())
        self._fixed = list(fixed.values())
        track_positions(self.net)
        self.split: Split | None = None

    def _fix_layer(self, source: Variational, layer: Variational) -> None:
        for name, part in source.sublayers().items():
            self._fix_layer(part, cast(Variational, layer.get_submodule(name)))
        gate, layer.gate = layer.gate, None
        means = {n: getattr(layer, n, None) for n in (*layer.weight_axes, *layer.bias_names)}
        for name, mean in means.items():  # before `make_plain`, which frees the means it finds
            if not isinstance(mean, Tensor):
                continue
            layout = torch.channels_last if mean.dim() == 4 else torch.preserve_format
            copied = nn.Parameter(mean.detach().clone(memory_format=layout), requires_grad=False)
            setattr(layer, name, self._weights.setdefault(id(mean), copied))  # one if tied
        layer.make_plain()
        plain = plain_types().get(type(layer))
        if gate is None and plain is not None:
            layer.__class__ = plain  # type: ignore[assignment]
        else:
            layer.add_noise()  # without a posterior, to apply its gate
            layer.gate = gate
        if source.posterior is not None:
            # Tied layers have the same key and share their weight, which is then drawn once.
            self._noisy.setdefault(source.kl_key(), (source, layer))

    def redraw(self) -> nn.Module:
        """Draw another function; the same object is returned every time."""
        with torch.no_grad():
            for source, layer in self._noisy.values():
                for name, tensor in source.noisy_tensors().items():
                    getattr(layer, name).copy_(tensor.sample(tensor.draw()))
        for module in self._fixed:
            module.seed = resolve_seed(None)
        return self.net

    def prepare(self, x: Batch) -> Batch:
        """Run the part of the model that is the same in every function; `x` if there is none."""
        if self.channels_last and isinstance(x, Tensor) and x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        self.split, _ = attempt(lambda: self._split(x))
        return x if self.split is None else self.split.prefix(clone_batch(x))

    def _split(self, x: Batch) -> Split:
        """Split the model at the first module that differs between functions."""
        drawn = set(map(id, self._weights.values()))
        leaves = {
            m
            for m in self.net.modules()
            if isinstance(m, FixedNoise) or any(id(p) in drawn for p in m.parameters(recurse=False))
        }
        sources = {m for m in self.net.modules() if not leaves.isdisjoint(m.modules())}
        return split_at_noise(self.net, trace_model(self.net, x, leaves), sources)

    def __call__(self, values: Batch) -> Any:
        """The output of the current function for the values of `prepare`."""
        if self.split is None:
            return call_net(self.net, clone_batch(values))
        return self.split.suffix(1, *values)


def function_seeds(seed: int, count: int) -> list[int]:
    """A seed for every draw; the first ones are the same for every count."""
    return torch.randint(2**62, (count,), generator=torch.Generator().manual_seed(seed)).tolist()  # type: ignore[no-any-return]


def draws(net: nn.Module, samples: int, seed: int | None = None) -> Iterator[nn.Module]:
    """Draw functions from the posterior of a model, one after the other, each a separate model.

    Args:
        net: a model with noisy modules or dropout.
        samples: number of functions.
        seed: makes the sequence repeatable and leaves the global generator unchanged.

    Returns:
        An iterator of models without noise.

    >>> import torch, vardrop as vd
    >>> from vardrop.prediction import draws
    >>> net = vd.convert(torch.nn.Linear(2, 1), vd.bayes_by_backprop())
    >>> [tuple(f(torch.ones(4, 2)).shape) for f in draws(net, 2)]
    [(4, 1), (4, 1)]
    """
    check_net(net)
    check_integer("samples", samples)
    seeds = function_seeds(resolve_seed(seed), samples)

    check_noise(net)
    sampler = FunctionSampler(net)

    @restore_state_on_error
    def draw_function(seed: int) -> nn.Module:
        with draw_from(GeneratorNoise(seed)):
            sampler.redraw()
        return copy.deepcopy(sampler.net).eval().requires_grad_(False)

    return map(draw_function, seeds)


@restore_state_on_error
def draw(net: nn.Module, seed: int | None = None) -> nn.Module:
    """Draw one function from the posterior: a model of plain layers with fixed weights.

    The output for an example is the same in every batch. Gates and dropout have one mask for all
    examples. A language model that takes `past_key_values` is one function of a sequence, with the
    cache and without, so `draw(model).generate(...)` samples text from one function.

    Args:
        net: a model with noisy modules or dropout. It is not changed.
        seed: makes the draw repeatable and leaves the global generator unchanged.

    Returns:
        The drawn model.

    >>> import torch, vardrop as vd
    >>> from vardrop.prediction import draw
    >>> f = draw(vd.convert(torch.nn.Linear(2, 1), vd.bayes_by_backprop()), seed=0)
    >>> type(f), bool((f(torch.ones(1, 2)) == f(torch.ones(1, 2))).all())
    (<class 'torch.nn.modules.linear.Linear'>, True)
    """
    return next(draws(net, 1, seed))
