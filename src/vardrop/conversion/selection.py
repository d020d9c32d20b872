"""Which modules a conversion is about: by name pattern, type or predicate."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from vardrop._core.checks import check_type
from vardrop._core.errors import VardropError

_SELECTION = "a name pattern, a module type, a predicate (module, name) -> bool or a list of these"
Selection = str | type[nn.Module] | Callable[[nn.Module, str], bool]


def selects(include: Any, module: nn.Module, name: str) -> bool:
    """Whether a selection (name pattern, type, predicate, list of these; None: all) has a module.

    >>> selects("fc*", nn.Linear(2, 1), "fc1"), selects([nn.Conv2d, "x"], nn.Linear(2, 1), "fc1")
    (True, False)
    """
    if include is None:
        return True
    if isinstance(include, list | tuple):
        return any(selects(part, module, name) for part in include)
    if isinstance(include, str):
        return fnmatchcase(name, include)
    return isinstance(module, include) if isinstance(include, type) else bool(include(module, name))


def check_selection(
    argument: str, include: Selection | list[Selection] | None, names: list[str] | None = None
) -> None:
    """Refuse what is no selection, and a pattern that matches none of the names, if given."""
    patterns: Any = include if isinstance(include, list | tuple) else [include]
    for pattern in () if include is None else patterns:
        check_type(argument, pattern, str | Callable, _SELECTION)
        if names is None or callable(pattern) or any(fnmatchcase(n, pattern) for n in names):
            continue
        raise VardropError(
            f"Expected `{argument}` to match a module, but got {pattern!r}. "
            f"The names are {join_names([n or '(net)' for n in names])}."
        )


def join_names(names: list[str], most: int = 8) -> str:
    """Names in a sentence: all of a few, the first of many.

    >>> join_names(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")
