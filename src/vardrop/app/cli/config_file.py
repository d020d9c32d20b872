"""Options from a TOML file, and modules to import before a command runs."""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import typer

from vardrop._core.checks import describe_value, suggest
from vardrop._core.errors import VardropError

_NOT_FROM_FILE = ("config", "resume", "help")
_PLAIN = (str, int, float)


def import_modules(names: Sequence[str]) -> None:
    """Import modules, also from the working directory, for what they register."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)
    for name in names:
        try:
            import_module(name or " ")
        except Exception as failure:  # a module of the user can raise anything
            missing = f"{failure.name}." if isinstance(failure, ModuleNotFoundError) else None
            if missing is not None and f"{name or ' '}.".startswith(missing):
                raise typer.BadParameter(
                    f"Expected --import to name a module that is installed or in {here}, without "
                    f".py, but got {name!r}."
                ) from failure
            raise VardropError(
                f"Expected to import {name}, but got: {type(failure).__name__}: {failure}. See "
                "--debug."
            ) from failure


def read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Set the defaults of the options of a command from a TOML file."""
    if path is None or context.resilient_parsing:
        return path
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise typer.BadParameter(f"File not found: {path}.") from None
    except (OSError, ValueError, RecursionError) as broken:
        raise typer.BadParameter(f"Expected {path} to hold TOML, but got: {broken}.") from broken
    modules = values.pop("import", [])
    import_modules(_to_texts("import", modules, path))
    options = {p.name: p for p in context.command.params if p.name not in _NOT_FROM_FILE}
    defaults: dict[str, Any] = {}
    for key, value in values.items():
        name = key.replace("-", "_")
        if name not in options:
            raise typer.BadParameter(f"Unknown option {key!r} in {path}.{suggest(name, options)}")
        texts = _to_texts(key, value, path, flag=getattr(options[name], "is_flag", False))
        defaults[name] = texts if getattr(options[name], "multiple", False) else ",".join(texts)
    context.default_map = defaults
    return path


def _to_texts(key: str, value: Any, path: Path, flag: bool = False) -> list[str]:
    """A value of the file as it would be typed, so that the option converts it."""
    if isinstance(value, dict):
        items = list(value.values())
        texts = [f"{name}={item!r}" for name, item in value.items()]
    else:
        items = value if isinstance(value, list) else [value]
        texts = [str(item) for item in items]
    wanted = "true or false" if flag else "a text, a number or a list of them"
    if any(isinstance(item, bool) != flag or not isinstance(item, _PLAIN) for item in items):
        raise typer.BadParameter(
            f"Expected {key!r} in {path} to be {wanted}, but got {describe_value(value)}."
        )
    return texts
