"""Errors of the library. Their messages name the argument, the value and the remedy."""

from __future__ import annotations

import importlib
from types import ModuleType


class VardropError(ValueError):
    """Raised for bad input, in the form "Expected `x` to ..., but got .... Remedy."."""


class NotFiniteError(VardropError):
    """A loss, a parameter or a prediction is NaN or infinite."""


class UnregisteredKLError(VardropError):
    """No KL divergence is registered for this pair of posterior and prior."""


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
