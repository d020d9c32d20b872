"""Errors of the library. Their messages name the argument, the value and the remedy."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType


def printable(text: str) -> str:
    """Escape the characters of a text that would control the terminal.

    >>> print(printable("red \\x1b[31m"))
    red \\x1b[31m
    """
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text
    )


class VardropError(ValueError):
    """Raised for bad input, in the form "Expected `x` to ..., but got .... Remedy.".

    Names from files may contain control characters, which are escaped in the message.
    """

    def __init__(self, *parts: object) -> None:
        super().__init__(*(printable(str(part)) for part in parts))


class NotFiniteError(VardropError):
    """A loss, a parameter or a prediction is NaN or infinite."""


class UnregisteredKLError(VardropError):
    """No KL divergence is registered for this pair of posterior and prior."""


@contextmanager
def report_errors(describe: Callable[[Exception], str]) -> Iterator[None]:
    """Raise any error of a block as a `VardropError`.

    It is for code of other libraries and of the user, which may raise any type.

    Args:
        describe: makes the message from the error.
    """
    try:
        yield
    except VardropError:
        raise
    except Exception as failure:
        raise VardropError(describe(failure)) from failure


@contextmanager
def report_arguments(*names: str) -> Iterator[None]:
    """Report a built-in error, which a wrong argument caused in code of the user, with its name.

    Errors of other types pass, such as torch's out-of-memory error, because callers handle them.

    Args:
        names: the arguments that can be wrong, such as the inputs of a model.
    """
    try:
        yield
    except (AttributeError, LookupError, OverflowError, RuntimeError, TypeError, ValueError) as e:
        if type(e).__module__ != "builtins":
            raise
        arguments = " or ".join(f"`{name}`" for name in names)
        notes = "".join(f"\n{note}" for note in getattr(e, "__notes__", ()))
        raise VardropError(
            f"Expected {arguments} to fit this call, but got {type(e).__name__}: {e}{notes}"
        ) from e


def import_optional(module: str, extra: str = "app") -> ModuleType:
    """Import an optional package. The error for a missing one names the extra that installs it.

    >>> import_optional("json").dumps([1])
    '[1]'
    """
    try:
        return importlib.import_module(module)
    except ImportError as missing:
        raise VardropError(
            f"Expected the package {module.partition('.')[0]} to be installed, but got: {missing}. "
            f"Install it with `pip install 'vardrop[{extra}]'`."
        ) from missing
