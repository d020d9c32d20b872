"""How draws of a model's output are made: as its layers were trained, whole functions, members.

A strategy is made once per predictor. `draws(x, samples)` yields blocks of outputs (s, N, ...), and
`max_examples(x, samples)` is the number of examples that are drawn together.

| strategy | one draw is |
|---|---|
| `RowDraws` | fresh noise for every example; draws are further examples of one pass |
| `LoopDraws` | one forward pass, for models that `RowDraws` cannot run |
| `FunctionDraws` | one set of weights and masks for all examples |
| `MemberDraws` | one model of a list |
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor, nn

from vardrop._core.calls import (
    Batch,
    Pick,
    call_net,
    clone_batch,
    example_shapes,
    num_examples,
    slice_batch,
    tensors_in,
)
from vardrop._core.modules import clone_modules
from vardrop.functional import GeneratorNoise, draw_from, noise_source
from vardrop.layers import Variational
from vardrop.prediction.eval_copy import (
    compute_variances,
    is_stochastic,
    make_eval_copy,
    use_call_generator,
)
from vardrop.prediction.functions import FunctionSampler, function_seeds
from vardrop.prediction.rows import RowPlan, make_plan

_LIVE_TENSORS = 6  # of the largest activation's size, at one time
_CACHE_ELEMENTS = 2**18  # of the largest activation that stay in the cache with what is made of it
_MIN_BLOCK = 96  # examples that a convolution gets at once
_MAX_BLOCK_BYTES = 2**28
_STACK = 8  # draws of a loop that are reduced together
_MOST_DRAWS = 256  # in a block of outputs


class DrawStrategy(Protocol):
    """One way to draw outputs."""

    def max_examples(self, x: Batch, samples: int) -> int:
        """The number of examples of a batch that are drawn together within the memory."""

    def draws(self, x: Batch, samples: int) -> Iterator[Tensor]:
        """Yield blocks of outputs (s, N, ...), `samples` draws in all."""

    def describe(self, x: Batch) -> str:
        """Describe how inputs like x are run, for `Predictor.plan`."""


def split_evenly(count: int, most: int) -> list[int]:
    """Sizes that differ by little, none larger than `most`, whose sum is `count`."""
    size = -(-count // -(-count // most))
    return [min(size, count - start) for start in range(0, count, size)]


class RowDraws:
    """Noise as the layers were trained to see it, with the draws as further examples of a pass.

    The order in which noise is drawn depends on the model and the batch, not on `memory`, as long
    as one block of examples fits into it.

    Args:
        net: the model.
        pick: takes the tensor out of what the model returns.
        memory: bytes that draws may take at once.
        local: use local reparameterization in every layer with noisy weights.
        most: draws in a block of outputs.
    """

    def __init__(
        self,
        net: nn.Module,
        pick: Pick,
        memory: int,
        local: bool = False,
        most: int = _MOST_DRAWS,
    ) -> None:
        self.pick, self.memory, self.most = pick, memory, most
        self.net = compute_variances(make_eval_copy(net, noise=True, local=local))
        self.plans: dict[tuple[torch.Size, ...], RowPlan] = {}
        self._lock = threading.Lock()

    def plan(self, x: Batch) -> RowPlan:
        """The plan for inputs of this shape; raises `NotRowwiseError` if there is none."""
        key = example_shapes(x)
        with self._lock:
            if key not in self.plans:
                self.plans[key] = make_plan(clone_modules(self.net), x, self.pick)
            return self.plans[key]

    def describe(self, x: Batch) -> str:
        note = self.plan(x).note
        shared = f"no part is shared, because {note}" if note else "the noise-free part is shared"
        return f"draws as further examples; {shared}"

    def max_examples(self, x: Batch, samples: int) -> int:
        plan = self.plan(x)
        block = self._block_size(plan, x)
        fit = self.memory // (4 * _LIVE_TENSORS * min(samples, self.most) * plan.outputs)
        return max(block, fit // block * block)

    def _block_size(self, plan: RowPlan, x: Batch) -> int:
        """The number of examples, of any draw, that are run at once."""
        limit = min(self.memory, _MAX_BLOCK_BYTES) // (4 * _LIVE_TENSORS * plan.largest)
        if tensors_in(x)[0].is_cpu:
            limit = min(limit, max(_MIN_BLOCK, _CACHE_ELEMENTS // plan.largest))
        return max(1, limit)

    def draws(self, x: Batch, samples: int) -> Iterator[Tensor]:
        plan, count = self.plan(x), num_examples(x)
        block = self._block_size(plan, x)
        traced = not plan.note and plan.noise is not None
        with nullcontext() if traced else use_call_generator(self.net):
            values = plan.split.prefix(clone_batch(x))
            for size in split_evenly(samples, self.most):
                blocks = []
                for start in range(0, count, block):
                    part = [
                        slice_batch(value, start, start + block) if flag else value
                        for value, flag in zip(values, plan.split.has_examples, strict=True)
                    ]
                    most = max(1, block // min(block, count - start))
                    outputs = [
                        self.pick(plan.split.suffix(draws, *part)).unflatten(0, (draws, -1))
                        for draws in split_evenly(size, most)
                    ]
                    blocks.append(outputs[0] if len(outputs) == 1 else torch.cat(outputs))
                yield blocks[0] if len(blocks) == 1 else torch.cat(blocks, 1)


class LoopDraws:
    """One forward pass per draw.

    Args:
        net: the model, in evaluation mode, with its noise on or off.
        run: returns the output of the model as one tensor.
        reason: why its draws are not made at once.
        noise: whether its noise is on; without noise there is one draw.
        switch: a context in which the model's own modules are switched, if it is not a copy.
    """

    def __init__(
        self,
        net: nn.Module,
        run: Pick,
        reason: str,
        noise: bool = True,
        switch: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.net, self.run, self.reason, self.noise, self.switch = net, run, reason, noise, switch

    @classmethod
    def of_copy(
        cls, net: nn.Module, pick: Pick, reason: str, noise: bool = True, local: bool = False
    ) -> LoopDraws:
        """Draws of a copy of a model, with `local` as for `RowDraws`."""
        copy = make_eval_copy(net, noise, local)
        copy = compute_variances(copy) if noise else copy
        return cls(copy, lambda x: pick(call_net(copy, x)), reason, noise)

    def describe(self, x: Batch) -> str:
        return (
            f"one pass per draw, because {self.reason}" if self.noise else "one pass of the means"
        )

    def max_examples(self, x: Batch, samples: int) -> int:
        return num_examples(x)  # examples may depend on each other

    def draws(self, x: Batch, samples: int) -> Iterator[Tensor]:
        with self.switch(), use_call_generator(self.net):
            for size in split_evenly(samples if self.noise else 1, _STACK):
                yield torch.stack([self.run(clone_batch(x)) for _ in range(size)])


def draws_functions(net: nn.Module) -> bool:
    """Whether every noise of a model is a draw of whole weight tensors.

    A draw per example, or with signs per example (Flipout), has the distribution of a whole
    function for every example, so functions are drawn instead.
    """
    stochastic = [m for m in net.modules() if is_stochastic(m)]
    weights = [m for m in stochastic if isinstance(m, Variational) and m.posterior is not None]
    gated = any(m.gate is not None for m in weights)
    draws_weights = all(m.estimator.whole_weights_per is not None for m in weights)
    return len(weights) == len(stochastic) > 0 and draws_weights and not gated


class FunctionDraws:
    """Whole functions: draw k has the same weights and masks for all examples of all batches."""

    def __init__(self, net: nn.Module, pick: Pick) -> None:
        self.net, self.pick = net, pick
        self._thread = threading.local()  # drawing a function writes into the sampler's tensors

    def describe(self, x: Batch) -> str:
        return "whole functions, one set of weights per draw"

    def max_examples(self, x: Batch, samples: int) -> int:
        return num_examples(x)

    def draws(self, x: Batch, samples: int) -> Iterator[Tensor]:
        if not hasattr(self._thread, "sampler"):
            self._thread.sampler = FunctionSampler(self.net)
        sampler = self._thread.sampler
        values = sampler.prepare(x)
        seeds = function_seeds(noise_source().seed or 0, samples)
        for start in range(0, samples, _STACK):
            outputs = (self._draw(sampler, values, seed) for seed in seeds[start : start + _STACK])
            yield torch.stack(list(outputs))

    def _draw(self, sampler: FunctionSampler, values: Batch, seed: int) -> Tensor:
        with draw_from(GeneratorNoise(seed)), use_call_generator(sampler.net):
            sampler.redraw()
            return self.pick(sampler(values))


class MemberDraws:
    """The outputs of several models: as many draws of each member, so that they weigh the same.

    Args:
        members: plain models, or functions of the input that return the strategy of a noisy one.
        pick: as for `RowDraws`.
        each: draws of each member.
    """

    def __init__(
        self,
        members: Sequence[nn.Module | Callable[[Batch], DrawStrategy]],
        pick: Pick,
        each: int = 1,
    ) -> None:
        self.members, self.pick, self.each = members, pick, each

    def describe(self, x: Batch) -> str:
        return f"{len(self.members)} members"

    def max_examples(self, x: Batch, samples: int) -> int:
        return num_examples(x)

    def draws(self, x: Batch, samples: int) -> Iterator[Tensor]:
        for start in range(0, len(self.members), _STACK):
            blocks = []
            for member in self.members[start : start + _STACK]:
                if isinstance(member, nn.Module):
                    y = self.pick(call_net(member, clone_batch(x)))
                    blocks.append(y.unsqueeze(0).expand(self.each, *y.shape))
                else:
                    blocks += list(member(x).draws(x, self.each))
            yield torch.cat(blocks)
