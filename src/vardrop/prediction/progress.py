"""One line on the terminal that says how far a long call has come."""

from __future__ import annotations

import sys
import time
from types import TracebackType

_SECONDS = 0.2  # between two writings


class Progress:
    """Writes `label: done/total` to stderr, over itself; silent where `shown` is False."""

    def __init__(self, label: str, total: int | None, shown: bool) -> None:
        self.label, self.total, self.shown = label, total, shown
        self.done, self._written = 0, 0.0

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.shown:
            self._write()
            sys.stderr.write("\n")

    def advance(self, steps: int = 1) -> None:
        """Count steps, and write if the last writing is old enough."""
        self.done += steps
        if self.shown and time.monotonic() - self._written > _SECONDS:
            self._write()

    def _write(self) -> None:
        total = "" if self.total is None else f"/{self.total}"
        sys.stderr.write(f"\r{self.label}: {self.done}{total}")
        sys.stderr.flush()
        self._written = time.monotonic()
