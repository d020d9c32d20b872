"""The command line. It parses, calls one verb and prints; exit codes: 0 done, 2 usage, 1 failed."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from vardrop.cli.commands import app
from vardrop.errors import VardropError

__all__ = ["app", "main"]

_INTERRUPTED = 130  # typer's code, without a word


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit; an error is one line on stderr, with a traceback by --debug."""
    given = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    debug = "--debug" in given
    try:
        code = app([a for a in given if a != "--debug"], prog_name="vardrop", standalone_mode=False)
        if code == _INTERRUPTED:
            raise KeyboardInterrupt
    except (Exception, KeyboardInterrupt) as error:
        if debug:
            raise
        text, code = _described(error)
        print(f"vardrop: {text}", file=sys.stderr)
    sys.exit(code or 0)


def _described(error: BaseException) -> tuple[str, int]:
    """One line about an error, and the exit code."""
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return "stopped. `fit --resume` and `reproduce` go on from the last checkpoint.", 1
    if isinstance(error, typer.TyperException):
        context = getattr(error, "ctx", None)
        hint = f" Try `{context.command_path} --help`." if context is not None else ""
        message = error.format_message().rstrip(".")  # type: ignore[attr-defined]
        return " ".join(f"{message}.{hint}".split()), 2
    known = isinstance(error, VardropError)
    text = str(error) if known else f"{type(error).__name__}: {error}. See --debug for where."
    return " ".join(text.split()), 1
