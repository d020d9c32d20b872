"""Checks of arguments. Every error names the argument, the value and, if there is one, a remedy."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from operator import ge, gt, le, lt
from types import UnionType

import torch
from torch import Tensor, nn

from vardrop._core.errors import VardropError

LARGEST = 2**63 - 1  # the largest integer that torch stores
LARGEST_WEIGHT = 1e9  # of an example; float32 sums of larger ones lose the others
_MOST_NAMES = 10  # of a list in an error
_LIMITS = (("above", gt), ("at least", ge), ("below", lt), ("at most", le))


def check_number(
    name: str,
    value: object,
    *,
    above: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
    remedy: str = "",
) -> None:
    """Raise an error unless a value is a finite real number within the limits.

    Args:
        name: of the argument, for the message.
        value: the argument.
        above: the value must be greater.
        at_least: the value must be greater or equal.
        below: the value must be less.
        at_most: the value must be less or equal.
        remedy: the end of the message.

    >>> check_number("drop_rate", 0.5, at_least=0, below=1)
    """
    limits = zip(_LIMITS, (above, at_least, below, at_most), strict=True)
    active = [(word, compare, limit) for (word, compare), limit in limits if limit is not None]
    number = math.nan
    if isinstance(value, Real) and not isinstance(value, bool):
        too_large = isinstance(value, Integral) and abs(int(value)) > LARGEST
        number = math.inf if too_large else float(value)
    wanted = " and ".join(["a finite number", *(f"{word} {limit:g}" for word, _, limit in active)])
    fits = math.isfinite(number) and all(compare(number, limit) for _, compare, limit in active)
    _check(fits, name, value, wanted, remedy)


def check_integer(name: str, value: object, at_least: int = 1, remedy: str = "") -> None:
    """Raise an error unless a value is an integer of at least `at_least` and of 64 bits, no bool.

    Args:
        name: of the argument, for the message.
        value: the argument.
        at_least: the smallest allowed value.
        remedy: the end of the message.

    >>> check_integer("samples", 8)
    """
    fits = (
        isinstance(value, Integral)
        and not isinstance(value, bool)
        and at_least <= int(value) <= LARGEST
    )
    _check(fits, name, value, f"an integer of at least {at_least}", remedy)


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise an error unless a value is one of the choices.

    >>> check_choice("per", "weight", ("weight", "layer"))
    """
    if not isinstance(value, str) or value not in choices:
        raise VardropError(
            f"Expected `{name}` to be one of {', '.join(map(repr, choices))}, but got {value!r}."
            f"{suggest(value, choices)}"
        )


def suggest(value: object, choices: Iterable[object]) -> str:
    """Suggest the closest name, as the end of an error message. Empty if no name is close.

    >>> suggest("sparse-VD", ("sparse_vd", "l0"))
    " Did you mean 'sparse_vd'?"
    """
    names = {str(name).lower(): name for name in choices}
    word = value.lower() if isinstance(value, str) else ""
    matches = difflib.get_close_matches(word, names, 1) if word else []
    return f" Did you mean {names[matches[0]]!r}?" if matches else ""


def check_type(
    name: str,
    value: object,
    kind: type | UnionType | tuple[type, ...],
    wanted: str,
    remedy: str = "",
) -> None:
    """Raise an error unless a value has a type, which `wanted` describes.

    Args:
        name: of the argument, for the message.
        value: the argument.
        kind: the type or types.
        wanted: describes them in the message.
        remedy: the end of the message.

    >>> check_type("on", True, bool, "True or False")
    """
    _check(isinstance(value, kind), name, value, wanted, remedy)


def check_net(net: object, name: str = "net") -> None:
    """Raise an error unless a value is a module.

    >>> check_net(nn.Linear(2, 1))
    """
    check_type(name, net, nn.Module, "a torch.nn.Module")


def check_tensor(name: str, value: object, remedy: str = "") -> None:
    """Raise an error unless a value is a tensor.

    >>> import torch
    >>> check_tensor("x", torch.zeros(2))
    """
    if not isinstance(value, Tensor):
        advice = remedy or f"Convert it with torch.as_tensor({name})."
        check_type(name, value, Tensor, "a tensor", advice)


def check_shape(name: str, value: Tensor, expected: torch.Size, reference: str) -> None:
    """Raise an error unless a value is a tensor with the shape of another one.

    Args:
        name: of the argument, for the message.
        value: the argument.
        expected: the shape.
        reference: what has this shape.

    >>> import torch
    >>> check_shape("y", torch.zeros(2), torch.Size([2]), "mean")
    """
    check_tensor(name, value)
    if value.shape != expected:
        raise VardropError(
            f"Expected `{name}` to have shape {tuple(expected)} to match `{reference}`, but got "
            f"shape {tuple(value.shape)}. Reshape one of the two: broadcasting would mix examples."
        )


def describe_value(value: object) -> str:
    """Describe a value in an error message, in at most 80 characters.

    Args:
        value: any value.

    Returns:
        The description.
    """
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    text = repr(value)
    if isinstance(value, nn.Module) or "\n" in text:
        return f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def list_names(names: Sequence[str]) -> str:
    """The first ten names of a list in quotation marks, each shortened, and the number of others.

    >>> list_names(["a", "b"]), list_names([f"x{i}" for i in range(99)])[-16:]
    ("'a', 'b'", "'x9' (99 in all)")
    """
    count = f" ({len(names):,} in all)" if len(names) > _MOST_NAMES else ""
    return ", ".join(map(describe_value, names[:_MOST_NAMES])) + count


def _check(fits: bool, name: str, value: object, wanted: str, remedy: str) -> None:
    if not fits:
        text = f"Expected `{name}` to be {wanted}, but got {describe_value(value)}. {remedy}"
        raise VardropError(text.rstrip())
