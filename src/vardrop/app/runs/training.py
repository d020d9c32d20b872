"""Trainings of a run, kept in directories: the plain net (pretrain), then the noisy one."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vardrop._core.files import read_tensors, write_tensors
from vardrop.app.data import Part
from vardrop.app.runs.callbacks import Observer
from vardrop.app.runs.checkpoint import load_module
from vardrop.app.runs.config import Config
from vardrop.app.runs.recorder import Recorder, Validate, read_checkpoint
from vardrop.app.runs.run import likelihood_for
from vardrop.app.runs.settings import Settings
from vardrop.app.store import BEST, CHECKPOINT
from vardrop.conversion import convert
from vardrop.noisy import has_noise
from vardrop.objective import ELBO, parameter_groups
from vardrop.tuning import Loop, Step
from vardrop.tuning.members import Members
from vardrop.tuning.processes import World, seed_generators

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


def read_phase(directory: Path) -> str | None:
    """The phase that the checkpoint is of; None where there is no checkpoint."""
    if not (directory / CHECKPOINT).is_file():
        return None
    return str(read_checkpoint(directory)[1]["phase"])


def train_net(
    training: Training, net: nn.Module, observer: Observer, world: World, resuming: bool
) -> ELBO:
    """Train `net` in place, from the checkpoint where there is one; the net that is kept."""
    config, best = training.config, training.directory / BEST
    phase = read_phase(training.directory) if resuming else None
    net.to(world.device)
    if config.settings.pretrain and phase != "fit":
        _run_phase(training, net, observer, world, "pretrain", phase == "pretrain")
    _convert(config, net, world.device)
    elbo = _run_phase(training, net, observer, world, "fit", phase == "fit")
    if world.first:
        load_module(elbo, read_tensors(best)[0], best)
    return elbo


def train_together(
    trainings: Sequence[Training], net: nn.Module, observer: Observer, world: World
) -> list[ELBO] | None:
    """The nets of trainings that differ in rows and KL weight, trained side by side from one net.

    None where they have to be trained one after the other. What is trained is kept when all is.
    """
    settings = trainings[0].config.settings
    alone = settings.clip is not None or settings.compile or settings.precision != "float32"
    if alone or settings.pretrain or settings.patience is not None or world.size > 1:
        return None
    elbos = []
    for training in trainings:
        model = copy.deepcopy(net).to(world.device)
        _convert(training.config, model, world.device)
        elbos.append(_objective(training, model, len(training.train.y), world.device))
    if not all((t.directory / BEST).is_file() for t in trainings):
        loop = _members(trainings, elbos)
        try:
            loop.probe()
        except RuntimeError as failure:
            observer.note(f"one after the other: {str(failure).splitlines()[0]}")
            return None
        seed_generators(world.device, settings.seed + 7919)
        states = _train_members(loop, elbos, trainings, observer)
        for training, state in zip(trainings, states, strict=True):
            training.directory.mkdir(parents=True, exist_ok=True)
            write_tensors(training.directory / BEST, state)
    for elbo, path in zip(elbos, (t.directory / BEST for t in trainings), strict=True):
        load_module(elbo, read_tensors(path)[0], path)
        elbo.eval()
    return elbos


def _convert(config: Config, net: nn.Module, device: torch.device) -> None:
    if config.method is not None:
        seed_generators(device, config.settings.seed)  # some methods draw weights
        convert(net, config.method, config.where, config.exclude)


def _objective(training: Training, net: nn.Module, count: int, device: torch.device) -> ELBO:
    beta = float(training.beta) if has_noise(net) else 0.0
    likelihood = likelihood_for(training.config)
    return ELBO(net, likelihood, count, beta, training.config.settings.samples).to(device)


def _members(trainings: Sequence[Training], elbos: Sequence[ELBO]) -> Members:
    settings, device = trainings[0].config.settings, elbos[0].beta.device
    epochs, batch_size, lr = _filled(settings)
    parts = [training.train.to(device) for training in trainings]
    rows = [(*part, part.weight) for part in parts]
    plain = not has_noise(elbos[0].net)
    betas = [settings.schedule(0.0 if plain else float(t.beta)) for t in trainings]
    rate, seed = settings.factor(epochs), settings.seed

    def groups(elbo: nn.Module) -> list[dict[str, Any]]:
        return parameter_groups(elbo, lr, settings.noise_lr, settings.weight_decay)

    return Members(elbos, rows, groups, epochs, batch_size, betas, rate, seed)


def _train_members(
    loop: Members, elbos: Sequence[ELBO], trainings: Sequence[Training], observer: Observer
) -> list[dict[str, Any]]:
    """The tensors of the nets to keep: the last ones, or the best of a hundred looks."""
    every, least = max(1, loop.epochs // _LOOKS), [math.inf] * len(elbos)
    kept: list[dict[str, Any]] = []
    observer.start(0, loop)
    try:
        for done in loop.run(lambda: observer.step(loop)):
            observer.epoch({**done._asdict(), "validation": {}}, loop.elbo)
            last = loop.epoch == loop.epochs
            if not last and not (trainings[0].best and loop.epoch % every == 0):
                continue
            states = loop.states()
            kept = kept or states
            for k, training in enumerate(trainings):
                if training.best and training.validate is not None:
                    elbos[k].load_state_dict(states[k])
                    nll = training.validate(elbos[k].eval())["nll"]
                    if nll < least[k]:
                        least[k], kept[k] = nll, states[k]
    finally:
        observer.stop()
    return kept


def _filled(settings: Settings) -> tuple[int, int, float]:
    """Epochs, batch size and learning rate of settings for known data."""
    assert settings.epochs and settings.batch_size and settings.lr  # noqa: PT018
    return settings.epochs, settings.batch_size, settings.lr


def _run_phase(
    training: Training, net: nn.Module, observer: Observer, world: World, name: str, resuming: bool
) -> ELBO:
    settings, device, final = training.config.settings, world.device, name == "fit"
    plain = not final or not has_noise(net)
    epochs, batch_size, lr = _filled(settings)
    epochs = epochs if final else settings.pretrain
    seed_generators(device, settings.seed + 7919 * (world.rank + 1) + final)
    rows = training.train.to(device)
    elbo = _objective(training, net, len(rows.y), device)
    groups = parameter_groups(elbo, lr, settings.noise_lr, settings.weight_decay)
    optimizer = torch.optim.Adam(groups, fused=True)
    step = Step(elbo, optimizer, settings.clip, settings.precision, settings.compile, world)
    beta = settings.schedule(0.0 if plain else float(training.beta))
    rate, seed = settings.factor(epochs), settings.seed
    loop = Loop(
        elbo,
        optimizer,
        rows.x,
        rows.y,
        epochs,
        batch_size,
        beta,
        rate,
        seed,
        step,
        world,
        rows.weight,
    )
    recorder = Recorder(
        training.directory,
        name,
        validate=training.validate,
        judged_from=(0 if plain else settings.warm) if training.best else math.inf,
        keeps=final,
        seconds=settings.checkpoint_seconds,
        pause=_PAUSE,
        observer=observer,
        about_best=training.about_best,
    )
    if final:
        recorder.first_epoch, recorder.patience = settings.pretrain, settings.patience
    if resuming:
        recorder.resume(loop)
    recorder.run(loop)
    return elbo
