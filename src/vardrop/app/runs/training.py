"""The trainings of a run: first the plain model (pretrain), then the noisy one."""

from __future__ import annotations

import copy
import dataclasses
import math
import timeit
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vardrop._core.files import read_tensors, write_tensors
from vardrop._core.processes import World
from vardrop._core.rng import preserve_rng, seed_generators
from vardrop.app.data import Part
from vardrop.app.runs.config import Config
from vardrop.app.runs.models import likelihood_for
from vardrop.app.runs.recorder import Recorder, Validate, load_module, read_checkpoint
from vardrop.app.runs.run_callbacks import RunCallback
from vardrop.app.runs.settings import Settings
from vardrop.app.store import BEST, CHECKPOINT
from vardrop.conversion import convert
from vardrop.noisy import has_noise
from vardrop.objective import ELBO, parameter_groups
from vardrop.tuning import Callback, Loop, Position
from vardrop.tuning.stacked import StackedTraining

_COMPARISONS = 100  # of stacked models on validation data, if the best ones are kept
_PAUSE = 20  # at most a twentieth of the time goes into checkpoints


@dataclasses.dataclass(frozen=True)
class Training:
    """One training of a run.

    Args:
        config: the run, with its method and its complete settings.
        world: the processes, and the device of this one.
        directory: directory of the files of this training.
        train: the rows to train on.
        validate: returns scores on held-out rows, if there are any.
        beta: the KL weight after the warm-up.
        best: keep the best model according to these scores, instead of the last one.
        about_best: files about the kept model, which are removed when it changes.
    """

    config: Config
    world: World
    directory: Path
    train: Part
    validate: Validate | None
    beta: float
    best: bool = False
    about_best: Sequence[str] = ()


def read_phase(directory: Path) -> str | None:
    """The phase of the checkpoint, or None if there is no checkpoint."""
    started = (directory / CHECKPOINT).is_file()
    return str(read_checkpoint(directory)[1]["phase"]) if started else None


def train_net(training: Training, net: nn.Module, callback: RunCallback, resuming: bool) -> ELBO:
    """Train `net` in place, from the checkpoint if there is one, and return the kept model."""
    best = training.directory / BEST
    phase = read_phase(training.directory) if resuming else None
    if training.world.first:
        training.directory.mkdir(parents=True, exist_ok=True)
    if training.config.settings.pretrain and phase != "fit":
        _run_phase(training, net, callback, "pretrain", phase == "pretrain")
    elbo = _run_phase(training, net, callback, "fit", phase == "fit")
    if training.world.first:
        load_module(elbo, read_tensors(best)[0], best)
    return elbo


def train_stacked(
    trainings: Sequence[Training], net: nn.Module, callback: RunCallback
) -> list[ELBO] | None:
    """Train models that differ in rows and KL weight together, from one initial model.

    Returns None if they have to be trained one after the other. Files are written at the end.
    """
    settings, world = trainings[0].config.settings, trainings[0].world
    special = settings.clip is not None or settings.compile or settings.precision != "float32"
    if special or settings.pretrain or settings.patience is not None or world.size > 1:
        return None
    elbos = [_make_elbo(training, copy.deepcopy(net)) for training in trainings]
    if not all((t.directory / BEST).is_file() for t in trainings):
        assert settings.epochs and settings.batch_size  # noqa: PT018
        parts = [training.train.to(world.device) for training in trainings]
        plain = not has_noise(elbos[0].net)
        stacked = StackedTraining(
            elbos,
            [(*part, part.weight) for part in parts],
            partial(_make_groups, settings),
            settings.epochs,
            settings.batch_size,
            [settings.schedule(0.0 if plain else float(t.beta)) for t in trainings],
            settings.factor(settings.epochs),
            settings.seed,
        )
        try:
            stacked.check_vmap()
        except RuntimeError as failure:
            callback.note(f"one after the other: {str(failure).splitlines()[0]}")
            return None
        seed_generators(world.device, settings.seed + 7919)
        keep = _KeepBest(stacked, elbos, trainings)
        callback.start(stacked)
        try:
            stacked.run(callback, keep)
        finally:
            callback.stop()
        for training, state in zip(trainings, keep.states, strict=True):
            training.directory.mkdir(parents=True, exist_ok=True)
            write_tensors(training.directory / BEST, state)
    for elbo, training in zip(elbos, trainings, strict=True):
        path = training.directory / BEST
        load_module(elbo.eval(), read_tensors(path)[0], path)
    return elbos


def time_step(training: Training, net: nn.Module) -> float:
    """The seconds of a training step: the mean of five after a first one, on a copy."""
    settings, device = training.config.settings, training.world.device
    with preserve_rng(device):
        count = min(settings.batch_size or 1, len(training.train.y))
        rows = training.train.take(torch.arange(count)).to(device)
        elbo = _make_elbo(training, copy.deepcopy(net))
        optimizer = torch.optim.Adam(_make_groups(settings, elbo), fused=True)

        def step() -> None:
            optimizer.zero_grad()
            elbo(rows.x, rows.y).loss.backward()
            optimizer.step()

        step()
        return timeit.timeit(step, number=5) / 5


def _make_elbo(training: Training, net: nn.Module, plain: bool = False) -> ELBO:
    """The objective of a network, which is moved and, unless `plain`, made noisy in place."""
    config, device, count = training.config, training.world.device, len(training.train.y)
    net.to(device)
    if config.method is not None and not plain:
        seed_generators(device, config.settings.seed)  # some methods draw weights
        convert(net, config.method, config.include, config.exclude)
    beta = float(training.beta) if has_noise(net) else 0.0
    return ELBO(net, likelihood_for(config), count, beta, config.settings.samples).to(device)


def _make_groups(settings: Settings, elbo: nn.Module) -> list[dict[str, Any]]:
    return parameter_groups(elbo, settings.lr, settings.noise_lr, settings.weight_decay)


class _KeepBest(Callback):
    """Keeps the last state of stacked models, or the best on validation data."""

    def __init__(
        self, stacked: StackedTraining, elbos: Sequence[ELBO], trainings: Sequence[Training]
    ) -> None:
        self.stacked, self.elbos, self.trainings = stacked, elbos, trainings
        self.every = max(1, stacked.epochs // _COMPARISONS)
        self.least = [math.inf] * len(elbos)
        self.states: list[dict[str, Any]] = []

    def on_epoch_end(self, at: Position) -> None:
        last, compared = at.epoch == self.stacked.epochs, self.trainings[0].best
        if not last and not (compared and at.epoch % self.every == 0):
            return
        states = self.stacked.states()
        self.states = self.states or states
        for k, training in enumerate(self.trainings):
            if training.best and training.validate is not None:
                self.elbos[k].load_state_dict(states[k])
                nll = training.validate(self.elbos[k].eval())["nll"]
                if nll < self.least[k]:
                    self.least[k], self.states[k] = nll, states[k]


def _run_phase(
    training: Training, net: nn.Module, callback: RunCallback, phase: str, resuming: bool
) -> ELBO:
    settings, world, final = training.config.settings, training.world, phase == "fit"
    epochs = settings.epochs if final else settings.pretrain
    assert epochs and settings.batch_size  # noqa: PT018
    rows = training.train.to(world.device)
    elbo = _make_elbo(training, net, plain=not final)
    plain = not final or not has_noise(net)
    seed_generators(world.device, settings.seed + 7919 * (world.rank + 1) + final)
    loop = Loop(
        elbo,
        torch.optim.Adam(_make_groups(settings, elbo), fused=True),
        rows.x,
        rows.y,
        epochs,
        settings.batch_size,
        settings.schedule(0.0 if plain else float(training.beta)),
        settings.factor(epochs),
        settings.seed,
        world=world,
        weight=rows.weight,
        max_norm=settings.clip,
        precision=settings.precision,
        compile=settings.compile,
    )
    recorder = Recorder(
        training.directory,
        phase,
        first_epoch=settings.pretrain if final else 0,
        validate=training.validate,
        compare_from=(0 if plain else settings.warm) if training.best else math.inf,
        patience=settings.patience if final else None,
        seconds=settings.checkpoint_seconds,
        pause=_PAUSE,
        callback=callback,
        about_best=training.about_best,
    )
    if resuming:
        recorder.resume(loop)
    recorder.run(loop)
    return elbo
