"""The program: parse the global options, run one command, print errors as one line on stderr."""

from __future__ import annotations

import io
import sys
import warnings
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from typing import Any

from vardrop._core.checks import suggest
from vardrop._core.errors import VardropError, import_optional, printable

for _package in ("typer", "rich"):
    import_optional(_package)

import typer

from vardrop.app.cli.commands import app

_INTERRUPTED = 130  # the exit code of typer
_ANYWHERE = ("--debug", "--quiet", "--version", "--import")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit. An error is one line on stderr, or a traceback with --debug."""
    words = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    options, others = _split_options(words)
    silent = "--quiet" in options and "--json" not in others
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()) if silent else nullcontext():
            warnings.showwarning = lambda message, *_, **__: _print(
                f"warning: {' '.join(str(message).split())}"
            )
            code = app([*options, *others], prog_name="vardrop", standalone_mode=False)
        if code == _INTERRUPTED:
            raise KeyboardInterrupt
    except (Exception, KeyboardInterrupt) as error:  # users see one line for any error
        if "--debug" in options:
            raise
        text, code = _describe(error)
        _print(text)
    sys.exit(code or 0)


def _print(text: str) -> None:
    print(f"vardrop: {printable(text)}", file=sys.stderr)


def _split_options(typed: Sequence[str]) -> tuple[list[str], list[str]]:
    """The options of the program, which may be anywhere, and the command with its options."""
    options: list[str] = []
    others: list[str] = []
    words = iter(typed)
    for word in words:
        name, equals, _ = word.partition("=")
        if word == "--":
            others += [word, *words]
        elif name == "--import" and not equals:
            options.append(f"{word}={next(words, '')}")
        else:
            (options if name in _ANYWHERE else others).append(word)
    return options, others


def _describe(error: BaseException) -> tuple[str, int]:
    """One line about an error, and the exit code."""
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return "stopped before it ended.", 1
    if isinstance(error, typer.TyperException):
        context: Any = getattr(error, "ctx", None)
        name = getattr(getattr(error, "param", None), "name", "")
        source = None if context is None else context.get_parameter_source(name)
        hint = "" if context is None else f" Try `{context.command_path} --help`."
        if getattr(source, "name", "") == "DEFAULT_MAP":
            hint = f" It is set in {context.params['config']}."
        near = getattr(error, "possibilities", None)
        message = (error.message if near else error.format_message()).rstrip(".")
        meant = suggest(getattr(error, "option_name", ""), near or ())
        end = "" if message.endswith("?") else "."
        return " ".join(f"{message}{end}{meant}{hint}".split()), 2
    expected = isinstance(error, VardropError)
    text = str(error) if expected else f"{type(error).__name__}: {error}. See --debug."
    return " ".join(text.split()), 1
