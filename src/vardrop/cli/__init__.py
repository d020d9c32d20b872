"""The command line. It parses, calls one verb and prints; exit codes: 0 done, 2 usage, 1 failed."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from typing import Any

from vardrop.checks import printable
from vardrop.errors import VardropError, needed

for _package in ("typer", "rich"):
    needed(_package)

import typer  # noqa: E402  there, as was just made sure

from vardrop.cli.commands import app  # noqa: E402

__all__ = ["app", "main"]

_INTERRUPTED = 130  # typer's code, without a word


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit; an error is one line on stderr, with a traceback by --debug."""
    given = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    debug = "--debug" in given
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _warned
            code = app(
                [a for a in given if a != "--debug"], prog_name="vardrop", standalone_mode=False
            )
        if code == _INTERRUPTED:
            raise KeyboardInterrupt
    except (Exception, KeyboardInterrupt) as error:
        if debug:
            raise
        text, code = _described(error)
        print(f"vardrop: {printable(text)}", file=sys.stderr)
    sys.exit(code or 0)


def _warned(message: Warning | str, *where: Any, **more: Any) -> None:
    print(f"vardrop: warning: {printable(' '.join(str(message).split()))}", file=sys.stderr)


def _described(error: BaseException) -> tuple[str, int]:
    """One line about an error, and the exit code."""
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return "stopped. `fit --resume` and `reproduce` go on from the last checkpoint.", 1
    if isinstance(error, typer.TyperException):
        context = getattr(error, "ctx", None)
        hint = f" Try `{context.command_path} --help`." if context is not None else ""
        message = error.format_message().rstrip(".")
        return " ".join(f"{message}.{hint}".split()), 2
    known = isinstance(error, VardropError)
    text = str(error) if known else f"{type(error).__name__}: {error}. See --debug for where."
    return " ".join(text.split()), 1
