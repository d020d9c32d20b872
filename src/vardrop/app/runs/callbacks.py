"""Who is told about a training: a progress bar, JSON lines, TensorBoard."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vardrop._core.checks import printable
from vardrop._core.errors import VardropError, needed
from vardrop._core.files import plain
from vardrop.noisy import has_noise, log_alpha

if TYPE_CHECKING:
    from vardrop.objective import ELBO
    from vardrop.tuning.train import Loop


class Observer:
    """Is told about a training; this one stays silent."""

    def describe(self, text: str) -> None:
        """What was found in the data, before the training begins."""

    def note(self, text: str) -> None:
        """What is going on, or was decided."""

    def trial(self, label: str) -> Observer:
        """Who is told about a training that only serves to choose; nobody here."""
        return Observer()

    def start(self, first_epoch: int, loop: Loop) -> None:
        """A phase begins, or goes on."""

    def step(self, loop: Loop) -> None:
        """A step is done."""

    def epoch(self, record: dict[str, Any], elbo: ELBO) -> None:
        """An epoch is done."""

    def stop(self) -> None:
        """The phase is over, by its end or by an error."""


def _tell_all(name: str) -> Callable[..., None]:
    def tell(self: ObserverList, *args: Any) -> None:
        for observer in self.observers:
            getattr(observer, name)(*args)

    return tell


class ObserverList(Observer):
    """Passes everything on to several observers."""

    describe, note, start, step, epoch, stop = map(
        _tell_all, ("describe", "note", "start", "step", "epoch", "stop")
    )

    def __init__(self, observers: Sequence[Observer]) -> None:
        self.observers = observers

    def trial(self, label: str) -> Observer:
        return ObserverList([observer.trial(label) for observer in self.observers])


class JsonLines(Observer):
    """Prints one JSON object per epoch to standard output."""

    def describe(self, text: str) -> None:
        print(json.dumps({"event": "data", "text": text.splitlines()}), flush=True)

    def note(self, text: str) -> None:
        print(json.dumps({"event": "note", "text": text}), flush=True)

    def epoch(self, record: dict[str, Any], elbo: ELBO) -> None:
        print(json.dumps(plain({"event": "epoch", **record}), allow_nan=False), flush=True)


class TextObserver(Observer):
    """Prints what was found in the data and what was decided, and nothing else."""

    def note(self, text: str) -> None:
        print(printable(text), flush=True)

    describe = note


# What stands beside the bar, from which width of the terminal on.
_PARTS = (
    (0, "{task.fields[left]} left"),
    (85, "{task.fields[scores]}"),
    (105, "{task.elapsed:.0f} s so far"),
    (125, "{task.fields[rate]} examples/s"),
)


class ProgressBar(Observer):
    """A line with the epoch, the time that is left and, where there is room, scores and speed.

    Scores are those of validation data, in the units of the table at the end; the loss where there
    are none.
    """

    def __init__(self, label: str = "training", transient: bool = False) -> None:
        self.label, self.transient = label, transient

    def trial(self, label: str) -> Observer:
        return ProgressBar(label, transient=True)

    def start(self, first_epoch: int, loop: Loop) -> None:
        console, progress = needed("rich.console"), needed("rich.progress")
        terminal = console.Console(stderr=True)  # standard output is for results
        texts = [progress.TextColumn(t) for least, t in _PARTS if terminal.width >= least]
        columns = progress.TextColumn("{task.description}"), progress.BarColumn(), *texts
        self._bar = progress.Progress(*columns, console=terminal, transient=self.transient)
        steps = loop.steps or 0  # of a stream that may have no length
        total, done = loop.epochs * steps or None, loop.epoch * steps + loop.position
        self._task = self._bar.add_task(
            self.label, total=total, completed=done, rate="-", scores="", left="?"
        )
        self._bar.start()

    def step(self, loop: Loop) -> None:
        text = f"{self.label}: epoch {loop.epoch + 1}/{loop.epochs}"
        self._bar.update(self._task, advance=1, description=text)
        task = self._bar.tasks[self._task]
        rate = "-" if task.speed is None else f"{task.speed * loop.batch_size:,.0f}"
        left = "?" if task.time_remaining is None else str(timedelta(seconds=task.time_remaining))
        self._bar.update(self._task, rate=rate, left=left)

    def epoch(self, record: dict[str, Any], elbo: ELBO) -> None:
        shown = record["validation"] or {"loss": record["loss"]}
        text = "  ".join(f"{name} {value:.4g}" for name, value in shown.items())
        self._bar.update(self._task, scores=text)

    def stop(self) -> None:
        self._bar.stop()


class TensorBoard(Observer):
    """Writes NLL, KL, beta, validation scores, sparsity and alpha histograms for TensorBoard."""

    def __init__(self, directory: Path) -> None:
        try:
            from torch.utils import tensorboard
        except ImportError as absent:
            raise VardropError(
                "Expected TensorBoard to be installed, but it is not. "
                "Run `pip install tensorboard`, or leave the option out."
            ) from absent
        self._directory, self._writers = directory, tensorboard

    def start(self, first_epoch: int, loop: Loop) -> None:
        self._writer = self._writers.SummaryWriter(str(self._directory))

    def epoch(self, record: dict[str, Any], elbo: ELBO) -> None:
        step = record["epoch"]
        for name in ("loss", "nll", "kl", "beta"):
            self._writer.add_scalar(f"train/{name}", record[name], step)
        for group in ("validation", "sparsity"):
            for name, value in record[group].items():
                self._writer.add_scalar(f"{group}/{name}", value, step)
        if has_noise(elbo.net):
            for name, values in log_alpha(elbo.net).items():
                self._writer.add_histogram(f"log_alpha/{name}", values, step)

    def stop(self) -> None:
        self._writer.close()


def on_terminal() -> bool:
    """Whether standard error is a terminal, where a progress bar can be seen."""
    return sys.stderr.isatty()
