"""Callbacks of a run: a progress bar, text and JSON lines."""

from __future__ import annotations

import json
from datetime import timedelta

from torch import Tensor

from vardrop._core.errors import import_optional, printable
from vardrop._core.files import to_json_safe
from vardrop.app.store import Record
from vardrop.objective import ELBO
from vardrop.tuning import Callback, Loop, Position
from vardrop.tuning.stacked import StackedTraining


class RunCallback(Callback):
    """Base of the callbacks of a run, which does nothing."""

    def describe(self, text: str) -> None:
        """Receive a description of the data before the training starts."""

    def note(self, text: str) -> None:
        """Receive a note on the progress or on a choice."""

    def trial(self, label: str) -> RunCallback:
        """The callback of a training that only serves to choose, silent by default."""
        return RunCallback()

    def start(self, loop: Loop | StackedTraining) -> None:
        """Is called when a training starts or continues."""

    def record(self, record: Record, elbo: ELBO) -> None:
        """Is called after an epoch was recorded."""

    def stop(self) -> None:
        """Is called when the training has ended, normally or with an error."""


class JsonLines(RunCallback):
    """Prints one JSON object per epoch to standard output."""

    def describe(self, text: str) -> None:
        print(json.dumps({"event": "data", "text": text.splitlines()}), flush=True)

    def note(self, text: str) -> None:
        print(json.dumps({"event": "note", "text": text}), flush=True)

    def record(self, record: Record, elbo: ELBO) -> None:
        print(json.dumps(to_json_safe({"event": "epoch", **record}), allow_nan=False), flush=True)


class TextLines(RunCallback):
    """Prints the description of the data and notes."""

    def note(self, text: str) -> None:
        print(printable(text), flush=True)

    describe = note


# Texts next to the bar, each with the width of the terminal from which on it is shown.
_PARTS = (
    (0, "{task.fields[left]} left"),
    (85, "{task.fields[scores]}"),
    (105, "{task.elapsed:.0f} s so far"),
    (125, "{task.fields[rate]} examples/s"),
)


class ProgressBar(RunCallback):
    """A line with the epoch, the remaining time and, if there is room, scores and speed.

    Scores are on validation data, in the units of the final table. Without them the loss is shown.
    """

    def __init__(self, label: str = "training", transient: bool = False) -> None:
        self.label, self.transient = label, transient

    def trial(self, label: str) -> RunCallback:
        return ProgressBar(label, transient=True)

    def start(self, loop: Loop | StackedTraining) -> None:
        console, progress = import_optional("rich.console"), import_optional("rich.progress")
        terminal = console.Console(stderr=True)  # standard output is for results
        texts = [progress.TextColumn(t) for least, t in _PARTS if terminal.width >= least]
        columns = progress.TextColumn("{task.description}"), progress.BarColumn(), *texts
        self._bar = progress.Progress(*columns, console=terminal, transient=self.transient)
        self.loop, steps = loop, loop.steps or 0  # a stream may have no length
        total, done = loop.epochs * steps or None, loop.epoch * steps + loop.position
        self._task = self._bar.add_task(
            self.label, total=total, completed=done, rate="-", scores="", left="?"
        )
        self._bar.start()

    def on_step(self, at: Position, loss: Tensor) -> None:
        text = f"{self.label}: epoch {at.epoch + 1}/{self.loop.epochs}"
        self._bar.update(self._task, advance=1, description=text)
        task = self._bar.tasks[self._task]
        rate = "-" if task.speed is None else f"{task.speed * self.loop.batch_size:,.0f}"
        left = "?" if task.time_remaining is None else str(timedelta(seconds=task.time_remaining))
        self._bar.update(self._task, rate=rate, left=left)

    def record(self, record: Record, elbo: ELBO) -> None:
        scores = record["validation"] or {"loss": record["loss"]}
        self._bar.update(self._task, scores="  ".join(f"{k} {v:.4g}" for k, v in scores.items()))

    def stop(self) -> None:
        self._bar.stop()


class TextBar(TextLines, ProgressBar):
    """Prints the description of the data and notes, and shows a progress bar."""
