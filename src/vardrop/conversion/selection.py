"""Which modules a conversion is about: by name pattern, type or predicate."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase

from torch import nn

from vardrop.checks import shown
from vardrop.errors import VardropError

Where = str | type[nn.Module] | Callable[[nn.Module, str], bool]


def selects(where: Where | list[Where] | None, module: nn.Module, name: str) -> bool:
    """Whether a selection (name pattern, type, predicate, list of these) takes a module."""
    if where is None:
        return True
    if isinstance(where, list | tuple):
        return any(selects(w, module, name) for w in where)
    if isinstance(where, str):
        return fnmatchcase(name, where)
    if isinstance(where, type):
        return isinstance(module, where)
    return bool(where(module, name))


def check_selection(
    argument: str, where: Where | list[Where] | None, names: list[str] | None = None
) -> None:
    """Refuse what is no selection, and a pattern that matches none of the names, where given."""
    patterns = where if isinstance(where, list | tuple) else [where]
    for pattern in patterns:
        if not (isinstance(pattern, str) or callable(pattern) or where is None):
            raise VardropError(
                f"Expected `{argument}` to be a name pattern, a module type, a predicate (module, "
                f"name) -> bool or a list of these, but got {shown(pattern)}."
            )
        if names is None or not isinstance(pattern, str):
            continue
        if not any(fnmatchcase(n, pattern) for n in names):
            raise VardropError(
                f"Expected `{argument}` to match a module, but got {pattern!r}. "
                f"The names are {listed([n or '(net)' for n in names])}."
            )


def listed(names: list[str], most: int = 8) -> str:
    """Names in a sentence: all of a few, the first of many.

    >>> listed(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")
