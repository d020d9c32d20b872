"""One line of progress on standard error, for verbs that can take more than five seconds.

A verb takes `progress: bool | None = None` and does its work inside one block:

    with ProgressLine("slim", total=steps, progress=progress) as line:
        for batch in batches:
            line.advance()                          # or line.advance(text="loss 0.31")

A loop over an iterable is `for batch in track(batches, "predict", progress=progress)`. A verb that
calls another verb passes `progress=False` to it, so that there is one line at a time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sized
from typing import Self, TypeVar

from vardrop._core.checks import check_type

Item = TypeVar("Item")
_DELAY, _INTERVAL = 1.0, 0.2  # seconds before the first line and between two lines


class ProgressLine:
    """Shows how much of a task is done, in one line that is written again and again.

    Args:
        label: the name of the verb.
        total: the number of steps, or None if it is unknown.
        progress: True writes the line, False does not. None writes it if standard error is a
            terminal and the task takes more than a second.

    >>> with ProgressLine("train", total=2, progress=False) as line:
    ...     line.advance()
    >>> line.done
    1
    """

    def __init__(self, label: str, total: int | None = None, progress: bool | None = None) -> None:
        check_type("progress", progress, bool | None, "True, False or None")
        self.label, self.total, self.done = label, total, 0
        self._visible = sys.stderr.isatty() if progress is None else progress
        self._start = time.monotonic()
        self._next = self._start + (_DELAY if progress is None else 0.0)
        self._width = 0  # of the longest line so far

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._width:
            self._write()
            print(file=sys.stderr, flush=True)

    def advance(self, steps: int = 1, text: str = "") -> None:
        """Count steps, and write the line if the last one is old enough."""
        self.done += steps
        self._text = text
        if self._visible and time.monotonic() >= self._next:
            self._write()

    def _write(self) -> None:
        now = time.monotonic()
        seconds, self._next = now - self._start, now + _INTERVAL
        line = f"{self.label}: {self.done}"
        if self.total is not None:
            left = seconds / max(self.done, 1) * max(self.total - self.done, 0)
            line += f"/{self.total}, {left:.0f} s left"
        line += f", {seconds:.0f} s so far" + (f", {self._text}" if self._text else "")
        self._width = max(self._width, len(line))
        print("\r" + line.ljust(self._width), end="", file=sys.stderr, flush=True)


def track(items: Iterable[Item], label: str, progress: bool | None = None) -> Iterator[Item]:
    """Yield the items of an iterable and show how many are done.

    >>> list(track([3, 4], "predict", progress=False))
    [3, 4]
    """
    with ProgressLine(label, len(items) if isinstance(items, Sized) else None, progress) as line:
        for item in items:
            yield item
            line.advance()
