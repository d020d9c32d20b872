"""The command line. It parses, calls one verb and prints; exit codes: 0 done, 2 usage, 1 failed.

`program.py` holds what runs it, and needs packages of the extra "app"; nothing does here, so that
`python -m vardrop.cli` can say so where they are absent.
"""

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit."""
    from vardrop.cli.program import main as run

    run(arguments)
