"""The line of progress: when it is written, what it contains, and that it ends with a newline."""

import io
import sys

import pytest

from vardrop._core import progress
from vardrop._core.progress import ProgressLine, track


class Terminal(io.StringIO):
    def isatty(self):
        return True


def write_to(stream, monkeypatch):
    monkeypatch.setattr(sys, "stderr", stream)
    return stream


def test_a_line_shows_steps_and_text_and_ends_after_an_error(monkeypatch):
    def interrupt():
        with ProgressLine("slim", 4, True) as line:
            line.advance(text="loss 0.5")
            raise KeyboardInterrupt

    stream = write_to(io.StringIO(), monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        interrupt()
    first, last = stream.getvalue().split("\r")[1:]
    assert first.startswith("slim: 1/4, 0 s left, 0 s so far, loss 0.5")
    assert last.endswith("\n")


def test_items_pass_through_and_an_unknown_total_is_left_out(monkeypatch):
    stream = write_to(io.StringIO(), monkeypatch)
    assert list(track(iter("ab"), "predict", progress=True)) == ["a", "b"]
    assert stream.getvalue().endswith("predict: 2, 0 s so far\n")
    assert list(track("ab", "predict", progress=True)) == ["a", "b"]
    assert "predict: 2/2" in stream.getvalue()


@pytest.mark.parametrize("is_terminal, value, delay, shown", [
    (True, None, 0.0, True), (True, None, 60.0, False), (False, None, 0.0, False),
    (False, True, 60.0, True), (True, False, 0.0, False),
])  # fmt: skip
def test_the_terminal_and_the_time_decide(monkeypatch, is_terminal, value, delay, shown):
    stream = write_to(Terminal() if is_terminal else io.StringIO(), monkeypatch)
    monkeypatch.setattr(progress, "_DELAY", delay)
    list(track([1, 2], "train", progress=value))
    assert bool(stream.getvalue()) == shown
