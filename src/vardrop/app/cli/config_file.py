"""What the command line reads before a command runs: options from a file, packages of your own."""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import typer

from vardrop._core.checks import nearest, shown
from vardrop._core.errors import VardropError

_NOT_FROM_FILE = ("config", "resume", "help")


def imported(names: Sequence[str]) -> None:
    """Import modules, also of the working directory, so that what they register is known."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)
    for name in names:
        try:
            import_module(name or " ")
        except ModuleNotFoundError as absent:
            if name and absent.name is not None and not f"{name}.".startswith(f"{absent.name}."):
                raise VardropError(
                    f"Expected to import {name}, but got: {absent}. Install what it needs."
                ) from absent
            hint = " Leave .py away." if name.endswith(".py") else ""
            raise typer.BadParameter(
                f"Expected --import to name a module that is installed or lies in {here}, but got "
                f"{name!r}.{hint}"
            ) from absent
        except Exception as failure:
            reason = f"{type(failure).__name__}: {failure}"
            raise VardropError(
                f"Expected to import {name}, but got: {reason}. See --debug."
            ) from failure


def configured(context: typer.Context, path: Path | None) -> Path | None:
    """Take what a TOML file says as if it had been typed; what is typed wins."""
    if path is None or context.resilient_parsing:
        return path
    found = _read(path)
    own = found.pop("import", ())
    imported([own] if isinstance(own, str) else list(own))
    known = {p.name: p for p in context.command.params if p.name not in _NOT_FROM_FILE}
    for key in list(found):
        if (name := key.replace("-", "_")) not in known:
            raise typer.BadParameter(
                f"Expected the keys of {path} to be options of `{context.command_path}`, but got "
                f"{key!r}.{nearest(name, known)}"
            )
        found[name] = _typed(context, known[name], found.pop(key), f"{key!r} in {path}")
    context.default_map = {**(context.default_map or {}), **found}
    return path


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise typer.BadParameter(f"Expected the file {path}, but it is not there.") from None
    except (OSError, ValueError) as broken:
        raise typer.BadParameter(f"Expected {path} to hold TOML, but got: {broken}.") from broken


def _typed(context: typer.Context, option: Any, value: Any, where: str) -> Any:
    """A value of the file as the command line would give it, if the option takes it."""
    if getattr(option, "is_flag", False):
        if not isinstance(value, bool):
            raise typer.BadParameter(f"Expected {where} to be true or false, but got {value!r}.")
        return value
    if isinstance(value, dict):
        value = [f"{name}={own!r}" for name, own in value.items()]
    several = value if isinstance(value, list) else [value]
    if any(isinstance(own, bool) or not isinstance(own, str | int | float) for own in several):
        raise typer.BadParameter(f"Expected {where} to be a text or a number, but got {value!r}.")
    texts = [str(own) for own in several]
    many = getattr(option, "multiple", False)
    if len(texts) > 1 and not many and option.metavar is None:
        raise typer.BadParameter(f"Expected {where} to be one value, but got {shown(value)}.")
    typed = texts if many else ",".join(texts)
    try:
        option.process_value(context, typed)
    except typer.TyperException as wrong:
        raise typer.BadParameter(f"Expected {where} to fit: {wrong.format_message()}") from wrong
    return typed
