"""`fit`: data, net and method in; a trained run in its directory out."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vardrop.application.config import (
    ABOUT_BEST,
    FILES,
    Config,
    Data,
    check_free,
    free_directory,
    prepare,
    working,
)
from vardrop.application.evaluation import measure, validation_scores
from vardrop.application.nets import build_net
from vardrop.application.run import Run, likelihood_for, load_same_data
from vardrop.checks import check_type
from vardrop.conversion import convert
from vardrop.data import Dataset, Part, describe
from vardrop.data.preprocessing import Task
from vardrop.errors import VardropError, needed
from vardrop.files import read_tensors, remove, write_tensors
from vardrop.noisy import has_noise
from vardrop.objective import ELBO, parameter_groups
from vardrop.recipes import BaseRecipe, sparse_vd
from vardrop.training import Loop, Recorder, Settings, Step
from vardrop.training.checkpoint import load_module
from vardrop.training.observers import Observer, ProgressBar, on_terminal
from vardrop.training.processes import World, joined, own_generators, seed_generators
from vardrop.training.recording import BEST, CHECKPOINT, read_checkpoint

_SPARSE = sparse_vd()


def fit(
    data: str | Path,
    net: str | nn.Module = "mlp",
    recipe: BaseRecipe | None = _SPARSE,
    *,
    out: str | Path | None = None,
    target: str | None = None,
    task: Task | None = None,
    drop: Sequence[str] = (),
    directory: str | Path | None = None,
    where: str | None = None,
    exclude: str | None = None,
    force: bool = False,
    observer: Observer | None = None,
    **settings: Any,
) -> Run:
    """Train a net on named data or a table, keep everything in a directory, score it on test data.

    Args:
        data: a name such as "digits" or "mnist", or a CSV or Parquet file; see `load_dataset`.
        net: "mlp", "lenet300", "lenet5", or a net of your own, which is trained in place.
        recipe: the method; None leaves the net as it is, plain or converted by you.
        out: the directory; runs/<data>-<number> by default. One that holds files is an error.
        target, task, drop: of a table; see `load_dataset`.
        directory: of the image sets.
        where, exclude: globs on the names of the layers to make noisy, or not; see `convert`.
        force: overwrite a run in `out`.
        observer: is told about steps and epochs; a progress bar on a terminal by default.
        settings: how to train; see `Settings`.

    >>> import tempfile, vardrop as vd
    >>> from vardrop.application import fit
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = fit("iris", "mlp", vd.bayes_by_backprop(), out=folder, epochs=2)
    ...     sorted(run.results["metrics"])
    ['accuracy', 'brier', 'ece', 'nll']
    """
    wanted = "the name of a data set, or the path of a CSV or Parquet file"
    check_type("data", data, str | os.PathLike, wanted)
    data_path = Path(data)
    name = str(data_path.resolve()) if data_path.is_file() else str(data)
    source = Data(name, target, task, tuple(drop), None if directory is None else str(directory))
    path = Path(out) if out is not None else free_directory(name)
    chosen = Settings.from_json(settings)
    needed("safetensors", "compress")  # told before anything is trained
    device = chosen.torch_device()
    with joined(device) as world:
        dataset = source.load(chosen.seed)
        config = Config(
            source,
            dataset.about,
            net if isinstance(net, str) else type(net).__name__,
            not isinstance(net, str),
            recipe,
            where,
            exclude,
            chosen,
        )
        model = _fresh(config) if isinstance(net, str) else net
        if recipe is not None:  # what cannot be converted is told before anything is written
            with own_generators(device):
                convert(copy.deepcopy(model), recipe, where, exclude)
        if not world.first:
            return _train(config, path, dataset, model, observer, world, resuming=False)
        prepare(path, force)
        with working(path):
            check_free(path, force)
            for name in FILES:
                remove(path / name)
            config.write(path)
            if observer is not None and dataset.preprocessing is not None:
                observer.describe(describe(dataset.preprocessing))
            return _train(config, path, dataset, model, observer, world, resuming=False)


def resume(
    out: str | Path, net: nn.Module | None = None, observer: Observer | None = None, **changes: Any
) -> Run:
    """Go on with a run from its last checkpoint, as if it had never stopped.

    What defines the data (the seed of their split too) stays that of the run. With another
    `batch_size` the epoch that was interrupted begins anew; with another `beta` the competition for
    the best net does. A run that is at its end stays as it is.

    Args:
        out: the directory of the run.
        net: a fresh net of your own, where `fit` was given one.
        observer: as for `fit`.
        changes: settings to change from here on, such as a lower `lr`.
    """
    path = Path(out)
    device = _changed(Config.read(path), path, changes).settings.torch_device()
    with joined(device) as world, working(path) if world.first else nullcontext():
        config = _changed(Config.read(path), path, changes)  # by now nobody else can change it
        dataset = load_same_data(config, path)
        model = _fresh(config, net)
        if changes and world.first:
            config.write(path)
        return _train(config, path, dataset, model, observer, world, resuming=True)


def _changed(config: Config, path: Path, changes: dict[str, Any]) -> Config:
    """The configuration with other settings, as far as a run that has begun can have them."""
    settings = Settings.from_json({**config.settings.to_json(), **changes})
    old = config.settings
    if settings.seed != old.seed:
        raise VardropError(
            f"Expected `seed` to stay {old.seed}, because it split the data of {path}, but got "
            f"{settings.seed}: rows that are held out for the test would be trained on. Begin a "
            "new run."
        )
    if settings.pretrain != old.pretrain and _phase_of(config, path) == "fit":
        raise VardropError(
            f"Expected `pretrain` to stay {old.pretrain}, because {path} is past its pretraining, "
            f"but got {settings.pretrain}. Begin a new run."
        )
    return dataclasses.replace(config, settings=settings)


def _fresh(config: Config, net: nn.Module | None = None) -> nn.Module:
    if config.own_net:
        if net is None:
            raise VardropError(
                f"Expected `net`, because this run trains a net of your own ({config.net}), but "
                "got none. Pass a fresh one."
            )
        return net
    with own_generators(seed=config.settings.seed):
        return build_net(config.net, config.about.shape, config.about.outputs)


def _phase_of(config: Config, path: Path) -> str | None:
    """The phase that the checkpoint is of; None where there is no checkpoint."""
    if not (path / CHECKPOINT).is_file():
        return None
    phase: str = read_checkpoint(path, config.checked)[1]["phase"]
    return phase


def _train(
    config: Config,
    path: Path,
    data: Dataset,
    net: nn.Module,
    observer: Observer | None,
    world: World,
    resuming: bool,
) -> Run:
    phase = _phase_of(config, path) if resuming else None
    watch = observer or (ProgressBar() if on_terminal() and world.first else Observer())
    net.to(world.device)
    with own_generators(world.device):
        if config.settings.pretrain and phase != "fit":
            _phase(config, path, data, net, watch, world, "pretrain", phase == "pretrain")
        if config.method is not None:
            seed_generators(world.device, config.settings.seed)  # some methods draw weights
            convert(net, config.method, config.where, config.exclude)
        elbo = _phase(config, path, data, net, watch, world, "fit", phase == "fit")
    run = Run(path, config, elbo, data)
    if not world.first:
        return run
    if not (path / BEST).is_file():  # of version 0.1, killed at the end of its warm-up
        write_tensors(path / BEST, elbo.state_dict(), {"epoch": None})
    load_module(elbo, read_tensors(path / BEST, config.checked)[0], path / BEST)
    if not (path / "results.json").is_file():  # else they are of this very net
        measure(run)
    return run


def _phase(
    config: Config,
    path: Path,
    data: Dataset,
    net: nn.Module,
    observer: Observer,
    world: World,
    name: str,
    resuming: bool,
) -> ELBO:
    """One part of the training: the plain net (pretrain) or the noisy one (fit)."""
    settings, plain = config.settings, name == "pretrain" or not has_noise(net)
    device = world.device
    seed_generators(device, settings.seed + 7919 * (world.rank + 1) + (name == "fit"))
    x, y = (t.to(device) for t in data.train)
    elbo = ELBO(
        net,
        likelihood_for(data.task),
        len(x),
        0.0 if plain else float(settings.beta),
        settings.samples,
    ).to(device)
    optimizer = torch.optim.Adam(
        parameter_groups(elbo, settings.lr, settings.noise_lr, settings.weight_decay), fused=True
    )
    step = Step(elbo, optimizer, settings.clip, settings.precision, settings.compile, world)
    epochs = settings.pretrain if name == "pretrain" else settings.epochs
    beta = None if plain else settings.schedule()
    loop = Loop(
        elbo,
        optimizer,
        x,
        y,
        epochs,
        settings.batch_size,
        beta,
        settings.factor(epochs),
        settings.seed,
        step,
        world,
    )
    recorder = _recorder(config, path, data, observer, name, plain)
    if resuming:
        recorder.resume(loop)
    recorder.run(loop)
    return elbo


def _recorder(
    config: Config, path: Path, data: Dataset, observer: Observer, name: str, plain: bool
) -> Recorder:
    settings, part = config.settings, Part(*data.validation)
    final = name == "fit"
    return Recorder(
        path,
        name,
        settings.pretrain if final else 0,
        lambda elbo: validation_scores(elbo, part, data),
        (0 if plain else settings.warm) if final else float("inf"),
        settings.patience if final else None,
        settings.checkpoint_seconds,
        observer,
        ABOUT_BEST,
        config.checked,
    )
