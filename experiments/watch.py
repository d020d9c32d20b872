"""Trainings that are watched: they say how far they are, and go on where they were cut off."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vardrop.files import write_atomically
from vardrop.training import Epoch, Loop, Recorder, read_history
from vardrop.training.recording import CHECKPOINT, HISTORY

Tell = Callable[[float, str], None]  # which share is done, and what is being done
Record = dict[str, Any]


class Watch:
    """Runs the trainings of one seed.

    Args:
        directory: where checkpoints go; without it nothing is kept.
        tell: is told which share of the seed is done, after every epoch.
        seconds: how long after a checkpoint the next one is due.
    """

    def __init__(
        self, directory: Path | None = None, tell: Tell | None = None, seconds: float = 60.0
    ) -> None:
        self.directory, self.tell, self.seconds = directory, tell, seconds
        self.done = 0.0

    def fit(
        self,
        name: str,
        loop: Loop,
        measure: Callable[[Epoch], Record] | None = None,
        share: float = 1.0,
    ) -> list[Record]:
        """Train to the end, from the checkpoint of this name where there is one.

        Args:
            name: tells this training from the others of the seed.
            loop: the training.
            measure: what to record after each epoch; NLL and KL by default.
            share: of the seed's work that this training is.

        Returns:
            A record for each epoch.
        """
        curve, written = self._resumed(name, loop), time.monotonic()
        for epoch in loop.run():
            found = measure(epoch) if measure else {"nll": epoch.nll, "kl": epoch.kl}
            curve.append({"epoch": epoch.epoch, **found})
            self._say(name, loop, share)
            if loop.epoch == loop.epochs or time.monotonic() - written > self.seconds:
                self._save(name, loop, curve)
                written = time.monotonic()
        self.done += share
        return curve

    def _say(self, name: str, loop: Loop, share: float) -> None:
        if self.tell is not None:
            part = share * loop.epoch / loop.epochs
            self.tell(self.done + part, f"{name}, epoch {loop.epoch} of {loop.epochs}")

    def _resumed(self, name: str, loop: Loop) -> list[Record]:
        if self.directory is None or not (self.directory / name / CHECKPOINT).is_file():
            return []
        Recorder(self.directory / name).resume(loop)
        return read_history(self.directory / name)

    def _save(self, name: str, loop: Loop, curve: list[Record]) -> None:
        if self.directory is None:
            return
        folder = self.directory / name
        folder.mkdir(parents=True, exist_ok=True)
        # The curve first: what it has beyond the checkpoint is cut off on the way back.
        lines = "".join(json.dumps(record) + "\n" for record in curve)
        write_atomically(folder / HISTORY, lines.encode())
        Recorder(folder).save(loop)
