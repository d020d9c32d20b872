"""Score a net on held-out data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from vardrop.checks import check_net, check_type
from vardrop.compression.flow import as_inputs, evaluating
from vardrop.errors import VardropError

Metric = Callable[[Tensor, Tensor], Any]
# Two tensors (inputs, targets), or an iterable of such batches, to be read more than once.
Data = tuple[Tensor, Tensor] | Iterable[tuple[Any, Tensor]]

_BATCH = 1000


def batches(data: Data, name: str = "data") -> list[tuple[Any, Tensor]]:
    """Held-out data as a list of batches; an error where there are no rows."""
    check_type(name, data, Iterable, "two tensors or batches of (inputs, targets)")
    if isinstance(data, tuple) and len(data) == 2 and isinstance(data[0], Tensor):
        x, y = data
        if len(x) != len(y):
            raise VardropError(
                f"Expected inputs and targets of one length, but got {len(x)} and {len(y)}."
            )
        found: list[Any] = list(zip(x.split(_BATCH), y.split(_BATCH), strict=True))
    else:
        found = list(data)
    for batch in found:
        check_type(name, batch, (tuple, list), "batches of (inputs, targets)")
        if len(batch) != 2 or not isinstance(batch[1], Tensor):
            raise VardropError(f"Expected `{name}` to give (inputs, targets), but got {batch!r}.")
    if sum(len(y) for _, y in found) == 0:
        raise VardropError(f"Expected data to score on, but got no rows in `{name}`.")
    return found


def outputs(net: nn.Module, data: Data, name: str = "data") -> tuple[Tensor, Tensor]:
    """All outputs of a net in evaluation mode, and the targets."""
    check_net(net)
    found = batches(data, name)
    with evaluating(net):
        predicted = [net(*as_inputs(x)) for x, _ in found]
    return torch.cat(predicted), torch.cat([y for _, y in found])


def score(net: nn.Module, data: Data, metric: Metric) -> float:
    """The metric of a net's outputs against the targets."""
    found = metric(*outputs(net, data))
    try:
        value = float(found)
    except (TypeError, ValueError):
        value = math.nan
    if math.isnan(value):
        raise VardropError(f"Expected `metric` to return a number, but got {found!r}.")
    return value


def accuracy(output: Tensor, target: Tensor) -> float:
    """Share of examples whose largest output is at the target class.

    >>> import torch
    >>> accuracy(torch.tensor([[1.0, 2.0], [3.0, 0.0]]), torch.tensor([1, 1]))
    0.5
    """
    return float((output.argmax(1) == target).double().mean())
