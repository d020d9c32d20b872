"""The command line. It parses, calls one verb and prints; exit codes: 0 done, 2 usage, 1 failed."""

import sys
from collections.abc import Sequence

from vardrop._core.errors import VardropError


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit; a missing package of the extra "app" is one line on stderr."""
    try:
        from vardrop.app.cli.program import main as run
    except VardropError as missing:
        print(f"vardrop: {missing}", file=sys.stderr)
        sys.exit(1)
    run(arguments)
