"""Run a model on examples: check its inputs, collect its outputs, time it, compare two models."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from timeit import timeit
from typing import Any, SupportsFloat

import torch
from torch import Tensor, nn

from vardrop._core import calls
from vardrop._core.checks import describe_value
from vardrop._core.encoder import disable_encoder_fastpath
from vardrop._core.errors import VardropError, report_arguments, report_errors
from vardrop._core.modules import evaluating
from vardrop.heads import Head
from vardrop.likelihoods import check_model
from vardrop.noisy import Noisy, named_modules_of, sampling

Inputs = tuple[Any, ...]
Metric = Callable[[Tensor, Tensor], SupportsFloat]

# Errors that a model's code raises for inputs or layer sizes that it was not written for.
CODE_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
_BUDGET = 0.02  # seconds of one call in a round of timing
_TOLERANCE = 1e-5  # relative to the largest output
_SCALES = (0.01, 1.0, 1.0, 10.0, 100.0)  # of random inputs


def to_arguments(x: calls.Batch) -> Inputs:
    """The arguments of a model: a tuple unchanged, and any other input as the only argument."""
    return x if isinstance(x, tuple) else (calls.plain_batch(x),)


def check_plain(net: nn.Module) -> None:
    """Raise an error if a model has noise that `shrink` removes. Noise of a `Head` is allowed."""
    check_model(net)
    if noisy := [n for n, m in named_modules_of(net, Noisy).items() if not isinstance(m, Head)]:
        raise VardropError(
            f"Expected `net` to be plain, but got noise in '{noisy[0]}'. Pass the result of "
            "vardrop.shrink(net, example_input)."
        )


def check_runs(net: nn.Module, inputs: Inputs) -> None:
    """Raise an error if an example is empty or not finite, or if the model does not take it."""
    tensors = calls.tensors_in(inputs)
    if not tensors or any(t.numel() == 0 for t in tensors):
        raise VardropError(
            "Expected `example_input` to be a tensor, or a tuple or dictionary of arguments, with "
            "at least one row, but got "
            f"{describe_value(inputs[0] if len(inputs) == 1 else inputs)}."
        )
    with report_errors(
        lambda e: f"Expected `net` to take `example_input`, but got {type(e).__name__}: {e}"
    ):
        if not all(bool(t.isfinite().all()) for t in tensors if t.is_floating_point()):
            raise VardropError("Expected `example_input` to be finite, but got NaN or infinity.")
        returned = run(net, inputs)
    if not returned:
        raise VardropError(
            "Expected `net` to return tensors, in tuples, lists or dictionaries, but got none to "
            "compare. Wrap it in a module that returns the tensors."
        )


def run(net: nn.Module, inputs: Inputs) -> list[Tensor]:
    """The tensors that a model returns in evaluation mode."""
    with torch.no_grad(), evaluating(net):
        return calls.tensors_in(calls.call_net(net, calls.clone_batch(inputs)))


def outputs(net: nn.Module, data: calls.LabelledData, name: str = "data") -> tuple[Tensor, Tensor]:
    """All outputs of a model in evaluation mode, and the targets."""
    examples = list(calls.labelled_batches(data, name))
    with torch.no_grad(), evaluating(net):
        batches = (calls.clone_batch(to_arguments(x)) for x, _ in examples)
        predictions = [calls.output_tensor(calls.call_net(net, batch)) for batch in batches]
    return torch.cat(predictions), torch.cat([y for _, y in examples])


def score(net: nn.Module, data: calls.LabelledData, metric: Metric) -> float:
    """The metric of a model's outputs and the targets."""
    with report_arguments("data", "metric"):
        number = metric(*outputs(net, data))
        if not isinstance(number, SupportsFloat) or math.isnan(float(number)):
            raise VardropError(f"Expected `metric` to return a number, but got {number!r}.")
        return float(number)


def time_interleaved(
    calls: Mapping[str, Callable[[], object]], rounds: int = 10
) -> dict[str, float]:
    """The best time of each of several calls, in seconds.

    The calls alternate, so that other load on the machine affects all of them. In every round a
    call runs at least five times, and as often as 20 ms allow.
    """
    best = dict.fromkeys(calls, math.inf)
    for name, function in [*calls.items()] * rounds:
        function()
        seconds: list[float] = []
        while len(seconds) < 5 or sum(seconds) < _BUDGET:
            seconds.append(timeit(function, number=1))
        best[name] = min(best[name], *seconds)
    return best


class Probes:
    """The outputs of a model on an example and on random inputs of several scales.

    Random integers are in the range of the example's integers. Random inputs for which the model
    raises an error are left out.
    """

    def __init__(self, net: nn.Module, example: Inputs) -> None:
        self.net, self.example = net, example
        self.expected = [(example, run(net, example))]
        generator = torch.Generator().manual_seed(0)
        for scale in _SCALES:
            probe = calls.map_tensors(partial(_draw_like, scale, generator), example)
            with suppress(*CODE_ERRORS):  # some models take no other integers
                self.expected.append((probe, run(net, probe)))

    def equal(self, other: nn.Module) -> bool:
        """Whether another model has the same outputs, up to rounding.

        Large inputs can increase rounding errors beyond the tolerance. Such inputs are compared
        again in double precision. If the outputs differ, the fast path of encoders is disabled in
        the other model, and the outputs are compared once more.
        """
        for is_fast in (True, False):
            for module in () if is_fast else other.modules():
                disable_encoder_fastpath(module)
            with suppress(*CODE_ERRORS):  # a model that does not run is not equal
                far = [x for x, expected in self.expected if not _close(expected, run(other, x))]
                nets = [copy.deepcopy(net).double() for net in (self.net, other) if far]
                wide = calls.map_tensors(lambda t: t.double() if t.is_floating_point() else t, far)
                if all(_close(*(run(net, x) for net in nets)) for x in wide):
                    return True
        return False

    def change(self, other: nn.Module) -> float:
        """The largest difference on the example from the outputs of a noisy model's means."""
        with sampling(other, on=False):
            pairs = zip(self.expected[0][1], run(other, self.example), strict=True)
        differences = [(a.double() - b.double()).abs() for a, b in pairs if a.is_floating_point()]
        return max((float(d.max()) for d in differences if d.numel()), default=0.0)

    def __str__(self) -> str:
        count = len(self.expected) - 1
        if not count:
            return "Equal on the example only: the model takes no random input of its shape."
        text = f"of scale {min(_SCALES):g} to {max(_SCALES):g}"
        integers = (t for t in calls.tensors_in(self.example) if not t.is_floating_point())
        if ranges := [_range(t) for t in integers]:
            text += f", integers from {min(ranges)[0]} to {max(high for _, high in ranges)}"
        return f"Equal on the example and on {count} random inputs {text}."


def _range(integers: Tensor) -> tuple[int, int]:
    """The smallest and the largest integer to draw. A constant example gets one integer more."""
    low, high = int(integers.min()), int(integers.max())
    # On a GPU the error of an index out of range cannot be caught.
    return low, high + 1 if low == high and integers.device.type == "cpu" else high


def _draw_like(scale: float, generator: torch.Generator, tensor: Tensor) -> Tensor:
    if tensor.is_floating_point():
        return (scale * torch.randn(tensor.shape, generator=generator)).to(tensor)
    low, high = _range(tensor)
    return torch.randint(low, high + 1, tensor.shape, generator=generator).to(tensor)


def _close(expected: list[Tensor], actual: list[Tensor]) -> bool:
    if [t.shape for t in expected] != [t.shape for t in actual]:
        return False
    for a, b in zip(expected, actual, strict=True):
        finite = a[a.isfinite()] if a.is_floating_point() else torch.zeros(1)
        allowed = _TOLERANCE * max(1.0, float(finite.abs().max()) if finite.numel() else 0.0)
        if not torch.allclose(a, b, rtol=0.0, atol=allowed, equal_nan=True):
            return False
    return True
