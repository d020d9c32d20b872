"""Whether the draws of a model can be further examples of one pass, and in which two parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from random import Random
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from vardrop._core.calls import (
    Batch,
    Pick,
    call_net,
    clone_batch,
    map_tensors,
    num_examples,
    slice_batch,
    tensors_in,
)
from vardrop._core.errors import VardropError
from vardrop._core.modules import clone_modules
from vardrop._core.torch_private import tree_map
from vardrop.functional import (
    GeneratorNoise,
    RandomOpMode,
    TensorNoise,
    call_with_generator,
    draw_from,
    redirect_random_ops,
)
from vardrop.prediction.eval_copy import is_stochastic, make_eval_copy, track_active_module
from vardrop.prediction.gaussian_layer import GaussianLayer
from vardrop.prediction.split import (
    BRANCHES,
    Examples,
    NotTraceableError,
    Split,
    attempt,
    repeat_rows,
    split_at_noise,
    trace_model,
)

_DISTINCT = 997  # different numbers in the noise of a recorded pass


class NotRowwiseError(VardropError):
    """Why draws of a model cannot be further examples of one pass."""


class RowPlan(NamedTuple):
    """How a model runs on inputs of one shape.

    Args:
        split: the part that runs once, and the part that runs for all draws.
        has_examples: which of the values between them have examples along axis 0.
        noise: standard normal numbers per example and draw; None if code of the model calls random
            functions of torch.
        largest, outputs: elements of the largest activation and of the output, per example.
        note: why no part of the model is shared by the draws; empty if one is.
    """

    split: Split
    has_examples: tuple[bool, ...]
    noise: int | None
    largest: int
    outputs: int
    note: str


def make_plan(net: nn.Module, x: Batch, pick: Pick) -> RowPlan:
    """Split a model at its first noise, and verify on a few examples that draws can be examples.

    Outputs must not depend on other examples, noise must be drawn for every example, and the two
    parts must return the output of the whole model for the same noise.

    Args:
        net: a copy of the model with its noise on, which the plan may change.
        x: a batch.
        pick: takes the tensor out of what the model returns.
    """
    two, four = _take_examples(x, [0, 1]), _take_examples(x, [0, 1, 0, 1])
    with draw_from(GeneratorNoise(0)), redirect_random_ops():
        passes, reason = attempt(lambda: _run_few(net, two, four, pick))
        if passes is None:
            raise NotRowwiseError(reason)
        result, note = attempt(lambda: _make_split(net, two, passes.output, pick))
    if note == BRANCHES:  # a branch for one draw may be another one for all of them
        raise NotRowwiseError(note)
    split, has_examples = result or _wrap_model(net)
    noise = None if passes.untracked else sum(math.prod(s[1:]) for s in passes.requests)
    outputs = passes.output[0].numel()
    return RowPlan(split, has_examples, noise, max(passes.largest, outputs), outputs, note)


def _take_examples(x: Batch, indices: list[int]) -> Batch:
    last = num_examples(x) - 1
    index = [min(i, last) for i in indices]
    return map_tensors(lambda t: t[torch.tensor(index, device=t.device)] if t.dim() else t, x)


class _Pass(NamedTuple):
    """The output of a pass, the shapes of noise it asked for, and its largest activation."""

    output: Tensor
    requests: list[tuple[int, ...]]
    modules: list[str]  # that asked for them
    untracked: list[int]  # how many numbers random functions of torch returned
    largest: int


def _run_few(net: nn.Module, two: Batch, four: Batch, pick: Pick) -> _Pass:
    """Run a model on four examples; raise an error if examples share noise or anything else."""
    _check_independent(make_eval_copy(net, noise=False), two, pick)
    few = _record_pass(net, lambda: pick(call_net(net, clone_batch(two))))
    many = _record_pass(net, lambda: pick(call_net(net, clone_batch(four))))
    for shape, doubled, name in zip(few.requests, many.requests, many.modules, strict=True):
        if (shape[:1], doubled[:1]) != ((2,), (4,)) or shape[1:] != doubled[1:]:
            raise NotRowwiseError(f"{name} draws noise of shape {doubled} for all examples")
    if [2 * count for count in few.untracked] != many.untracked:
        raise NotRowwiseError("code of the model draws noise that examples share")
    return many._replace(largest=many.largest // 4)


def _check_independent(quiet: nn.Module, x: Batch, pick: Pick) -> None:
    others = map_tensors(lambda t: 0.5 * t.flip(0) if t.is_floating_point() else t.flip(-1), x)
    both = tree_map(lambda a, b: torch.cat([a, b]) if isinstance(a, Tensor) else a, x, others)
    passes = [
        _record_pass(quiet, partial(lambda batch: pick(call_net(quiet, clone_batch(batch))), batch))
        for batch in (x, both)
    ]
    if passes[0].untracked:
        raise NotRowwiseError("its code calls random functions of torch")
    alone, together = (recorded.output for recorded in passes)
    if (len(alone), len(together)) != (2, 4):
        raise NotRowwiseError(f"the output has shape {tuple(together.shape)} for 4 examples")
    if not torch.allclose(alone, together[:2], rtol=1e-3, atol=1e-5, equal_nan=True):
        raise NotRowwiseError("the output for an example depends on the other examples")


def _record_pass(net: nn.Module, forward: Callable[[], Tensor]) -> _Pass:
    """One pass with noise from a fixed seed, in the shapes that the model asks for."""
    requests: list[tuple[int, ...]] = []
    modules: list[str] = []
    untracked: list[int] = []
    sizes = [1]
    random = Random(0)

    def draw(shape: Sequence[int]) -> Tensor:
        requests.append(tuple(shape))
        name, module = active[-1] if active else ("(net)", net)
        modules.append(f"'{name}' ({type(module).__name__})")
        count = math.prod(shape)
        normal = [random.gauss(0, 1) for _ in range(min(count, _DISTINCT))]
        repeats = -(-count // len(normal)) if normal else 1
        return torch.tensor(normal).repeat(repeats)[:count].reshape(tuple(shape))

    def draw_untracked(
        function: Any, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        output = call_with_generator(function, args, kwargs)
        untracked.append(tensors_in(output)[0].numel())
        return output

    def record_size(module: nn.Module, _: object, output: object) -> None:
        sizes.append(sum(t.numel() for t in tensors_in(output)))

    with ExitStack() as stack:
        active = track_active_module(net, stack)
        for module in net.modules():
            if is_stochastic(module) or not any(True for _ in module.children()):
                stack.callback(module.register_forward_hook(record_size).remove)
        with (
            draw_from(GeneratorNoise(0)),
            draw_from(TensorNoise(draw)),
            RandomOpMode(draw_untracked),
        ):
            output = forward()
    return _Pass(output, requests, modules, untracked, max(sizes))


def _make_split(
    net: nn.Module, two: Batch, expected: Tensor, pick: Pick
) -> tuple[Split, tuple[bool, ...]]:
    """Trace and split a model, and compare the parts with the whole for the same noise."""
    if isinstance(two, Tensor) and type(net) is not nn.Sequential:
        net = nn.Sequential(net)
    sources = {m for m in net.modules() if any(map(is_stochastic, m.modules()))}
    split = split_at_noise(net, trace_model(net, two), sources)
    has_examples = _find_examples(split, two)
    values = split.prefix(clone_batch(two))
    plan = RowPlan(split, has_examples, None, 0, 0, "")
    output = _record_pass(nn.Identity(), lambda: pick(run_suffix(plan, values, 2))).output
    if output.shape != expected.shape or not torch.allclose(output, expected, 1e-3, 1e-4):
        raise NotTraceableError("its parts return another output than the whole model")
    return split, has_examples


def run_suffix(plan: RowPlan, values: Sequence[object], draws: int) -> Any:
    """Run the part after the first noise for some draws of the examples in `values`."""
    arguments = [
        Examples(value) if plan.has_examples[i] and i not in plan.split.moments else value
        for i, value in enumerate(values)
    ]
    return plan.split.suffix(draws, *arguments)


def slice_values(plan: RowPlan, values: Sequence[object], start: int, stop: int) -> list[object]:
    """The values of some examples."""
    pairs = zip(values, plan.has_examples, strict=True)
    return [slice_batch(value, start, stop) if flag else value for value, flag in pairs]


def _find_examples(split: Split, two: Batch) -> tuple[bool, ...]:
    """Which values between the two parts have examples along axis 0, from two and three of them."""

    def raise_on_draw(function: Any, *_: object) -> NoReturn:
        name = function.overloadpacket.__name__
        raise NotTraceableError(f"it calls {name} before the first noise")

    flags = []
    with RandomOpMode(raise_on_draw):
        runs = (split.prefix(clone_batch(two)), split.prefix(_take_examples(two, [0, 1, 0])))
    for few, many in zip(*runs, strict=True):
        if isinstance(few, Tensor) and (few.shape[:1], many.shape[:1]) == ((2,), (3,)):
            flags.append(True)
        elif few.shape == many.shape if isinstance(few, Tensor) else few == many:
            flags.append(False)
        else:
            raise NotTraceableError("its computations depend on the number of examples")
    return tuple(flags)


def _wrap_model(net: nn.Module) -> tuple[Split, tuple[bool, ...]]:
    """A whole model as the second part: its inputs are repeated for every draw."""
    layers = (m for m in net.modules() if isinstance(m, GaussianLayer))
    net = clone_modules(net, {layer: layer.to_fast_layout() for layer in layers})
    split = Split(lambda x: (x,), lambda draws, x: call_net(net, repeat_rows(x, draws)))
    return split, (True,)
