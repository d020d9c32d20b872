"""Hooks for modules of other libraries.

An integration registers functions for the classes of its library. It is loaded when a model has a
module of that library. The entry point group `vardrop.integrations` maps the package of a class to
the module of the integration, so that any package can add one.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from torch import Tensor, nn

_GROUP = "vardrop.integrations"
Span = Callable[[tuple[Any, ...], dict[str, Any]], tuple[int, int | None]]
_loaded = {"torch", "vardrop", "__main__"}  # packages without an integration, or with a loaded one
_positions: list[tuple[Callable[[nn.Module], bool], Span]] = []
input_checks: dict[str, Callable[[str, Tensor], None]] = {}


def load_integration(kind: type) -> None:
    """Load the integration of the library that a class comes from, if there is one."""
    package = package_of(kind)
    if package not in _loaded:  # the search for entry points takes a tenth of a second
        for entry_point in entry_points(group=_GROUP, name=package):
            entry_point.load()
        _loaded.add(package)


def package_of(kind: type) -> str:
    """The package that a class comes from.

    >>> package_of(dict), package_of(dict[str, int])
    ('builtins', 'builtins')
    """
    return kind.__module__.partition(".")[0]


def register_positions(applies: Callable[[nn.Module], bool], span: Span) -> None:
    """Register which positions of a sequence a call of a model processes.

    Args:
        applies: whether a model belongs to the integration and can continue a sequence.
        span: from the positional and the named arguments of a call, the position of the first
            token, and the position after the last one if layers may see only the last ones.
    """
    _positions.append((applies, span))


def position_span(net: nn.Module) -> Span | None:
    """The registered function for the positions of a call of a model, if there is one."""
    return next((span for applies, span in _positions if applies(net)), None)


def register_input_check(name: str, check: Callable[[str, Tensor], None]) -> None:
    """Register a check of the inputs of models with one name.

    Args:
        name: of the input.
        check: a function of the name and the tensor. It raises an error for a wrong input.
    """
    input_checks[name] = check
