"""The command line. Exit codes: 0 done, 1 failed, 2 wrong usage."""

import sys
from collections.abc import Sequence

from vardrop._core.errors import VardropError


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit; an error, or an interrupt while it starts, is one line on stderr."""
    try:
        from vardrop.app.cli.program import main as run
    except (VardropError, KeyboardInterrupt) as error:
        print(f"vardrop: {str(error) or 'stopped before it began.'}", file=sys.stderr)
        sys.exit(1)
    run(arguments)
