"""Checks of arguments that every room needs: one sentence form, the remedy where there is one."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from numbers import Integral, Real
from types import UnionType
from typing import Any

from torch import Tensor, nn

from vardrop._core.errors import VardropError


def check_number(
    name: str,
    value: Any,
    *,
    above: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
    remedy: str = "",
) -> None:
    """Refuse all but a finite real number within the bounds.

    >>> check_number("drop_rate", 0.5, at_least=0, below=1)
    """
    bounds = [
        f"{word} {bound:g}"
        for word, bound in (
            ("above", above),
            ("at least", at_least),
            ("below", below),
            ("at most", at_most),
        )
        if bound is not None
    ]
    wanted = " and ".join(["a finite number", *bounds])
    real = isinstance(value, Real) and not isinstance(value, bool)
    try:
        number = float(value) if real else math.nan
    except OverflowError:  # an integer that no float can hold
        number = math.inf
    fits = (
        math.isfinite(number)
        and (above is None or number > above)
        and (at_least is None or number >= at_least)
        and (below is None or number < below)
        and (at_most is None or number <= at_most)
    )
    if not fits:
        raise VardropError(_sentence(name, wanted, value, remedy))


def check_integer(name: str, value: Any, at_least: int = 1, remedy: str = "") -> None:
    """Refuse all but an integer that is large enough; a bool is none.

    >>> check_integer("samples", 8)
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < at_least:
        raise VardropError(_sentence(name, f"an integer of at least {at_least}", value, remedy))


def check_choice(name: str, value: Any, known: tuple[str, ...]) -> None:
    """Refuse a value that is none of the known words.

    >>> check_choice("per", "weight", ("weight", "layer"))
    """
    if not isinstance(value, str) or value not in known:
        words = ", ".join(repr(word) for word in known)
        raise VardropError(
            f"Expected `{name}` to be one of {words}, but got {value!r}.{nearest(value, known)}"
        )


def nearest(value: Any, known: Iterable[Any]) -> str:
    """The end of an error about a name: what was probably meant; empty where nothing is near.

    >>> nearest("sparse-VD", ("sparse_vd", "l0"))
    " Did you mean 'sparse_vd'?"
    """
    names = {str(name).lower(): name for name in known}
    found = difflib.get_close_matches(str(value).lower(), names, 1) if value else []
    return f" Did you mean {names[found[0]]!r}?" if found else ""


def check_type(
    name: str, value: Any, kind: type | UnionType | tuple[type, ...], wanted: str, remedy: str = ""
) -> None:
    """Refuse a value of another type; `wanted` says in words what is expected.

    >>> check_type("on", True, bool, "True or False")
    """
    if not isinstance(value, kind):
        raise VardropError(_sentence(name, wanted, value, remedy))


def check_net(net: Any, name: str = "net") -> None:
    """Refuse all but a module.

    >>> check_net(nn.Linear(2, 1))
    """
    check_type(name, net, nn.Module, "a torch.nn.Module")


def check_tensor(name: str, value: Any, remedy: str = "") -> None:
    """Refuse all but a tensor.

    >>> import torch
    >>> check_tensor("x", torch.zeros(2))
    """
    if not isinstance(value, Tensor):
        remedy = remedy or f"Convert it with torch.as_tensor({name})."
        raise VardropError(_sentence(name, "a tensor", value, remedy))


def shown(value: Any) -> str:
    """A value as an error message shows it: short, whatever it is."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, nn.Module):
        return f"a {type(value).__name__}"
    text = repr(value)
    if "\n" in text:  # of tensors, say
        return f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def printable(text: str) -> str:
    """A text as a terminal may show it: characters that would steer the terminal are spelt out.

    >>> print(printable("red \\x1b[31m"))
    red \\x1b[31m
    """
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text
    )


def _sentence(name: str, wanted: str, value: Any, remedy: str) -> str:
    return f"Expected `{name}` to be {wanted}, but got {shown(value)}. {remedy}".rstrip()
