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
    num_examples,
)
from vardrop.functional import GeneratorNoise, draw_from, noise_source
from vardrop.prediction.eval_copy import (
    compute_variances,
    make_eval_copy,
    use_call_generator,
)
from vardrop.prediction.functions import FunctionSampler, function_seeds
from vardrop.prediction.rows import split_evenly

_STACK = 8  # draws of a loop that are reduced together


class DrawStrategy(Protocol):
    """One way to draw outputs."""

    def max_examples(self, x: Batch, samples: int) -> int:
        """The number of examples of a batch that are drawn together within the memory."""

    def draws(self, x: Batch, samples: int) -> Iterator[Tensor]:
        """Yield blocks of outputs (s, N, ...), `samples` draws in all."""

    def describe(self, x: Batch) -> str:
        """Describe how inputs like x are run, for `Predictor.plan`."""


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
