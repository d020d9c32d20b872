"""How draws of a model's output are made: as its layers were trained, whole functions, members.

A strategy is made once per predictor. `draws(x, samples)` yields blocks of outputs (s, N, ...), and
`max_examples(x, samples)` is the number of examples that are drawn together.

| strategy | one draw is |
|---|---|
| `RowDraws` | fresh noise for every example; draws are further examples of one pass |
| `LoopDraws` | one forward pass, for models that `RowDraws` cannot run |
| `ShardedDraws` | one forward pass of a model whose tensors are sharded over processes |
| `FunctionDraws` | one set of weights and masks for all examples |
| `MemberDraws` | one model of a list |
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain, islice, repeat

import torch
from torch import Tensor, nn

from vardrop._core.calls import Batch, Pick, call_net, clone_batch, num_examples
from vardrop._core.modules import evaluating
from vardrop._core.sharding import forward_method
from vardrop.functional import GeneratorNoise, draw_from, noise_source
from vardrop.noisy import sampling
from vardrop.prediction.eval_copy import compute_variances, make_eval_copy, use_call_generator
from vardrop.prediction.functions import FunctionSampler, function_seeds
from vardrop.prediction.moments import MomentDraws
from vardrop.prediction.rows import RowDraws

_MEANS = "one pass of the means"
_STACK = 8  # draws that are reduced together


class PassDraws(ABC):
    """One pass per draw, of all examples together, because they may depend on each other."""

    description: str

    def describe(self, x: Batch) -> str:
        """Describe how inputs like x are run, for `Predictor.plan`."""
        return self.description

    @abstractmethod
    def passes(self, x: Batch, samples: int) -> Iterator[Tensor]:
        """Yield the output (N, ...) of every draw."""

    def max_examples(self, x: Batch, samples: int) -> int:
        return num_examples(x)

    def draws(self, x: Batch, samples: int) -> Iterator[Tensor]:
        passes = self.passes(x, samples)
        while outputs := list(islice(passes, _STACK)):
            yield torch.stack(outputs)


class LoopDraws(PassDraws):
    """Passes of a copy of a model.

    Args:
        net: the model.
        pick: takes the tensor out of what the model returns.
        reason: why its draws are not made at once.
        noise: whether its noise is on; without noise there is one draw.
        local: as for `RowDraws`.
    """

    def __init__(
        self, net: nn.Module, pick: Pick, reason: str, noise: bool = True, local: bool = False
    ) -> None:
        copy = make_eval_copy(net, noise, local)
        self.net = compute_variances(copy) if noise else copy
        self.pick, self.noise = pick, noise
        self.description = f"one pass per draw, because {reason}" if noise else _MEANS

    def passes(self, x: Batch, samples: int) -> Iterator[Tensor]:
        with use_call_generator(self.net):
            for _ in range(samples if self.noise else 1):
                yield self.pick(call_net(self.net, clone_batch(x)))


class ShardedDraws(PassDraws):
    """Passes of a model itself, because one whose tensors are sharded cannot be copied.

    Args:
        source: the model, or the objective that contains it. If it has a method `outputs`, that is
            called instead of the model.
        net: the model.
        pick: as for `LoopDraws`.
        noise: whether its noise is on.
    """

    description = "passes of the model itself, because its tensors are sharded over processes"

    def __init__(self, source: nn.Module, net: nn.Module, pick: Pick, noise: bool) -> None:
        self.net, self.pick, self.noise = net, pick, noise
        has_method = hasattr(source, "outputs")
        self.run = forward_method(source, "outputs") if has_method else partial(call_net, net)

    def passes(self, x: Batch, samples: int) -> Iterator[Tensor]:
        noise = sampling(self.net, self.noise)
        with evaluating(self.net), noise, use_call_generator(self.net):
            for _ in range(samples if self.noise else 1):
                yield self.pick(self.run(clone_batch(x)))


class FunctionDraws(PassDraws):
    """Whole functions: draw k has the same weights and masks for all examples of all batches."""

    description = "whole functions, one set of weights per draw"

    def __init__(self, net: nn.Module, pick: Pick) -> None:
        self.net, self.pick = net, pick
        self._thread = threading.local()  # drawing a function writes into the sampler's tensors

    def passes(self, x: Batch, samples: int) -> Iterator[Tensor]:
        if not hasattr(self._thread, "sampler"):
            self._thread.sampler = FunctionSampler(self.net)
        sampler = self._thread.sampler
        shared, mode = sampler.prepare(x), use_call_generator(sampler.net)
        for seed in function_seeds(noise_source().seed or 0, samples):
            with draw_from(GeneratorNoise(seed)), mode:
                sampler.redraw()
                outputs = self.pick(sampler(shared))
            yield outputs
            if sampler.split is not None and not getattr(mode, "count", 0):
                mode = (
                    nullcontext()
                )  # a graph has no branches: the next draws call no such function


class MemberDraws(PassDraws):
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
        self.description = f"{len(members)} members"

    def passes(self, x: Batch, samples: int) -> Iterator[Tensor]:
        for member in self.members:
            if isinstance(member, nn.Module):
                yield from repeat(self.pick(call_net(member, clone_batch(x))), self.each)
            else:
                yield from chain.from_iterable(member(x).draws(x, self.each))


DrawStrategy = PassDraws | RowDraws | MomentDraws
