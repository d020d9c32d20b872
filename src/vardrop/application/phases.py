"""One training of a run, kept in a directory: the plain net (pretrain), then the noisy one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from vardrop.application.config import Config
from vardrop.application.run import likelihood_for
from vardrop.conversion import convert
from vardrop.data import Part
from vardrop.files import read_tensors, write_tensors
from vardrop.noisy import has_noise
from vardrop.objective import ELBO, parameter_groups
from vardrop.training import Loop, Recorder, Step
from vardrop.training.checkpoint import load_module
from vardrop.training.observers import Observer
from vardrop.training.processes import World, seed_generators
from vardrop.training.recording import BEST, CHECKPOINT, Validate, read_checkpoint

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


def _phase(
    training: Training, net: nn.Module, observer: Observer, world: World, name: str, resuming: bool
) -> ELBO:
    settings, device = training.config.settings, world.device
    plain = name == "pretrain" or not has_noise(net)
    assert settings.epochs is not None  # they are filled in
    assert settings.batch_size is not None
    assert settings.lr is not None
    seed_generators(device, settings.seed + 7919 * (world.rank + 1) + (name == "fit"))
    x, y = (t.to(device) for t in training.train)
    likelihood = likelihood_for(training.config)
    beta = 0.0 if plain else float(training.beta)
    elbo = ELBO(net, likelihood, len(x), beta, settings.samples).to(device)
    optimizer = torch.optim.Adam(
        parameter_groups(elbo, settings.lr, settings.noise_lr, settings.weight_decay), fused=True
    )
    step = Step(elbo, optimizer, settings.clip, settings.precision, settings.compile, world)
    epochs = settings.pretrain if name == "pretrain" else settings.epochs
    loop = Loop(
        elbo,
        optimizer,
        x,
        y,
        epochs,
        settings.batch_size,
        None if plain else settings.schedule(beta),
        settings.factor(epochs),
        settings.seed,
        step,
        world,
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
