"""Starts the program `vardrop`: a stop or a missing package while it is imported is one line.

It lies beside the package because Python imports `vardrop` before anything inside it, and with that
torch, which takes a second or more: no code of the package can run before. `import vardrop` cannot
leave torch out, since its classes are torch modules and register themselves when they are imported.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from typing import NoReturn


def main() -> None:
    """Import the command line and run it."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # else whoever started it decided otherwise
        signal.signal(signal.SIGINT, _stop)
    # torch's own word where numpy is not installed, before ours on what to install
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")
    try:
        from vardrop.cli.program import main as run
    except ValueError as missing:  # the library's own error, which names the extra to install
        print(f"vardrop: {missing}", file=sys.stderr)
        sys.exit(1)
    signal.signal(signal.SIGINT, before)
    run()


def _stop(*_: object) -> NoReturn:
    """End at once: an exception could be lost inside a library that is being imported."""
    os.write(2, b"vardrop: stopped before it began.\n")
    os._exit(1)
