"""Trainings of a run, kept in directories: the plain net (pretrain), then the noisy one."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vardrop.app.runs.config import Config
from vardrop.app.runs.run import likelihood_for
from vardrop.conversion import convert
from vardrop.app.data import Part
from vardrop._core.files import read_tensors, write_tensors
from vardrop.noisy import has_noise
from vardrop.objective import ELBO, parameter_groups
from vardrop.app.runs.recorder import Recorder
from vardrop.app.runs.settings import Settings
from vardrop.tuning import Loop, Step
from vardrop.app.runs.checkpoint import load_module
from vardrop.tuning.members import Members
from vardrop.app.runs.callbacks import Observer
from vardrop.tuning.processes import World, seed_generators
from vardrop.app.runs.recorder import Validate, read_checkpoint
from vardrop.app.store import BEST, CHECKPOINT

_LOOKS = 100  # at validation data, where the best of nets side by side is kept
_PAUSE = 20  # at most a twentieth of the time goes into checkpoints


@dataclasses.dataclass(frozen=True)
class Training:
    """What is trained, on which rows, and where it is kept.

    Args:
        config: the run; its method and its settings, which are filled in.
        directory: of the files of this training.
        train: the rows to train on.
        validate: scores by epoch on rows that are held out, if any.
        beta: the KL weight after the warm-up.
        best: keep the best net by these scores, and not the last one.
        about_best: files of the directory that are about the net that is kept.
    """

    config: Config
    directory: Path
    train: Part
    validate: Validate | None
    beta: float
    best: bool = False
    about_best: Sequence[str] = ()


def read_phase(directory: Path, checked: bool) -> str | None:
    """The phase that the checkpoint is of; None where there is no checkpoint."""
    if not (directory / CHECKPOINT).is_file():
        return None
    phase: str = read_checkpoint(directory, checked)[1]["phase"]
    return phase


def trained(
    training: Training, net: nn.Module, observer: Observer, world: World, resuming: bool
) -> ELBO:
    """Train `net` in place, from the checkpoint where there is one; the net that is kept."""
    config, directory = training.config, training.directory
    phase = read_phase(directory, config.checked) if resuming else None
    net.to(world.device)
    if config.settings.pretrain and phase != "fit":
        _phase(training, net, observer, world, "pretrain", phase == "pretrain")
    if config.method is not None:
        seed_generators(world.device, config.settings.seed)  # some methods draw weights
        convert(net, config.method, config.where, config.exclude)
    elbo = _phase(training, net, observer, world, "fit", phase == "fit")
    if world.first:
        if not (directory / BEST).is_file():  # of version 0.1, killed at the end of its warm-up
            write_tensors(directory / BEST, elbo.state_dict(), {"epoch": None})
        load_module(elbo, read_tensors(directory / BEST, config.checked)[0], directory / BEST)
    return elbo


def side_by_side(
    trainings: Sequence[Training], net: nn.Module, observer: Observer, world: World
) -> list[ELBO] | None:
    """The nets of trainings that differ in rows and KL weight, trained together from one net.

    None where they have to be trained one after the other. What is trained is kept when all is.
    """
    settings = trainings[0].config.settings
    alone = settings.clip is not None or settings.compile or settings.precision != "float32"
    if alone or settings.pretrain or world.size > 1:
        return None
    elbos = [_objective(t, copy.deepcopy(net), world) for t in trainings]
    if not all((t.directory / BEST).is_file() for t in trainings):
        loop = _members(trainings, elbos)
        try:
            loop.probe()
        except RuntimeError as failure:
            observer.note(f"one after the other: {str(failure).splitlines()[0]}")
            return None
        seed_generators(world.device, settings.seed + 7919)
        for training, state in zip(trainings, _kept(loop, elbos, trainings, observer), strict=True):
            training.directory.mkdir(parents=True, exist_ok=True)
            write_tensors(training.directory / BEST, state)
    for elbo, path in zip(elbos, (t.directory / BEST for t in trainings), strict=True):
        load_module(elbo, read_tensors(path, required=True)[0], path)
        elbo.eval()
    return elbos


def _objective(training: Training, net: nn.Module, world: World) -> ELBO:
    config = training.config
    net.to(world.device)
    if config.method is not None:
        seed_generators(world.device, config.settings.seed)  # some methods draw weights
        convert(net, config.method, config.where, config.exclude)
    beta = float(training.beta) if has_noise(net) else 0.0
    likelihood = likelihood_for(config)
    return ELBO(net, likelihood, len(training.train.y), beta, config.settings.samples).to(
        world.device
    )


def _members(trainings: Sequence[Training], elbos: Sequence[ELBO]) -> Members:
    settings, device = trainings[0].config.settings, elbos[0].beta.device
    epochs, batch_size, _ = _filled(settings)
    still = not has_noise(elbos[0].net)
    return Members(
        elbos,
        [(*t.train.to(device), t.train.weight) for t in trainings],
        lambda elbo: _groups(elbo, settings),
        epochs,
        batch_size,
        [(lambda epoch: 0.0) if still else settings.schedule(float(t.beta)) for t in trainings],
        settings.factor(epochs),
        settings.seed,
    )


def _kept(
    loop: Members, elbos: Sequence[ELBO], trainings: Sequence[Training], observer: Observer
) -> list[dict[str, Any]]:
    """The numbers of the nets to keep: the last ones, or the best of a hundred looks."""
    every, least = max(1, loop.epochs // _LOOKS), [math.inf] * len(elbos)
    best: list[dict[str, Any]] = []
    observer.start(0, loop)
    try:
        for done in loop.run(lambda: observer.step(loop)):
            observer.epoch({**done._asdict(), "validation": {}}, loop.elbo)
            if loop.epoch != loop.epochs and not (trainings[0].best and loop.epoch % every == 0):
                continue
            states = loop.states()
            best = best or states
            for k, (elbo, training) in enumerate(zip(elbos, trainings, strict=True)):
                elbo.load_state_dict(states[k])
                scores = training.validate(elbo.eval()) if training.validate else {"nll": -math.inf}
                if scores["nll"] < least[k] or not training.best:
                    least[k], best[k] = scores["nll"], states[k]
    finally:
        observer.stop()
    return best


def _filled(settings: Settings) -> tuple[int, int, float]:
    """Epochs, batch size and learning rate of settings for known data."""
    epochs, batch_size, lr = settings.epochs, settings.batch_size, settings.lr
    assert epochs is not None
    assert batch_size is not None
    assert lr is not None
    return epochs, batch_size, lr


def _groups(elbo: nn.Module, settings: Settings) -> list[dict[str, Any]]:
    return parameter_groups(elbo, _filled(settings)[2], settings.noise_lr, settings.weight_decay)


def _phase(
    training: Training, net: nn.Module, observer: Observer, world: World, name: str, resuming: bool
) -> ELBO:
    settings, device = training.config.settings, world.device
    plain = name == "pretrain" or not has_noise(net)
    usual, batch_size, _ = _filled(settings)
    seed_generators(device, settings.seed + 7919 * (world.rank + 1) + (name == "fit"))
    rows = training.train.to(device)
    likelihood = likelihood_for(training.config)
    beta = 0.0 if plain else float(training.beta)
    elbo = ELBO(net, likelihood, len(rows.y), beta, settings.samples).to(device)
    optimizer = torch.optim.Adam(_groups(elbo, settings), fused=True)
    step = Step(elbo, optimizer, settings.clip, settings.precision, settings.compile, world)
    epochs = settings.pretrain if name == "pretrain" else usual
    loop = Loop(
        elbo,
        optimizer,
        rows.x,
        rows.y,
        epochs,
        batch_size,
        None if plain else settings.schedule(beta),
        settings.factor(epochs),
        settings.seed,
        step,
        world,
        rows.weight,
    )
    recorder = _recorder(training, observer, name, plain)
    if resuming:
        recorder.resume(loop)
    recorder.run(loop)
    return elbo


def _recorder(training: Training, observer: Observer, name: str, plain: bool) -> Recorder:
    settings, final = training.config.settings, name == "fit"
    return Recorder(
        training.directory,
        name,
        settings.pretrain if final else 0,
        training.validate,
        (0 if plain else settings.warm) if training.best else math.inf,
        final,
        settings.patience if final else None,
        settings.checkpoint_seconds,
        _PAUSE,
        observer,
        training.about_best,
        training.config.checked,
    )
