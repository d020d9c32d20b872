"""Score a net on held-out data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from vardrop.compression.flow import as_inputs, evaluating
from vardrop.errors import VardropError

Metric = Callable[[Tensor, Tensor], Any]
# Two tensors (inputs, targets), or an iterable of such batches, to be read more than once.
Data = tuple[Tensor, Tensor] | Iterable[tuple[Any, Tensor]]

_BATCH = 1000


def batches(data: Data) -> list[tuple[Any, Tensor]]:
    """Held-out data as a list of batches."""
    if isinstance(data, tuple) and isinstance(data[0], Tensor):
        x, y = data
        if len(x) != len(y):
            raise VardropError(
                f"Expected inputs and targets of one length, but got {len(x)} and {len(y)}."
            )
        return list(zip(x.split(_BATCH), y.split(_BATCH), strict=True))
    return list(data)  # type: ignore[arg-type]


def outputs(net: nn.Module, data: Data) -> tuple[Tensor, Tensor]:
    """All outputs of a net in evaluation mode, and the targets."""
    found = batches(data)
    if not found:
        raise VardropError("Expected data to score on, but got no batches.")
    with evaluating(net):
        predicted = [net(*as_inputs(x)) for x, _ in found]
    return torch.cat(predicted), torch.cat([y for _, y in found])


def score(net: nn.Module, data: Data, metric: Metric) -> float:
    """The metric of a net's outputs against the targets."""
    return float(metric(*outputs(net, data)))


def accuracy(output: Tensor, target: Tensor) -> float:
    """Share of examples whose largest output is at the target class.

    >>> import torch
    >>> accuracy(torch.tensor([[1.0, 2.0], [3.0, 0.0]]), torch.tensor([1, 1]))
    0.5
    """
    return float((output.argmax(1) == target).double().mean())
