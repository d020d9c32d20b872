"""Calls of a net: what it takes and what it gives.

A batch is a tensor, a tuple of arguments, or a dictionary of named ones (a `BatchEncoding` too),
with examples along axis 0 of each tensor. An output is a tensor, or an object with `logits`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from vardrop._core.errors import VardropError
from vardrop._core.integrations import check_input
from vardrop._core.torch_private import tree_leaves, tree_map_only


def call(net: nn.Module, x: Any) -> Any:
    """net(x), net(*x) of a tuple, net(**x) of a mapping whose names the net has.

    >>> import torch
    >>> call(torch.nn.Bilinear(2, 3, 1), (torch.zeros(4, 2), torch.zeros(4, 3))).shape
    torch.Size([4, 1])
    """
    if isinstance(x, Tensor):
        return net(x)
    args, kwargs = arguments(net, x)
    return net(*args, **kwargs)


def arguments(net: nn.Module, x: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and the named arguments that a batch is."""
    if isinstance(x, tuple) and len(x) == 1 and isinstance(x[0], Mapping):
        x = x[0]
    if isinstance(x, Mapping):
        return ((), dict(x)) if _has_names(net, x) else ((x,), {})
    return (x if isinstance(x, tuple) else (x,)), {}


def _has_names(net: nn.Module, x: Mapping[str, Any]) -> bool:
    """Whether the forward of a net takes these arguments; else it takes the mapping itself."""
    try:
        signature(net.forward).bind(**x)
    except TypeError:
        return False
    return True


def plain_batch(x: Any) -> Any:
    """A batch with dictionaries in the place of other mappings, such as a `BatchEncoding`."""
    return dict(x) if isinstance(x, Mapping) else x


def tensors_in(x: Any) -> list[Tensor]:
    """The tensors of a batch, in any structure of tuples, lists and dictionaries."""
    if isinstance(x, Tensor):
        return [x]
    return [leaf for leaf in tree_leaves(x) if isinstance(leaf, Tensor)]


def rows(x: Any, name: str = "x") -> int:
    """How many examples a batch has: the length of its tensors, which must agree.

    >>> import torch
    >>> rows({"a": torch.zeros(4, 2), "b": torch.zeros(4), "flag": True})
    4
    """
    if isinstance(x, Tensor) and x.dim():
        return x.shape[0]
    found = sorted({t.shape[0] for t in tensors_in(x) if t.dim()})
    if not found:
        raise VardropError(
            f"Expected `{name}` to be a tensor, or a tuple or dictionary of tensors, with "
            f"examples along axis 0, but got {type(x).__name__}."
        )
    if len(found) > 1:
        raise VardropError(
            f"Expected the tensors of `{name}` to have one number of rows, but got "
            f"{' and '.join(map(str, found))}. Pad or cut them to the same examples."
        )
    return found[0]


def check_named(x: Any) -> None:
    """Refuse named tensors of other numbers of rows, and what an integration refuses."""
    if isinstance(x, Mapping):
        rows(x)
        for name, value in x.items():
            check_input(name, value)


def parts(x: Any, size: int) -> Iterator[Any]:
    """A batch in parts of at most so many rows."""
    if isinstance(x, Tensor):
        yield from x.split(size)
        return
    for start in range(0, rows(x), size):
        yield mapped(lambda t, a=start: t[a : a + size] if t.dim() else t, x)


def mapped(function: Any, x: Any) -> Any:
    """A batch with a function of each of its tensors."""
    return function(x) if isinstance(x, Tensor) else tree_map_only(Tensor, function, x)


def untouched(x: Any) -> Any:
    """A batch with copies of its tensors.

    A net that begins in place (`Dropout(inplace=True)`, `x += 1`) then leaves the caller's alone,
    and every draw begins with the same.
    """
    return x.clone() if isinstance(x, Tensor) else tree_map_only(Tensor, Tensor.clone, x)


def shapes(x: Any) -> tuple[torch.Size, ...]:
    """The shapes of one example."""
    return tuple(t.shape[1:] for t in tensors_in(x))


def one_tensor(output: Any) -> Tensor:
    """The output as one tensor: itself, or its `logits`.

    >>> import torch
    >>> one_tensor({"logits": torch.zeros(2, 3), "loss": torch.zeros(())}).shape
    torch.Size([2, 3])
    """
    if isinstance(output, Tensor):
        return output
    found = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if isinstance(found, Tensor):
        return found
    raise VardropError(
        f"Expected the net to return one tensor or an output with `logits`, but got "
        f"{type(output).__name__}. Pass output=, a function that picks the tensor."
    )


class Picked(nn.Module):
    """A net whose output a function turns into one tensor."""

    def __init__(self, net: nn.Module, pick: Any) -> None:
        super().__init__()
        self.net, self.pick = net, pick

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the function picks."""
        return self.pick(self.net(*args, **kwargs))
