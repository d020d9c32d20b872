"""How draws of a model's output are made: as its layers were trained, whole functions, members.

A strategy is made once per predictor. `draws(x, samples)` yields blocks of outputs (s, N, ...), and
`max_examples(x, samples)` tells how many examples are drawn together.

| strategy | one draw is |
|---|---|
| `RowDraws` | fresh noise for every example; draws are further examples of one pass |
| `LoopDraws` | one forward pass with the noise on, for models that `RowDraws` cannot run |
| `FunctionDraws` | one set of weights and masks for all examples |
| `MemberDraws` | one model of a list |
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from vardrop._core.calls import call_net, clone_batch, example_shapes, num_examples, tensors_in
from vardrop._core.modules import clone_modules
from vardrop.functional import GeneratorNoise, draw_from, noise_source
from vardrop.noisy import evaluating, sampling
from vardrop.prediction.eval_copy import compute_variances, make_eval_copy, use_call_generator
from vardrop.prediction.functions import FunctionSampler, function_seeds
from vardrop.prediction.row_plan import Pick, RowPlan, make_plan, run_suffix, slice_values

_LIVE_TENSORS = 6  # of the largest activation's size, at one time
_CACHE_ELEMENTS = 2**18  # of the largest activation that stay in the cache with what is made of it
_MIN_BLOCK = 96  # examples that a convolution gets at once
_MAX_BLOCK_BYTES = 2**28
_STACK = 8  # draws of a loop that are reduced together


class DrawStrategy(Protocol):
    """One way to draw outputs."""

    def max_examples(self, x: Any, samples: int) -> int:
        """How many examples of a batch are drawn together within the memory."""

    def draws(self, x: Any, samples: int) -> Iterator[Tensor]:
        """Blocks of outputs (s, N, ...), `samples` draws in all."""

    def describe(self, x: Any) -> str:
        """How inputs like x are run, for `Predictor.plan`."""


StrategyFor = Callable[[Any], DrawStrategy]


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
        most: draws in a block of outputs; all by default.
    """

    def __init__(
        self,
        net: nn.Module,
        pick: Pick,
        memory: int,
        local: bool = False,
        most: int | None = None,
    ) -> None:
        self.pick, self.memory, self.most = pick, memory, most
        self.net = compute_variances(make_eval_copy(net, noise=True, local=local))
        self.plans: dict[tuple[torch.Size, ...], RowPlan] = {}
        self._lock = threading.Lock()

    def plan(self, x: Any) -> RowPlan:
        """The plan for inputs of this shape; raises `NotRowwiseError` if there is none."""
        key = example_shapes(x)
        with self._lock:
            if key not in self.plans:
                self.plans[key] = make_plan(clone_modules(self.net), x, self.pick)
            return self.plans[key]

    def describe(self, x: Any) -> str:
        plan = self.plan(x)
        shared = f"no part is shared, because {plan.note}" if plan.note else "the part before the"
        return f"draws as further examples; {shared}" + ("" if plan.note else " noise is shared")

    def max_examples(self, x: Any, samples: int) -> int:
        plan = self.plan(x)
        block = self._block(plan, tensors_in(x)[0].is_cpu)
        fit = self.memory // (4 * samples * plan.outputs)
        return max(block, fit // block * block)

    def _block(self, plan: RowPlan, on_cpu: bool) -> int:
        """How many examples, of any draw, are run at once."""
        limit = min(self.memory, _MAX_BLOCK_BYTES) // (4 * _LIVE_TENSORS * plan.largest)
        if on_cpu:
            limit = min(limit, max(_MIN_BLOCK, _CACHE_ELEMENTS // plan.largest))
        return max(1, limit)

    def draws(self, x: Any, samples: int) -> Iterator[Tensor]:
        plan, count = self.plan(x), num_examples(x)
        block = self._block(plan, tensors_in(x)[0].is_cpu)
        traced = not plan.note and plan.noise is not None  # its operations are known
        with nullcontext() if traced else use_call_generator(self.net):
            values = plan.split.prefix(clone_batch(x))
            for size in split_evenly(samples, self.most or samples):
                blocks = []
                for start in range(0, count, block):
                    part = slice_values(plan, values, start, start + block)
                    most = max(1, block // min(block, count - start))
                    draws = list(self._draw_block(plan, part, size, most))
                    blocks.append(draws[0] if len(draws) == 1 else torch.cat(draws))
                yield blocks[0] if len(blocks) == 1 else torch.cat(blocks, 1)

    def _draw_block(
        self, plan: RowPlan, values: Sequence[Any], samples: int, most: int
    ) -> Iterator[Tensor]:
        """Draws of a few examples, at most so many at once."""
        for draws in split_evenly(samples, most):
            yield self.pick(run_suffix(plan, values, draws)).unflatten(0, (draws, -1))


class LoopDraws:
    """One forward pass per draw, with the noise on.

    Args:
        net: the model.
        pick: as for `RowDraws`.
        reason: why its draws are not made at once.
        noise: whether its noise is on; without noise there is one draw, of the means.
        local: as for `RowDraws`.
    """

    def __init__(
        self, net: nn.Module, pick: Pick, reason: str, noise: bool = True, local: bool = False
    ) -> None:
        copy = make_eval_copy(net, noise, local)
        self.net, self.pick = compute_variances(copy) if noise else copy, pick
        self.reason, self.noise = reason, noise

    def describe(self, x: Any) -> str:
        return (
            f"one pass per draw, because {self.reason}" if self.noise else "one pass of the means"
        )

    def max_examples(self, x: Any, samples: int) -> int:
        return num_examples(x)  # examples may depend on each other

    def draws(self, x: Any, samples: int) -> Iterator[Tensor]:
        with use_call_generator(self.net):
            for size in split_evenly(samples if self.noise else 1, _STACK):
                passes = (self.pick(call_net(self.net, clone_batch(x))) for _ in range(size))
                yield torch.stack(list(passes))


class ShardedDraws:
    """One forward pass per draw of a model whose tensors are sharded over processes.

    Such a model cannot be copied, so its own modules are switched meanwhile.
    """

    def __init__(self, net: nn.Module, run: Callable[[Any], Tensor], noise: bool) -> None:
        self.net, self.run, self.noise = net, run, noise

    def describe(self, x: Any) -> str:
        return "one pass per draw, because its tensors are sharded over processes"

    def max_examples(self, x: Any, samples: int) -> int:
        return num_examples(x)

    def draws(self, x: Any, samples: int) -> Iterator[Tensor]:
        with evaluating(self.net), sampling(self.net, self.noise), use_call_generator(self.net):
            for _ in range(samples if self.noise else 1):
                yield self.run(clone_batch(x)).unsqueeze(0)


class FunctionDraws:
    """Whole functions: draw k has the same weights and masks for all examples of all batches."""

    def __init__(self, net: nn.Module, pick: Pick) -> None:
        self.sampler, self.pick = FunctionSampler(net), pick

    def describe(self, x: Any) -> str:
        return "whole functions, one set of weights per draw"

    def max_examples(self, x: Any, samples: int) -> int:
        return num_examples(x)

    def draws(self, x: Any, samples: int) -> Iterator[Tensor]:
        seeds = function_seeds(noise_source().seed or 0, samples)
        values = self.sampler.prepare(x)
        for start in range(0, samples, _STACK):
            outputs = (self._draw(values, seed) for seed in seeds[start : start + _STACK])
            yield torch.stack(list(outputs))

    def _draw(self, values: Any, seed: int) -> Tensor:
        with draw_from(GeneratorNoise(seed)), use_call_generator(self.sampler.net):
            self.sampler.redraw()
            return self.pick(self.sampler(values))


class MemberDraws:
    """The outputs of several models: as many draws of each member, so that they weigh the same.

    Args:
        members: plain models, or strategies of noisy ones by a function of the input.
        pick: as for `RowDraws`.
        each: draws of each member.
    """

    def __init__(
        self, members: Sequence[nn.Module | StrategyFor], pick: Pick, each: int = 1
    ) -> None:
        self.members, self.pick, self.each = members, pick, each

    def describe(self, x: Any) -> str:
        return f"{len(self.members)} members"

    def max_examples(self, x: Any, samples: int) -> int:
        return num_examples(x)

    def draws(self, x: Any, samples: int) -> Iterator[Tensor]:
        for start in range(0, len(self.members), _STACK):
            yield torch.cat([self._draw(m, x) for m in self.members[start : start + _STACK]])

    def _draw(self, member: nn.Module | StrategyFor, x: Any) -> Tensor:
        if isinstance(member, nn.Module):
            y = self.pick(call_net(member, clone_batch(x)))
            return y.unsqueeze(0).expand(self.each, *y.shape)
        return torch.cat(list(member(x).draws(x, self.each)))
