"""Finds the experiments of a clone: they lie beside the package and are no part of the wheel."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import vardrop
from vardrop.errors import VardropError

_BESIDE = Path(vardrop.__file__).resolve().parents[2] / "experiments"  # in a clone


def descriptions(given: Path | None = None, beside: Path = _BESIDE) -> Path:
    """The directory of descriptions: the given one, ./experiments, or the one beside the source."""
    here = Path("experiments")
    if given is not None:
        return given
    return here if any(here.glob("*/*.toml")) else _code(here, beside)


def command(directory: Path, beside: Path = _BESIDE) -> Any:
    """The module that runs what the descriptions in `directory` say."""
    code = _code(directory, beside).resolve()
    if str(code.parent) not in sys.path:
        sys.path.insert(0, str(code.parent))
    return import_module("experiments.command")


def _code(*places: Path) -> Path:
    """The first of the places that holds the experiments' code."""
    for place in places:
        if (place / "command.py").is_file():
            return place
    searched = dict.fromkeys(str(place.resolve().parent) for place in places)
    raise VardropError(
        f"Expected a clone of vardrop's repository, but got no experiments/command.py in "
        f"{' or '.join(searched)}. The experiments of the papers are not part of the installed "
        "package: clone the repository, or unpack the source distribution (`pip download --no-deps "
        "--no-binary vardrop vardrop`), and run `vardrop reproduce` there."
    )
