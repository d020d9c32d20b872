"""Run a net: its arguments and mode, hooks for a while, its score, the clock, probes for two."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from vardrop._core.calls import call_net, clone_batch, output_tensor, plain_batch, tensors_in
from vardrop._core.checks import check_net, check_type, describe_value
from vardrop._core.errors import VardropError
from vardrop._core.torch_private import tree_map_only
from vardrop.heads import Head
from vardrop.noisy import Noisy, evaluating, named_modules_of

Inputs = tuple[Any, ...]
Metric = Callable[[Tensor, Tensor], Any]
# Two tensors (inputs, targets), or an iterable of such batches, to be read more than once.
Data = tuple[Tensor, Tensor] | Iterable[tuple[Any, Tensor]]

# What the code of a net raises for inputs, or sizes of its layers, that it was not written for.
CODE_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
_BATCH = 1000
_BUDGET = 0.02  # seconds, of a call in a round of timing
_TOLERANCE = 1e-5  # relative to the largest output
_SCALES = (0.01, 1.0, 1.0, 10.0, 100.0)  # of random inputs


class Removable(Protocol):
    """A handle of a hook."""

    def remove(self) -> None:
        """Take the hook away."""


def to_arguments(example_input: Any) -> Inputs:
    """The arguments of a net: those of a tuple, or one, which may be a dictionary of named ones."""
    return example_input if isinstance(example_input, tuple) else (plain_batch(example_input),)


def first_rows(inputs: Inputs) -> Inputs:
    """The first row of every tensor among the arguments."""
    return tree_map_only(Tensor, lambda t: t[:1] if t.dim() else t, inputs)


def check_plain(net: nn.Module) -> None:
    """Refuse a net with noise that shrinking takes away; a head stays as it is."""
    check_net(net)
    noisy = [n for n in named_modules_of(net, Noisy) if n not in named_modules_of(net, Head)]
    if noisy:
        raise VardropError(
            f"Expected `net` to be plain, but got noise in '{noisy[0]}'. Give the result of "
            "vardrop.shrink(net, example_input)."
        )


def check_runs(net: nn.Module, inputs: Inputs) -> None:
    """Refuse an example that holds nothing or that the net cannot be called with."""
    tensors = tensors_in(inputs)
    if not tensors or any(t.numel() == 0 for t in tensors):
        raise VardropError(
            "Expected `example_input` to be a tensor, or a tuple or dictionary of arguments, "
            "with at least one row, but got "
            f"{describe_value(inputs[0] if len(inputs) == 1 else inputs)}."
        )
    for tensor in tensors:
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise VardropError("Expected `example_input` to be finite, but got NaN or infinity.")
    try:
        returned = run(net, inputs)
    except Exception as failure:  # named in one error, whatever the code of the net raises
        raise VardropError(
            f"Expected `net` to take `example_input`, but got {type(failure).__name__}: {failure}"
        ) from failure
    if not returned:
        raise VardropError(
            "Expected `net` to return tensors, in tuples, lists or dictionaries, but got none to "
            "compare. Wrap it in a module that returns the tensors."
        )


@contextmanager
def hooks(*handles: Removable) -> Iterator[None]:
    """Remove hooks at the end, whatever happens."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class PlainAttention(TorchFunctionMode):
    """Attention by products and a softmax.

    Fused kernels take a NaN among scores for hidden, and nothing counts their products.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Inputs = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return torch.ops.aten._scaled_dot_product_attention_math(*args, **(kwargs or {}))[0]


def run(net: nn.Module, inputs: Inputs) -> list[Tensor]:
    """The tensors that a net returns in evaluation mode."""
    with torch.no_grad(), evaluating(net):
        return tensors_in(call_net(net, clone_batch(inputs)))


def batches(data: Data, name: str = "data") -> list[tuple[Any, Tensor]]:
    """Held-out data as a list of batches; an error where there are no rows."""
    check_type(name, data, Iterable, "two tensors or batches of (inputs, targets)")
    if isinstance(data, tuple) and len(data) == 2 and isinstance(data[0], Tensor):
        x, y = data
        if len(x) != len(y):
            raise VardropError(
                f"Expected inputs and targets of one length, but got {len(x)} and {len(y)}."
            )
        pairs: list[Any] = list(zip(x.split(_BATCH), y.split(_BATCH), strict=True))
    else:
        pairs = list(data)
    for batch in pairs:
        check_type(name, batch, (tuple, list), "batches of (inputs, targets)")
        if len(batch) != 2 or not isinstance(batch[1], Tensor):
            raise VardropError(f"Expected `{name}` to give (inputs, targets), but got {batch!r}.")
    if sum(len(y) for _, y in pairs) == 0:
        raise VardropError(f"Expected data to score on, but got no rows in `{name}`.")
    return pairs


def outputs(net: nn.Module, data: Data, name: str = "data") -> tuple[Tensor, Tensor]:
    """All outputs of a net in evaluation mode, and the targets."""
    check_net(net)
    examples = batches(data, name)
    with torch.no_grad(), evaluating(net):
        predicted = [
            output_tensor(call_net(net, clone_batch(to_arguments(x)))) for x, _ in examples
        ]
    return torch.cat(predicted), torch.cat([y for _, y in examples])


def score(net: nn.Module, data: Data, metric: Metric) -> float:
    """The metric of a net's outputs against the targets."""
    result = metric(*outputs(net, data))
    try:
        value = float(result)
    except (TypeError, ValueError):
        value = math.nan
    if math.isnan(value):
        raise VardropError(f"Expected `metric` to return a number, but got {result!r}.")
    return value


def accuracy(output: Tensor, target: Tensor) -> float:
    """Fraction of examples whose largest output is at the target class.

    >>> import torch
    >>> accuracy(torch.tensor([[1.0, 2.0], [3.0, 0.0]]), torch.tensor([1, 1]))
    0.5
    """
    return float((output.argmax(1) == target).double().mean())


def time_interleaved(calls: Mapping[str, Callable[[], Any]], rounds: int = 10) -> dict[str, float]:
    """The best time of each of several calls, taken in turns so that other load hits all alike.

    In every round a call is tried at least five times, and as often as fits into 20 ms.
    """
    best = dict.fromkeys(calls, math.inf)
    for name, function in [*calls.items()] * rounds:
        function()
        tries, start = 0, time.perf_counter()
        while tries < 5 or time.perf_counter() - start < _BUDGET:
            begin = time.perf_counter()
            function()
            best[name] = min(best[name], time.perf_counter() - begin)
            tries += 1
    return best


class Probes:
    """The outputs of a net on an example and on random inputs of several scales, to compare with.

    Random integers are in the range of the example's. Probes that the net does not take are left
    out.
    """

    def __init__(
        self, net: nn.Module, example: Inputs, scales: tuple[float, ...] = _SCALES
    ) -> None:
        self.net, self.example = net, example
        self.expected = [(example, run(net, example))]
        generator = torch.Generator().manual_seed(0)
        for scale in scales:
            draw = partial(_random, scale=scale, generator=generator)
            probe = tree_map_only(Tensor, draw, example)
            try:
                self.expected.append((probe, run(net, probe)))
            except CODE_ERRORS:  # some code takes no other integers
                continue

    def equal(self, other: nn.Module) -> bool:
        """Whether another net agrees, in double precision where that of the net leaves doubt.

        Large inputs can magnify rounding beyond the tolerance, but not that of doubles.
        """
        try:  # whatever breaks the other net makes it another
            for probe, expected in self.expected:
                if _close(expected, run(other, probe)):
                    continue
                wide = tree_map_only(Tensor, _to_double, probe)
                nets = (copy.deepcopy(net).double() for net in (self.net, other))
                if not _close(*(run(net, wide) for net in nets)):
                    return False
        except CODE_ERRORS:
            return False
        return True

    def change(self, other: nn.Module) -> float:
        """The largest difference between the outputs of both nets on the example."""
        pairs = zip(self.expected[0][1], run(other, self.example), strict=True)
        differences = [(a.double() - b.double()).abs() for a, b in pairs if a.is_floating_point()]
        return max((float(d.max()) for d in differences if d.numel()), default=0.0)

    def __str__(self) -> str:
        count = len(self.expected) - 1
        if not count:
            return "Equal on the example alone: the net takes no random input like it."
        words = f"of scale {min(_SCALES):g} to {max(_SCALES):g}"
        integers = [t for t in tensors_in(self.example) if not t.is_floating_point()]
        if integers:
            low, high = min(int(t.min()) for t in integers), max(_largest(t) for t in integers)
            words += f", integers from {low} to {high}"
        return f"Equal on the example and on {count} random inputs {words}."


def _to_double(value: Tensor) -> Tensor:
    return value.double() if value.is_floating_point() else value


def _largest(integers: Tensor) -> int:
    """The largest integer to try: one more than the example has, where all of its are the same."""
    low, high = int(integers.min()), int(integers.max())
    # On other devices an index out of range cannot be caught.
    return high + 1 if low == high and integers.device.type == "cpu" else high


def _random(value: Tensor, scale: float, generator: torch.Generator) -> Tensor:
    if value.is_floating_point():
        return (scale * torch.randn(value.shape, generator=generator)).to(value)
    if value.is_complex():
        return value
    low, high = int(value.min()), _largest(value)
    return torch.randint(low, high + 1, value.shape, generator=generator).to(value)


def _close(expected: list[Tensor], actual: list[Tensor]) -> bool:
    if [t.shape for t in expected] != [t.shape for t in actual]:
        return False
    for a, b in zip(expected, actual, strict=True):
        finite = a.double().nan_to_num(0, 0, 0) if a.is_floating_point() else torch.zeros(1)
        allowed = _TOLERANCE * max(1.0, float(finite.abs().max()) if a.numel() else 0.0)
        if not torch.allclose(a, b, rtol=0.0, atol=allowed, equal_nan=True):
            return False
    return True
