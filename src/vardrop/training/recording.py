"""A training kept in a directory: its history, its checkpoint, the best net so far."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vardrop.files import append, read_tensors, write_atomically, write_json, write_tensors
from vardrop.noisy import Noisy, kl, relevance
from vardrop.objective import ELBO
from vardrop.training.checkpoint import (
    load_module,
    load_optimizer,
    optimizer_tensors,
    prefixed,
    under,
)
from vardrop.training.finite import NotFiniteError, broken_parameter
from vardrop.training.loop import Epoch, Loop
from vardrop.training.observers import Observer

CHECKPOINT, BEST, HISTORY = "checkpoint.safetensors", "best.safetensors", "history.jsonl"
Record = dict[str, Any]
Validate = Callable[[ELBO], dict[str, float]]


@dataclass
class Recorder:
    """Runs a loop and keeps it in `directory`, so that it can be killed at any moment.

    Args:
        directory: where the files go; it exists.
        phase: the name of this part of the run, which the checkpoint is for.
        first_epoch: how many epochs earlier phases had.
        validate: scores on validation data, with "nll" among them; None where there are none.
        judged_from: the epoch from which nets compete for the best one.
        patience: epochs without a better one after which to stop.
        seconds: a checkpoint inside an epoch after so long.
        observer: is told about steps and epochs.
    """

    directory: Path
    phase: str = "fit"
    first_epoch: int = 0
    validate: Validate | None = None
    judged_from: float = 0
    patience: int | None = None
    seconds: float = math.inf
    observer: Observer = field(default_factory=Observer)
    best: float = math.inf
    waited: int = 0

    def run(self, loop: Loop) -> None:
        """Train to the end, or to where patience ends."""
        self._written = time.monotonic()
        begun = time.monotonic()
        stopped = self.patience is not None and self.waited >= self.patience
        self.observer.start(self.first_epoch, loop)
        try:
            for epoch in () if stopped else loop.run(lambda: self._after_step(loop)):
                record = self._record(loop, epoch, time.monotonic() - begun)
                begun = time.monotonic()
                self._judge(loop, record)
                if loop.world.first:
                    append(self.directory / HISTORY, (json.dumps(record) + "\n").encode())
                    self.save(loop)
                    self.observer.epoch(record, loop.elbo)
                if loop.world.agree(self.patience is not None and self.waited >= self.patience):
                    break
        except NotFiniteError as broken:
            raise NotFiniteError(f"{broken} {self._last_good()}") from None
        finally:
            self.observer.stop()

    def _after_step(self, loop: Loop) -> None:
        self.observer.step(loop)
        alone = loop.world.size == 1  # the others' noise is not in the checkpoint
        if alone and time.monotonic() - self._written > self.seconds:
            self.save(loop)

    def _record(self, loop: Loop, epoch: Epoch, seconds: float) -> Record:
        scores = self.validate(loop.elbo) if self.validate and loop.world.first else {}
        return {
            **epoch._asdict(),
            "epoch": self.first_epoch + epoch.epoch,
            "phase": self.phase,
            "validation": scores,
            "sparsity": sparsity(loop.elbo.net),
            "seconds": seconds,
        }

    def _judge(self, loop: Loop, record: Record) -> None:
        """Keep the net with the lowest validation loss, nll + beta kl / num_data."""
        if not record["validation"] or loop.epoch <= self.judged_from:
            return
        divergence = float(kl(loop.elbo.net).detach()) if noisy(loop.elbo.net) else 0.0
        loss = record["validation"]["nll"] + record["beta"] * divergence / loop.elbo.num_data
        record["validation"]["loss"] = loss
        self.waited += 1
        if loss < self.best:
            self.best, self.waited = loss, 0
            write_tensors(self.directory / BEST, loop.elbo.state_dict(), {"epoch": record["epoch"]})

    def save(self, loop: Loop) -> None:
        """Write the checkpoint; a net that is no longer finite is an error instead."""
        if (name := broken_parameter(loop.elbo)) is not None:
            raise NotFiniteError(
                f"Expected finite parameters, but got NaN or infinity in '{name}' in epoch "
                f"{loop.epoch + 1}, step {loop.position + 1}. Lower the learning rate, clip the "
                "gradients or lengthen the KL warm-up."
            )
        tensors, values = loop.state()
        values |= {"phase": self.phase, "best": _number(self.best), "waited": self.waited}
        everything = {
            **prefixed("elbo", loop.elbo.state_dict()),
            **prefixed("optimizer", optimizer_tensors(loop.optimizer)),
            **prefixed("loop", tensors),
        }
        # One file holds all, so no crash can part them; the JSON is a copy to read.
        write_tensors(self.directory / CHECKPOINT, everything, values)
        write_json(self.directory / "checkpoint.json", values)
        self._written = time.monotonic()

    def resume(self, loop: Loop) -> None:
        """Set the loop, its net and its optimizer to the checkpoint."""
        path = self.directory / CHECKPOINT
        tensors, values = read_tensors(path)
        load_module(loop.elbo, under("elbo", tensors), path)
        load_optimizer(loop.optimizer, under("optimizer", tensors))
        loop.load_state(under("loop", tensors), values)
        self.best = math.inf if values["best"] is None else values["best"]
        self.waited = values["waited"]
        if loop.world.first:
            forget_after(self.directory, self.first_epoch + loop.epoch)

    def _last_good(self) -> str:
        if not (self.directory / CHECKPOINT).is_file():
            return "There is no checkpoint yet."
        values = read_tensors(self.directory / CHECKPOINT)[1]
        where = f"{self.directory / CHECKPOINT}, after epoch {self.first_epoch + values['epoch']}"
        return f"The last good state is {where}; resume from it with other settings."


def forget_after(directory: Path, epochs: int) -> None:
    """Cut the history to so many epochs, as a checkpoint has them; a torn line goes too."""
    kept = [json.dumps(r) + "\n" for r in read_history(directory) if r["epoch"] < epochs]
    write_atomically(directory / HISTORY, "".join(kept).encode())


def read_history(directory: Path) -> list[Record]:
    """The records of all epochs; a last line that was cut short by a crash is left out."""
    path = directory / HISTORY
    records: list[Record] = []
    for line in path.read_text().splitlines() if path.is_file() else ():
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    return records


def noisy(net: nn.Module) -> bool:
    """Whether a net has noisy modules."""
    return any(isinstance(m, Noisy) for m in net.modules())


@torch.no_grad()
def sparsity(net: nn.Module) -> dict[str, float]:
    """The share of weights (or units) that each method's own rule drops, by module name."""
    found = relevance(net) if noisy(net) else {}
    return {name: 1 - float(r.kept.double().mean()) for name, r in found.items()}


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
