"""Record a training in a directory: its history, its checkpoint, the best model so far."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, nn

from vardrop._core import files
from vardrop._core.errors import NotFiniteError, report_errors
from vardrop._core.sharding import is_sharded
from vardrop.app import store
from vardrop.app.runs.run_callbacks import RunCallback
from vardrop.noisy import has_noise, kl, relevance
from vardrop.objective import ELBO
from vardrop.tuning import Callback, Loop, Position
from vardrop.tuning.minimize import find_nonfinite

Validate = Callable[[ELBO], dict[str, float]]


@dataclass
class Recorder(Callback):
    """Records a training in `directory`, so that it can be killed at any moment and resumed.

    best.safetensors holds the model with the lowest validation loss. Until the first model is
    compared it holds the latest one, so that an earlier end or interruption leaves a model.

    Args:
        directory: an existing directory that no other process writes to.
        phase: the name of this part of the run, stored in the checkpoint. A model is kept, in
            addition to the checkpoint, in the phase "fit".
        first_epoch: the number of epochs of earlier phases.
        validate: returns scores on validation data, with "nll" among them; None for no scores.
        compare_from: the epoch from which models are compared. With infinity the last one is kept.
        patience: stop after so many epochs without a better model.
        seconds: write a checkpoint inside an epoch after so many seconds.
        pause: write no checkpoint at the end of an epoch, except the last, within this many times
            the duration of the last write. Short epochs are then not dominated by writing.
        callback: is called with steps and records.
        about_best: files about the best model, which are removed before it changes.
    """

    directory: Path
    phase: str = "fit"
    first_epoch: int = 0
    validate: Validate | None = None
    compare_from: float = 0
    patience: int | None = None
    seconds: float = math.inf
    pause: float = 0.0
    callback: RunCallback = field(default_factory=RunCallback)
    about_best: Sequence[str] = ()
    best: float = math.inf
    best_beta: float | None = None
    waited: int = 0

    def run(self, loop: Loop) -> None:
        """Train to the end, or until the patience is over."""
        self._loop, self._pending, self._write_seconds = loop, b"", 0.0
        self._epoch_start = self._written = time.monotonic()
        path = self.directory / store.HISTORY
        if loop.world.first and path.is_file():
            # Remove an incomplete line, and records of a killed run after its last checkpoint.
            records = store.read_history(self.directory)
            done = self.first_epoch + loop.epoch
            content = b"".join(_to_line(record) for record in records if record["epoch"] < done)
            if content != path.read_bytes():
                files.write_atomically(path, content)
        self.callback.start(loop)
        try:
            for _ in () if self._is_over() else loop.run(self.callback, self):
                pass
        except NotFiniteError as error:
            advice = "There is no checkpoint yet."
            if (checkpoint := self.directory / store.CHECKPOINT).is_file():
                epochs = self.first_epoch + read_checkpoint(self.directory)[1]["epoch"]
                text = f"The last good state is {checkpoint}, after epoch {epochs}."
                advice = f"{text} Resume from it with other settings."
            raise NotFiniteError(f"{error} {advice}") from None
        finally:
            self.callback.stop()

    def _is_over(self) -> bool:
        return self.patience is not None and self.waited >= self.patience

    def on_step(self, at: Position, loss: Tensor) -> None:
        late = time.monotonic() - self._written > self.seconds
        if late and self._loop.world.size == 1:  # a checkpoint holds the noise of one process
            self._store(self.first_epoch + at.epoch)

    def on_epoch_end(self, at: Position) -> bool:
        loop, seconds = self._loop, time.monotonic() - self._epoch_start
        with torch.no_grad():
            rules = relevance(loop.elbo.net) if has_noise(loop.elbo.net) else {}
        record: store.Record = {
            **loop.last._asdict(),
            "epoch": self.first_epoch + loop.last.epoch,
            "phase": self.phase,
            "validation": self.validate(loop.elbo) if self.validate and loop.world.first else {},
            "sparsity": {name: 1 - float(r.kept.double().mean()) for name, r in rules.items()},
            "seconds": seconds,
        }
        self._epoch_start = time.monotonic()
        self._compare(record)
        over = loop.world.broadcast_decision(self._is_over())
        if loop.world.first:
            self._pending += _to_line(record)
            paused = time.monotonic() - self._written < self.pause * self._write_seconds
            if over or at.epoch == loop.epochs or not paused:
                self._store(record["epoch"])
            self.callback.record(record, loop.elbo)
        return over

    def _store(self, epoch: int) -> None:
        """Write the latest model if none was compared, the history and, last, the checkpoint."""
        if self.phase == "fit" and self.best_beta is None:
            self._keep(epoch)
        if self._pending:
            files.append(self.directory / store.HISTORY, self._pending)
            self._pending = b""
        self.save(self._loop)

    def _compare(self, record: store.Record) -> None:
        """Keep the model with the lowest validation loss, nll + beta kl / num_data.

        Only models with the same beta are compared, because beta changes the loss.
        """
        elbo, world = self._loop.elbo, self._loop.world
        early = not record["validation"] or self._loop.epoch <= self.compare_from
        if early or self.phase != "fit" or not world.first:
            return
        divergence = float(kl(elbo.net).detach()) if has_noise(elbo.net) else 0.0
        loss = record["validation"]["nll"] + record["beta"] * divergence / elbo.num_data
        record["validation"]["loss"] = loss = loss if math.isfinite(loss) else math.inf
        self.waited += 1
        if loss < self.best or record["beta"] != self.best_beta:
            self.best, self.best_beta, self.waited = loss, record["beta"], 0
            self._keep(record["epoch"])

    def _keep(self, epoch: int) -> None:
        _check_finite(self._loop)
        for name in self.about_best:
            files.remove(self.directory / name)
        tensors = self._loop.elbo.state_dict()
        files.write_tensors(self.directory / store.BEST, tensors, {"epoch": epoch})

    def save(self, loop: Loop) -> None:
        """Write the checkpoint. A model with values that are not finite raises an error instead."""
        _check_finite(loop)
        start = time.monotonic()
        tensors, progress = loop.state()
        progress |= {"phase": self.phase, "first_epoch": self.first_epoch, "waited": self.waited}
        best = self.best if math.isfinite(self.best) else None
        progress |= {"best": best, "best_beta": self.best_beta}
        optimizer = optimizer_tensors(loop.optimizer)
        parts = {"loop": tensors, "elbo": loop.elbo.state_dict(), "optimizer": optimizer}
        # One file holds everything, so that a crash cannot separate it. The JSON is a copy to read.
        files.write_tensors(self.directory / store.CHECKPOINT, join_parts(parts), progress)
        files.write_json(self.directory / store.PROGRESS, files.with_checksum(progress))
        self._written = time.monotonic()
        self._write_seconds = self._written - start

    def resume(self, loop: Loop) -> None:
        """Set the loop, its model and its optimizer to the checkpoint."""
        path = self.directory / store.CHECKPOINT
        tensors, progress = read_checkpoint(self.directory)
        load_module(loop.elbo, store.select_prefix("elbo.", tensors), path)
        with store.reading(path, "a checkpoint of this run"):
            load_optimizer(loop.optimizer, store.select_prefix("optimizer.", tensors))
            loop.load_state(store.select_prefix("loop.", tensors), progress)
            self.best_beta, self.waited = progress["best_beta"], progress["waited"]
        self.best = math.inf if progress["best"] is None else progress["best"]
        if loop.world.first:
            files.write_json(self.directory / store.PROGRESS, files.with_checksum(progress))


def _check_finite(loop: Loop) -> None:
    if (name := find_nonfinite(loop.elbo)) is not None:
        raise NotFiniteError(
            f"Expected finite parameters, but got NaN or infinity in '{name}' in epoch "
            f"{loop.epoch + 1}, step {loop.position + 1}. Lower the learning rate, clip the "
            "gradients or lengthen the KL warm-up."
        )


def read_checkpoint(directory: Path) -> tuple[dict[str, Tensor], store.Record]:
    """The tensors and the checked values of a checkpoint."""
    path = directory / store.CHECKPOINT
    tensors, progress = files.read_tensors(path)
    return tensors, store.check_progress(path, progress)


def _to_line(record: store.Record) -> bytes:
    return (json.dumps(files.with_checksum(record), allow_nan=False) + "\n").encode()


def join_parts(parts: Mapping[Any, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors of all parts, with `<part>.` before their names."""
    return {f"{part}.{k}": t for part, tensors in parts.items() for k, t in tensors.items()}


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The tensors in the state of an optimizer."""
    entries = join_parts(optimizer.state_dict()["state"])
    return {name: entry for name, entry in entries.items() if isinstance(entry, Tensor)}


def load_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Load the tensors of `optimizer_tensors`. The parameter groups are unchanged."""
    every = (p for group in optimizer.param_groups for p in group["params"])
    parameters = dict(enumerate(every))  # a missing number is a KeyError
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        number, name = key.split(".", 1)
        like = parameters[int(number)]
        if tensor.shape not in ((), like.shape):
            raise ValueError("the state of an optimizer of other parameters")
        # A fused optimizer requires the memory layout of the parameter.
        fits = tensor.shape == like.shape and not is_sharded(like)
        copied = torch.empty_like(like, dtype=tensor.dtype).copy_(tensor) if fits else tensor
        state.setdefault(int(number), {})[name] = copied
    if len({tuple(sorted(parts)) for parts in state.values()}) > 1:
        raise ValueError("the state of an optimizer of other parameters")
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


def load_module(module: nn.Module, tensors: dict[str, Tensor], path: Path) -> None:
    """Load the tensors of a module. If they do not fit, the error names the file."""
    text = f"Expected {path} to fit the model, but got"
    with report_errors(lambda e: f"{text}: {shorten(str(e), 300)}. Pass the trained model."):
        module.load_state_dict(tensors)
