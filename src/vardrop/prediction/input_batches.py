"""The inputs of a prediction: one batch, a loader of batches, or one input that is not split."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from vardrop._core.calls import (
    Batch,
    check_named,
    map_tensors,
    num_examples,
    plain_batch,
    tensors_in,
)
from vardrop._core.errors import VardropError, report_arguments

BatchOrLoader = Tensor | Mapping[str, object] | Iterable[Any]


def device_of(net: nn.Module) -> torch.device | None:
    """The device of the first tensor of a model; None if it has none."""
    tensor = next(chain(net.parameters(), net.buffers()), None)
    return None if tensor is None else tensor.device


def one_input(device: torch.device | None, x: Any) -> Iterator[Any]:
    """Yield one input as a whole, with its tensors on a device."""
    yield x if device is None else map_tensors(lambda t: t.to(device), plain_batch(x))


def input_batches(device: torch.device | None, data: BatchOrLoader) -> Iterator[Batch]:
    """Yield the checked inputs of one batch or of a loader, on a device."""
    count = 0
    with report_arguments("x"):
        batches = iter([data] if isinstance(data, Tensor | Mapping) else data)
    for batch in batches:
        x = plain_batch(batch[0] if isinstance(batch, tuple | list) and batch else batch)
        if not tensors_in(x):
            raise VardropError(
                "Expected `x` to be a tensor, a dictionary of tensors, or batches of them, but got "
                f"{type(data).__name__} of {type(batch).__name__}. Convert it with torch.as_tensor."
            )
        _check_values(x)
        count += 1
        yield x if device is None else map_tensors(lambda t: t.to(device), x)
    if count == 0:
        raise VardropError("Expected `x` to give at least one batch, but got an empty loader.")


@report_arguments("x")
def _check_values(x: Batch) -> None:
    if num_examples(x) == 0:
        raise VardropError("Expected `x` to have rows, but got none.")
    check_named(x)
    named = x if isinstance(x, Mapping) else {"x": x}
    for name, tensor in ((n, t) for n, part in named.items() for t in tensors_in(part)):
        # The sum is cheap. It is finite unless a value is not finite, or it overflows.
        masks = tensor.is_floating_point() and "mask" not in name  # which may hold -infinity
        if masks and not (math.isfinite(float(tensor.sum())) or bool(tensor.isfinite().all())):
            bad = int((~tensor.isfinite()).sum())
            text = f"Expected `{name}` to be finite, but got {bad} values that are NaN or infinite"
            raise VardropError(f"{text}. Clean the input first.")
