"""Calls of a model: its batches and its outputs.

A batch is a tensor, a tuple of arguments, a list that is one argument, or a dictionary of named
arguments (or another mapping, such as a `BatchEncoding`), with examples along axis 0 of each
tensor. An output is a tensor, or an object with `logits`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from inspect import signature
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from vardrop._core import integrations
from vardrop._core.checks import describe_value
from vardrop._core.errors import VardropError, report_arguments
from vardrop._core.torch_private import tree_leaves, tree_map_only

Batch = Tensor | Sequence[object] | Mapping[str, object]
BatchOrLoader = Tensor | Mapping[str, object] | Iterable[Any]
LabelledData = tuple[Batch, Tensor] | Iterable[tuple[Batch, Tensor]]  # a pair, or batches
Pick = Callable[[Any], Tensor]  # the tensor in the output of a model
_BATCH_SIZE = 1000  # of a pair (x, y)
_Structure = TypeVar("_Structure")


def call_net(net: nn.Module, x: Batch) -> Any:
    """Compute net(x), net(*x) of a tuple, or net(**x) of a mapping if the model has these names.

    >>> import torch
    >>> call_net(torch.nn.Bilinear(2, 3, 1), (torch.zeros(4, 2), torch.zeros(4, 3))).shape
    torch.Size([4, 1])
    """
    if isinstance(x, Tensor):
        return net(x)
    args, kwargs = call_arguments(net, x)
    return net(*args, **kwargs)


def call_arguments(net: nn.Module, x: Batch) -> tuple[tuple[object, ...], dict[str, object]]:
    """The positional and the named arguments of a call with a batch."""
    if isinstance(x, tuple) and len(x) == 1 and isinstance(x[0], Mapping):
        x = x[0]
    if not isinstance(x, Mapping):
        return (x if isinstance(x, tuple) else (x,)), {}
    try:
        signature(net.forward).bind(**x)
    except TypeError:  # the model takes the mapping itself
        return (x,), {}
    return (), dict(x)


def plain_batch(x: Batch) -> Batch:
    """A batch with a dictionary instead of another mapping, such as a `BatchEncoding`."""
    return dict(x) if isinstance(x, Mapping) else x


def tensors_in(x: object) -> list[Tensor]:
    """The tensors of a batch, in any structure of tuples, lists and dictionaries."""
    if isinstance(x, Tensor):
        return [x]
    leaves = tree_leaves(dict(x) if isinstance(x, Mapping) else x)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def num_examples(x: Batch, name: str = "x") -> int:
    """The number of examples of a batch: the length of its tensors, which must agree.

    >>> import torch
    >>> num_examples({"a": torch.zeros(4, 2), "b": torch.zeros(4), "flag": True})
    4
    """
    if isinstance(x, Tensor) and x.dim():
        return x.shape[0]
    lengths = sorted({t.shape[0] for t in tensors_in(x) if t.dim()})
    if not lengths:
        raise VardropError(
            f"Expected `{name}` to be a tensor, or a tuple or dictionary of tensors, with "
            f"examples along axis 0, but got {type(x).__name__}."
        )
    if len(lengths) > 1:
        raise VardropError(
            f"Expected the tensors of `{name}` to have one number of examples, but got "
            f"{' and '.join(map(str, lengths))}. Pad or cut them to the same examples."
        )
    return lengths[0]


def check_named(x: Batch) -> None:
    """Check named tensors: one number of examples, and the checks of integrations."""
    if isinstance(x, Mapping):
        num_examples(x)
        for name, tensor in x.items():
            if name in integrations.input_checks and isinstance(tensor, Tensor):
                integrations.input_checks[name](name, tensor)


def device_of(net: nn.Module) -> torch.device | None:
    """The device of the first tensor of a model; None if it has none."""
    tensor = next(chain(net.parameters(), net.buffers()), None)
    return None if tensor is None else tensor.device


def input_batches(device: torch.device | None, data: BatchOrLoader) -> Iterator[Batch]:
    """Yield the checked inputs of one batch or of a loader, on a device."""
    batch = None
    with report_arguments("x"):
        batches = iter([data] if isinstance(data, Tensor | Mapping) else data)
    for batch in batches:
        x = plain_batch(batch[0] if isinstance(batch, tuple | list) and batch else batch)
        if not tensors_in(x):
            raise VardropError(
                "Expected `x` to be a tensor, a dictionary of tensors, or batches of them, but got "
                f"{type(data).__name__} of {type(batch).__name__}. Convert it with torch.as_tensor."
            )
        with report_arguments("x"):
            if num_examples(x) == 0:
                raise VardropError("Expected `x` to have rows, but got none.")
            check_named(x)
            named = x if isinstance(x, Mapping) else {"x": x}
            for name, tensor in ((n, t) for n, part in named.items() for t in tensors_in(part)):
                if not tensor.is_floating_point() or "mask" in name:  # a mask may hold -infinity
                    continue
                # The sum is cheap. It is finite unless a value is not finite, or it overflows.
                if not (math.isfinite(float(tensor.sum())) or bool(tensor.isfinite().all())):
                    bad = int((~tensor.isfinite()).sum())
                    raise VardropError(
                        f"Expected `{name}` to be finite, but got {bad} values that are NaN or "
                        "infinite. Clean the input first."
                    )
        yield x if device is None else map_tensors(lambda t: t.to(device), x)
    if batch is None:
        raise VardropError("Expected `x` to give at least one batch, but got an empty loader.")


def labelled_batches(data: LabelledData, name: str = "data") -> Iterator[tuple[Batch, Tensor]]:
    """Yield batches (x, y) of inputs and targets.

    Args:
        data: a pair (x, y), or an iterable of such batches.
        name: the argument, for messages.
    """
    wanted = "a pair (inputs, targets) or batches of such pairs"
    # A tensor, an array and a DataFrame have a shape.
    if not isinstance(data, Iterable) or hasattr(data, "shape"):
        raise VardropError(f"Expected `{name}` to be {wanted}, but got {describe_value(data)}.")
    if isinstance(data, tuple | list) and len(data) == 2 and isinstance(data[1], Tensor):
        x, y = plain_batch(data[0]), data[1]
        if num_examples(x, name) != len(y):
            raise VardropError(
                f"Expected inputs and targets of one length in `{name}`, but got "
                f"{num_examples(x)} and {len(y)}."
            )
        data = zip(split_batch(x, _BATCH_SIZE), y.split(_BATCH_SIZE), strict=False)
    count = 0
    for batch in data:
        is_pair = isinstance(batch, tuple | list) and len(batch) == 2
        if not is_pair or not isinstance(batch[1], Tensor):
            raise VardropError(
                f"Expected `{name}` to give pairs (inputs, targets), but got "
                f"{describe_value(batch)}."
            )
        count += len(batch[1])
        yield batch[0], batch[1]
    if count == 0:
        raise VardropError(f"Expected `{name}` to have examples, but got none.")


def split_batch(x: Batch, size: int) -> Iterator[Batch]:
    """Split a batch into parts of at most `size` examples."""
    for start in range(0, num_examples(x), size):
        yield slice_batch(x, start, start + size)


def slice_batch(x: _Structure, start: int, stop: int) -> _Structure:
    """Some examples of a batch."""
    return map_tensors(lambda t: t[start:stop] if t.dim() else t, x)


def map_tensors(function: Callable[[Tensor], Any], x: _Structure) -> _Structure:
    """Apply a function to each tensor of a batch. One tensor needs no walk over a structure."""
    if isinstance(x, Tensor):
        return function(x)
    return tree_map_only(Tensor, function, dict(x) if isinstance(x, Mapping) else x)


def clone_batch(x: _Structure) -> _Structure:
    """A batch with copies of its tensors.

    A model whose first operation is in place (`Dropout(inplace=True)`, `x += 1`) then does not
    change the batch of the caller, and every draw starts from the same inputs.
    """
    return map_tensors(Tensor.clone, x)


def output_tensor(output: object) -> Tensor:
    """The output of a model as one tensor: the output itself, or its `logits`.

    >>> import torch
    >>> output_tensor({"logits": torch.zeros(2, 3), "loss": torch.zeros(())}).shape
    torch.Size([2, 3])
    """
    if isinstance(output, Tensor):
        return output
    logits = (
        output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    )
    if isinstance(logits, Tensor):
        return logits
    raise VardropError(
        f"Expected the model to return one tensor or an output with `logits`, but got "
        f"{type(output).__name__}. Pass output=, a function that picks the tensor."
    )
