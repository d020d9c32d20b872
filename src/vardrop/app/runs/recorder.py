"""A training kept in a directory: its history, its checkpoint, the best net so far."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from vardrop._core import files
from vardrop._core.errors import NotFiniteError
from vardrop.app import store
from vardrop.app.runs import checkpoint
from vardrop.app.runs.callbacks import Observer
from vardrop.app.store import BEST, CHECKPOINT, HISTORY, STANDING, Record
from vardrop.noisy import has_noise, kl, relevance
from vardrop.objective import ELBO
from vardrop.tuning.step import broken_parameter
from vardrop.tuning.train import Epoch, Loop

Validate = Callable[[ELBO], dict[str, float]]


@dataclass
class Recorder:
    """Runs a loop and keeps it in `directory`, so that it can be killed at any moment.

    best.safetensors holds the net of the lowest validation loss; until the first net is judged it
    follows the training, so that a run that ends or is stopped before has a net to use.

    Args:
        directory: where the files go; it exists, and nobody else writes there.
        phase: the name of this part of the run, which the checkpoint is for.
        first_epoch: how many epochs earlier phases had.
        validate: scores on validation data, with "nll" among them; None where there are none.
        judged_from: the epoch from which nets compete for the best one; with infinity none does,
            and the last one is kept.
        keeps: whether a net is kept at all, besides the checkpoint.
        patience: epochs without a better one after which to stop.
        seconds: a checkpoint inside an epoch after so long.
        pause: no checkpoint at the end of an epoch for so many times as long as the last one took
            to write, but after the last epoch; so short epochs are not spent on writing.
        observer: is told about steps and epochs.
        about_best: files that say something of the best net, removed before it changes.
    """

    directory: Path
    phase: str = "fit"
    first_epoch: int = 0
    validate: Validate | None = None
    judged_from: float = 0
    keeps: bool = True
    patience: int | None = None
    seconds: float = math.inf
    pause: float = 0.0
    observer: Observer = field(default_factory=Observer)
    about_best: Sequence[str] = ()
    best: float = math.inf
    best_beta: float | None = None
    waited: int = 0

    def run(self, loop: Loop) -> None:
        """Train to the end, or to where patience ends."""
        begun = self._written = time.monotonic()
        self._cost, self._pending = 0.0, b""
        if loop.world.first:  # what a run that was killed here wrote after its last checkpoint
            forget_after(self.directory, self.first_epoch + loop.epoch)
        stopped = self._tired()
        self.observer.start(self.first_epoch, loop)
        try:
            for epoch in () if stopped else loop.run(lambda: self._after_step(loop)):
                record = self._record(loop, epoch, time.monotonic() - begun)
                begun = time.monotonic()
                self._judge(loop, record)
                stopped = loop.world.agree(self._tired())
                if loop.world.first:
                    self._pending += _line(record)
                    paused = time.monotonic() - self._written < self.pause * self._cost
                    if stopped or loop.epoch == loop.epochs or not paused:
                        self._store(loop, record["epoch"])
                    self.observer.epoch(record, loop.elbo)
                if stopped:
                    break
        except NotFiniteError as broken:
            raise NotFiniteError(f"{broken} {self._last_good()}") from None
        finally:
            self.observer.stop()

    def _tired(self) -> bool:
        return self.patience is not None and self.waited >= self.patience

    def _after_step(self, loop: Loop) -> None:
        self.observer.step(loop)
        alone = loop.world.size == 1  # the others' noise is not in the checkpoint
        if alone and time.monotonic() - self._written > self.seconds:
            self._store(loop, self.first_epoch + loop.epoch)

    def _store(self, loop: Loop, epoch: int) -> None:
        """The net that follows the training, the history and, last, the checkpoint."""
        if self.keeps and self.best_beta is None:
            self._keep(loop, epoch)
        if self._pending:
            files.append(self.directory / HISTORY, self._pending)
            self._pending = b""
        self.save(loop)

    def _record(self, loop: Loop, epoch: Epoch, seconds: float) -> Record:
        return {
            **epoch._asdict(),
            "epoch": self.first_epoch + epoch.epoch,
            "phase": self.phase,
            "validation": self.validate(loop.elbo) if self.validate and loop.world.first else {},
            "sparsity": sparsity(loop.elbo.net),
            "seconds": seconds,
        }

    def _judge(self, loop: Loop, record: Record) -> None:
        """Keep the net with the lowest validation loss, nll + beta kl / num_data.

        Nets compete with those of the same beta: with another one, the losses do not compare.
        """
        early = not record["validation"] or loop.epoch <= self.judged_from
        if early or not self.keeps or not loop.world.first:
            return
        divergence = float(kl(loop.elbo.net).detach()) if has_noise(loop.elbo.net) else 0.0
        loss = record["validation"]["nll"] + record["beta"] * divergence / loop.elbo.num_data
        record["validation"]["loss"] = loss = loss if math.isfinite(loss) else math.inf
        self.waited += 1
        if loss < self.best or record["beta"] != self.best_beta:
            self.best, self.best_beta, self.waited = loss, record["beta"], 0
            self._keep(loop, record["epoch"])

    def _keep(self, loop: Loop, epoch: int) -> None:
        _check_finite(loop)
        for name in self.about_best:
            files.remove(self.directory / name)
        files.write_tensors(self.directory / BEST, loop.elbo.state_dict(), {"epoch": epoch})

    def save(self, loop: Loop) -> None:
        """Write the checkpoint; a net that is no longer finite is an error instead."""
        _check_finite(loop)
        begun = time.monotonic()
        tensors, values = loop.state()
        values |= {"phase": self.phase, "first_epoch": self.first_epoch, "waited": self.waited}
        values["best"] = self.best if math.isfinite(self.best) else None
        values["best_beta"] = self.best_beta
        optimizer = checkpoint.optimizer_tensors(loop.optimizer)
        parts = {"elbo": loop.elbo.state_dict(), "optimizer": optimizer, "loop": tensors}
        everything = {f"{k}.{name}": t for k, part in parts.items() for name, t in part.items()}
        # One file holds all, so no crash can part them; the JSON is a copy to read.
        files.write_tensors(self.directory / CHECKPOINT, everything, values)
        files.write_json(self.directory / STANDING, files.sealed(values))
        self._written = time.monotonic()
        self._cost = self._written - begun

    def resume(self, loop: Loop) -> None:
        """Set the loop, its net and its optimizer to the checkpoint."""
        path = self.directory / CHECKPOINT
        tensors, values = read_checkpoint(self.directory)
        checkpoint.load_module(loop.elbo, checkpoint.under("elbo", tensors), path)
        with store.reading_checkpoint(path):
            checkpoint.load_optimizer(loop.optimizer, checkpoint.under("optimizer", tensors))
            loop.load_state(checkpoint.under("loop", tensors), values)
            self.best_beta, self.waited = values["best_beta"], values["waited"]
        self.best = math.inf if values["best"] is None else values["best"]
        if loop.world.first:
            files.write_json(self.directory / STANDING, files.sealed(values))

    def _last_good(self) -> str:
        if not (self.directory / CHECKPOINT).is_file():
            return "There is no checkpoint yet."
        epochs = self.first_epoch + read_checkpoint(self.directory)[1]["epoch"]
        return (
            f"The last good state is {self.directory / CHECKPOINT}, after epoch {epochs}; resume "
            "from it with other settings."
        )


def _check_finite(loop: Loop) -> None:
    if (name := broken_parameter(loop.elbo)) is not None:
        raise NotFiniteError(
            f"Expected finite parameters, but got NaN or infinity in '{name}' in epoch "
            f"{loop.epoch + 1}, step {loop.position + 1}. Lower the learning rate, clip the "
            "gradients or lengthen the KL warm-up."
        )


def read_checkpoint(directory: Path) -> tuple[dict[str, Tensor], Record]:
    """The tensors and the values of a checkpoint, once the values are such as a recorder writes."""
    path = directory / CHECKPOINT
    tensors, values = files.read_tensors(path)
    return tensors, store.check_standing(path, values)


def forget_after(directory: Path, epochs: int) -> None:
    """Cut the history to so many epochs, as a checkpoint has them; a torn line goes too."""
    path = directory / HISTORY
    if path.is_file():
        kept = b"".join(_line(r) for r in store.read_history(directory) if r["epoch"] < epochs)
        if kept != path.read_bytes():
            files.write_atomically(path, kept)


def _line(record: Record) -> bytes:
    return (json.dumps(files.sealed(record), allow_nan=False) + "\n").encode()


@torch.no_grad()
def sparsity(net: nn.Module) -> dict[str, float]:
    """The fraction of weights (or units) that each method's own rule drops, by module name."""
    rules = relevance(net) if has_noise(net) else {}
    return {name: 1 - float(r.kept.double().mean()) for name, r in rules.items()}
