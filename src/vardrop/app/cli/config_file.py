"""Options from a TOML file, and modules to import before a command runs."""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import typer

from vardrop._core.checks import describe_value, suggest
from vardrop._core.errors import VardropError

_NOT_FROM_FILE = ("config", "resume", "help")
_PLAIN = (str, int, float)


def import_modules(names: Sequence[str]) -> None:
    """Import modules that register data sets or methods, also from the working directory."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)
    for name in names:
        try:
            import_module(name or " ")
        # A user's module can raise anything. Every error becomes one line with its name.
        except Exception as failure:
            missing = f"{failure.name}." if isinstance(failure, ModuleNotFoundError) else None
            if missing is not None and f"{name or ' '}.".startswith(missing):
                text = f"No module {name!r} is installed or in {here}. Pass its name without .py."
                raise typer.BadParameter(text) from failure
            text = f"Importing {name} failed: {type(failure).__name__}: {failure}. See --debug."
            raise VardropError(text) from failure


def read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Set the defaults of the options of a command from a TOML file."""
    if path is None or context.resilient_parsing:
        return path
    try:
        settings = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise typer.BadParameter(f"File not found: {path}.") from None
    except (OSError, ValueError, RecursionError) as broken:
        raise typer.BadParameter(f"Expected {path} to hold TOML, but got: {broken}.") from broken
    import_modules(_to_texts("import", settings.pop("import", []), path))
    options = {p.name: p for p in context.command.params if p.name not in _NOT_FROM_FILE}
    defaults: dict[str, str | list[str]] = {}
    for key, setting in settings.items():
        name = key.replace("-", "_")
        if name not in options:
            raise typer.BadParameter(f"Unknown option {key!r} in {path}.{suggest(name, options)}")
        texts = _to_texts(key, setting, path, flag=getattr(options[name], "is_flag", False))
        defaults[name] = texts if getattr(options[name], "multiple", False) else ",".join(texts)
    context.default_map = defaults
    return path


def _to_texts(key: str, setting: object, path: Path, flag: bool = False) -> list[str]:
    """A setting of the file in the form of the command line, so that the option converts it."""
    if isinstance(setting, dict):
        parts = list(setting.values())
        texts = [f"{name}={part!r}" for name, part in setting.items()]
    else:
        parts = setting if isinstance(setting, list) else [setting]
        texts = [str(part) for part in parts]
    if any(isinstance(part, bool) != flag or not isinstance(part, _PLAIN) for part in parts):
        wanted = "true or false" if flag else "a text, a number or a list of them"
        problem = f"Expected {key!r} in {path} to be {wanted}, but got {describe_value(setting)}."
        raise typer.BadParameter(problem)
    return texts
