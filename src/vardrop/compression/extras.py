"""Packages that compression needs beyond torch, imported where they are used."""

from __future__ import annotations

import importlib
from typing import Any

from vardrop.errors import VardropError


def require(module: str, package: str) -> Any:
    """Import an optional package, or say how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as missing:
        raise VardropError(
            f"Expected the package {package} to be installed, but got: {missing}. "
            "Install vardrop[compress]."
        ) from missing
