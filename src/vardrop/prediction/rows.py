"""Draws of a model as further examples of one pass, with the part before the noise run once.

A plan cuts the trace of a model at its first noise. The second part runs on (draws * N) examples: a
noisy layer on a value without noise draws that many outputs from its mean and standard deviation,
and a value without noise that meets one with noise is repeated. A model that has no trace runs as a
whole on repeated inputs. The plan is verified on a few examples.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor, fx, nn

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
from vardrop._core.modules import clone_modules, hooks
from vardrop._core.torch_private import tree_map
from vardrop.functional import (
    GeneratorNoise,
    RandomOpMode,
    TensorNoise,
    call_with_generator,
    draw_from,
)
from vardrop.prediction.eval_copy import (
    GaussianLayer,
    compute_variances,
    is_stochastic,
    make_eval_copy,
    sample_gaussian,
    track_active_module,
    use_call_generator,
)
from vardrop.prediction.trace import (
    BRANCHES,
    NotTraceableError,
    bind_inputs,
    fold_batchnorm,
    overwrite_relu_inputs,
    trace_model,
)

_LIVE_TENSORS = 6  # of the largest activation's size, at one time
_CACHE_ELEMENTS = 2**18  # of the largest activation that stay in the cache with what is made of it
_MIN_BLOCK = 96  # examples that a convolution gets at once
_MAX_BLOCK_BYTES = 2**28
_Result = TypeVar("_Result")
_NORMALS = torch.randn(997, generator=torch.Generator().manual_seed(0))  # noise of recorded passes


class NotRowwiseError(VardropError):
    """Why draws of a model cannot be further examples of one pass."""


class Split(NamedTuple):
    """The two parts of a model.

    `prefix(x)` returns the values that the second part needs; `suffix(draws, *values)` returns what
    the model returns, for draws * N examples. Some of the values have examples along axis 0, or are
    the number of examples.
    """

    prefix: Callable[[Batch], Sequence[Any]]
    suffix: Any  # a module, or a function
    has_examples: tuple[bool, ...]


class RowPlan(NamedTuple):
    """How a model runs on inputs of one shape.

    Args:
        split: the part that runs once, and the part that runs for all draws.
        noise: standard normal numbers per example and draw; None if code of the model calls random
            functions of torch.
        block: examples, of any draw, that are run at once.
        outputs: elements of the output, per example.
        note: why no part of the model is shared by the draws; empty if one is.
    """

    split: Split
    noise: int | None
    block: int
    outputs: int
    note: str


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

    def __init__(self, net: nn.Module, pick: Pick, memory: int, local: bool, most: int) -> None:
        self.pick, self.memory, self.most = pick, memory, most
        self.net = compute_variances(make_eval_copy(net, noise=True, local=local))
        self.plans: dict[tuple[torch.Size, ...], RowPlan] = {}

    def plan(self, x: Batch) -> RowPlan:
        """The plan for inputs of this shape; raises `NotRowwiseError` if there is none.

        The model is split at its first noise. On a few examples it is verified that outputs do not
        depend on other examples, that noise is drawn for every example, and that the two parts
        return the output of the whole model for the same noise.
        """
        key = tuple(t.shape[1:] for t in tensors_in(x))
        if key in self.plans:
            return self.plans[key]
        index = [0, min(1, num_examples(x) - 1)]
        two = map_tensors(lambda t: t[torch.tensor(index, device=t.device)] if t.dim() else t, x)
        others = map_tensors(
            lambda t: 0.5 * t.flip(0) if t.is_floating_point() else t.flip(-1), two
        )
        four = tree_map(lambda a, b: torch.cat([a, b]) if tensors_in(a) else a, two, others)
        complete, reason = attempt(lambda: _verify(self.net, four, self.pick))
        if complete is None:
            raise NotRowwiseError(reason)
        split, note = attempt(lambda: _split_model(self.net, four, complete, self.pick))
        if note == BRANCHES:  # a branch for one draw may be another one for all of them
            raise NotRowwiseError(note)
        if split is None:
            net = self.net  # without `self`, which would be kept alive by its own plan
            run = lambda draws, x: call_net(net, repeat_rows(x, draws))  # noqa: E731
            split = Split(lambda x: (x,), run, (True,))
        outputs = complete.output[0].numel()
        largest = max(complete.largest // 4, outputs)
        block = min(self.memory, _MAX_BLOCK_BYTES) // (4 * _LIVE_TENSORS * largest)
        if complete.output.is_cpu:
            block = min(block, max(_MIN_BLOCK, _CACHE_ELEMENTS // largest))
        noise = sum(math.prod(shape[1:]) for shape in complete.requests)
        has_count = not complete.untracked
        self.plans[key] = RowPlan(split, noise if has_count else None, max(1, block), outputs, note)
        return self.plans[key]

    def describe(self, x: Batch) -> str:
        note = self.plan(x).note
        shared = f"no part is shared, because {note}" if note else "the noise-free part is shared"
        return f"draws as further examples; {shared}"

    def max_examples(self, x: Batch, samples: int) -> int:
        plan = self.plan(x)
        fit = self.memory // (4 * _LIVE_TENSORS * min(samples, self.most) * plan.outputs)
        return max(plan.block, fit // plan.block * plan.block)

    def draws(self, x: Batch, samples: int) -> Iterator[Tensor]:
        plan, count = self.plan(x), num_examples(x)
        block, traced = plan.block, not plan.note and plan.noise is not None
        with nullcontext() if traced else use_call_generator(self.net):
            values = plan.split.prefix(clone_batch(x))
            for size in split_evenly(samples, self.most):
                blocks = []
                for start in range(0, count, block):
                    stop = min(start + block, count)
                    part = [
                        value if not flag
                        else stop - start if isinstance(value, int)
                        else slice_batch(value, start, stop)
                        for value, flag in zip(values, plan.split.has_examples, strict=True)
                    ]  # fmt: skip
                    most = max(1, block // min(block, count - start))
                    outputs = [
                        self.pick(plan.split.suffix(draws, *part)).unflatten(0, (draws, -1))
                        for draws in split_evenly(size, most)
                    ]
                    blocks.append(outputs[0] if len(outputs) == 1 else torch.cat(outputs))
                yield blocks[0] if len(blocks) == 1 else torch.cat(blocks, 1)


def attempt(run: Callable[[], _Result]) -> tuple[_Result | None, str]:
    """The result, or None and the reason why there is none.

    The model's code runs on proxies and on other batches than the user's, so it may raise any
    exception. It then runs on the user's own batch, where its errors reach the user.
    """
    try:
        with torch.no_grad():
            return run(), ""
    except Exception as error:
        return None, (str(error).strip().splitlines() or [type(error).__name__])[0]


class _Pass(NamedTuple):
    """The output of a pass, the shapes of noise it asked for, and its largest activation."""

    output: Tensor
    requests: list[tuple[int, ...]]
    modules: list[str]  # that asked for them
    untracked: list[int]  # how many numbers random functions of torch returned
    largest: int


def _verify(net: nn.Module, four: Batch, pick: Pick) -> _Pass:
    """Run a model on four examples; raise an error if examples share noise or anything else."""
    three, complete = (_record_pass(net, pick, slice_batch(four, 0, count)) for count in (3, 4))
    for few, many, name in zip(three.requests, complete.requests, complete.modules, strict=True):
        if (few[:1], many[:1]) != ((3,), (4,)) or few[1:] != many[1:]:
            raise NotRowwiseError(f"{name} draws noise of shape {many} for all examples")
    if [4 * count for count in three.untracked] != [3 * count for count in complete.untracked]:
        raise NotRowwiseError("code of the model draws noise that examples share")
    alone, together = three, complete
    if complete.untracked:  # its noise differs, so compare without noise
        quiet = make_eval_copy(net, noise=False)
        alone, together = (_record_pass(quiet, pick, slice_batch(four, 0, n)) for n in (3, 4))
        if together.untracked:
            raise NotRowwiseError("its code calls random functions of torch")
    if (len(alone.output), len(together.output)) != (3, 4):
        shape = tuple(together.output.shape)
        raise NotRowwiseError(f"the output has shape {shape} for 4 examples")
    if not torch.allclose(alone.output, together.output[:3], 1e-3, 1e-5, equal_nan=True):
        raise NotRowwiseError("the output for an example depends on the other examples")
    return complete


def _record_pass(net: nn.Module, pick: Pick, x: Batch) -> _Pass:
    """One pass with constant noise, the same for every second example."""
    requests: list[tuple[int, ...]] = []
    modules: list[str] = []
    untracked: list[int] = []
    sizes = [1]

    def draw(shape: Sequence[int]) -> Tensor:
        requests.append(tuple(shape))
        modules.extend(active[-1:])
        rows, count = (shape[0], math.prod(shape[1:])) if shape else (1, 1)
        places = torch.arange(2 * count).add_(101 * len(requests)) % len(_NORMALS)
        pair = _NORMALS[places].view(2, count)
        return pair.repeat(-(-rows // 2), 1)[:rows].reshape(tuple(shape))

    def draw_untracked(
        function: Any, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        output = call_with_generator(function, args, kwargs)
        untracked.append(tensors_in(output)[0].numel())
        return output

    def record_size(module: nn.Module, _: object, output: object) -> None:
        sizes.append(sum(t.numel() for t in tensors_in(output)))

    parts = [m for m in net.modules() if is_stochastic(m) or next(m.children(), None) is None]
    with (
        track_active_module(net) as active,
        hooks(*(m.register_forward_hook(record_size) for m in parts)),
        draw_from(GeneratorNoise(0)),
        draw_from(TensorNoise(draw)),
        RandomOpMode(draw_untracked),
    ):
        output = pick(call_net(net, clone_batch(x)))
    return _Pass(output, requests, modules, untracked, max(sizes))


def _split_model(net: nn.Module, four: Batch, complete: _Pass, pick: Pick) -> Split:
    """Trace and split a copy of a model, and compare the parts with the complete pass."""
    net, two, three = clone_modules(net), slice_batch(four, 0, 2), slice_batch(four, 0, 3)
    if isinstance(two, Tensor) and type(net) is not nn.Sequential:
        net = nn.Sequential(net)
    sources = {m for m in net.modules() if any(map(is_stochastic, m.modules()))}
    split = split_at_noise(net, trace_model(net, two), sources, (two, three))

    shared = split.prefix(clone_batch(two))
    output = _record_pass(split.suffix, pick, (2, *shared)).output
    expected = complete.output[[0, 1, 0, 1]]
    # Both draws get the same noise, except of random functions of torch.
    same = slice(2 if complete.untracked else 4)
    if output.shape != expected.shape or not torch.allclose(
        output[same], expected[same], 1e-3, 1e-4
    ):
        raise NotTraceableError("its parts return another output than the whole model")
    return split


def split_at_noise(
    net: nn.Module, graph: fx.Graph, sources: set[nn.Module], batches: tuple[Batch, ...] = ()
) -> Split:
    """Cut the graph of a model at the modules that are `sources` of noise.

    Args:
        net: the model, whose Gaussian layers this changes.
        graph: its trace.
        sources: modules that draw noise.
        batches: two batches of different sizes, to find the values with examples along axis 0.
            Without them all values have examples.
    """
    modules = dict(net.named_modules())
    marked: set[fx.Node] = set()
    for node in graph.nodes:
        is_source = node.op == "call_module" and modules[str(node.target)] in sources
        if is_source or any(n in marked for n in node.all_input_nodes):
            marked.add(node)
    if next(iter(reversed(graph.nodes))) not in marked:
        raise NotTraceableError("its output has no noise")
    fold_batchnorm(graph, modules)
    for layer in modules.values():
        if isinstance(layer, GaussianLayer):
            layer.use_fast_layout()

    def make_module(graph: fx.Graph) -> fx.GraphModule:
        targets = {str(n.target) for n in graph.nodes if n.op in ("call_module", "get_attr")}
        root = {t: modules[t] if t in modules else operator.attrgetter(t)(net) for t in targets}
        return fx.GraphModule(root, graph).eval()

    prefix, taken = _build_prefix(graph, modules, marked)
    module = make_module(prefix)

    def run_prefix(x: Batch) -> Sequence[Any]:
        inputs = bind_inputs(net, x)
        return module(*(value for value in inputs.values() if isinstance(value, Tensor)))

    count = sum(map(len, taken.values()))
    has_examples = _find_examples(run_prefix, batches) if batches else (True,) * count
    suffix = _build_suffix(graph, marked, taken, has_examples)
    overwrite_relu_inputs(suffix, modules)
    return Split(run_prefix, make_module(suffix), has_examples)


def _build_prefix(
    graph: fx.Graph, modules: dict[str, nn.Module], marked: set[fx.Node]
) -> tuple[fx.Graph, dict[fx.Node, list[fx.Node]]]:
    """The part without noise, and what the other part takes from it.

    A node of that part is either a value, or a Gaussian layer, of which it takes the moments.
    """
    prefix, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    taken: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        inputs = [n for n in node.all_input_nodes if n not in marked]
        layer = modules.get(str(node.target)) if node.op == "call_module" else None
        if node not in marked:
            copies[node] = prefix.node_copy(node, copies.__getitem__)
        elif isinstance(layer, GaussianLayer) and inputs == list(node.args):
            arguments = (prefix.get_attr(str(node.target)), copies[inputs[0]])
            moments = prefix.call_method("moments", arguments)
            taken[node] = [prefix.call_function(operator.getitem, (moments, i)) for i in (0, 1)]
        else:
            for value in inputs:
                taken.setdefault(value, [copies[value]])
    prefix.output(tuple(value for values in taken.values() for value in values))
    return prefix, taken


def _build_suffix(
    graph: fx.Graph,
    marked: set[fx.Node],
    taken: dict[fx.Node, list[fx.Node]],
    has_examples: tuple[bool, ...],
) -> fx.Graph:
    """The part with noise, for several draws of its values."""
    suffix, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    draws, flags = suffix.placeholder("draws"), iter(has_examples)
    for node, values in taken.items():
        arguments = [suffix.placeholder(f"{node.name}_{i}") for i in range(len(values))]
        repeats = [next(flags) for _ in values]
        if node in marked:
            copies[node] = suffix.call_function(sample_gaussian, (*arguments, draws))
        elif repeats[0]:
            copies[node] = suffix.call_function(repeat_rows, (*arguments, draws))
        else:
            (copies[node],) = arguments
    for node in graph.nodes:
        if node in marked and node not in copies:
            copies[node] = suffix.node_copy(node, copies.__getitem__)
            if node.op == "call_method" and node.target == "view":
                copies[node].target = "reshape"  # the layout of a layer's output may be another
    return suffix


def _find_examples(
    prefix: Callable[[Batch], Sequence[Any]], batches: tuple[Batch, ...]
) -> tuple[bool, ...]:
    """Which values between the two parts have examples along axis 0, from two and three of them."""

    def raise_on_draw(function: Any, *_: object) -> NoReturn:
        name = function.overloadpacket.__name__
        raise NotTraceableError(f"it calls {name} before the first noise")

    with RandomOpMode(raise_on_draw):
        runs = [prefix(clone_batch(x)) for x in batches]
    few, many = ([tuple(getattr(value, "shape", (value,))) for value in run] for run in runs)
    has_examples = tuple((a[:1], b[:1]) == ((2,), (3,)) for a, b in zip(few, many, strict=True))
    if any(a != b for a, b, rows in zip(few, many, has_examples, strict=True) if not rows):
        raise NotTraceableError("its computations depend on the number of examples")
    return has_examples


def repeat_rows(x: Any, draws: int) -> Any:
    """Repeat the examples of a batch for every draw; of their number, compute the multiple.

    The result is a new tensor, because code after it may write into it.
    """
    if draws == 1:
        return map_tensors(Tensor.clone, x)  # keeps the memory layout, which repeat does not
    if isinstance(x, int | torch.SymInt):
        return x * draws
    return map_tensors(lambda t: t.repeat(draws, *(1,) * (t.dim() - 1)) if t.dim() else t, x)
