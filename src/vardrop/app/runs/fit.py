"""`fit`: data, net and method in; a trained run in its directory out."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from torch import nn

from vardrop._core.checks import nearest
from vardrop._core.errors import VardropError, needed
from vardrop._core.rng import preserve_rng
from vardrop.app.data import About, Roles, describe
from vardrop.app.data.preprocessing import Task, label
from vardrop.app.data.splits import with_class_weight
from vardrop.app.data.tables import is_table
from vardrop.app.runs.callbacks import ProgressBar, RunCallback, on_terminal
from vardrop.app.runs.config import Config, Data, free_directory, new_directory, working
from vardrop.app.runs.evaluate import measure
from vardrop.app.runs.held_out import Choice
from vardrop.app.runs.models import method_named, usual_method, usual_net
from vardrop.app.runs.processes import join_processes
from vardrop.app.runs.run import Run, fresh_net, load_same_data
from vardrop.app.runs.settings import Settings
from vardrop.app.runs.training import read_phase
from vardrop.app.runs.trials import FitJob, run_fit_job
from vardrop.conversion import convert
from vardrop.recipes import BaseRecipe, HeadRecipe

_ROLES = {f.name for f in dataclasses.fields(Roles)} - {"target", "task", "drop"}


def fit(
    data: Any,
    net: str | nn.Module = "auto",
    recipe: BaseRecipe | str | None = "auto",
    *,
    out: str | Path | None = None,
    target: str | None = None,
    task: Task | None = None,
    drop: Sequence[str] = (),
    validation: Any = None,
    test: Any = None,
    directory: str | Path | None = None,
    where: str | None = None,
    exclude: str | None = None,
    force: bool = False,
    callback: RunCallback | None = None,
    progress: bool | None = None,
    **more: Any,
) -> Run:
    """Train a net on named data or a table, keep everything in a directory, score it on test data.

    Args:
        data: a name such as "digits" or "mnist", a CSV or Parquet file, a DataFrame with its
            `target`, a pair (X, y), a torch `Dataset` or `DataLoader`; see `load_dataset`.
        net: "mlp50", "mlp", "lenet300", "lenet5", or a net of your own, which is trained in place;
            by default "mlp50" for a table below 2000 rows, else "mlp".
        recipe: the method, or its name as on the command line; None leaves the net as it is, plain
            or converted by you. By default `bayes_by_backprop(prior=Normal(learned=True))` for
            tables, `sparse_vd()` for images.
        out: the directory; runs/<data>-<number> by default. One that holds files is an error.
        target, task, drop: of a table; see `load_dataset`.
        validation, test: data of your own for these parts, of the same kind as `data`; with
            test=False all rows are trained on, and only what was held out in turn is scored.
        directory: of the image sets.
        where, exclude: globs on the names of the layers to make noisy, or not; see `convert`.
        force: overwrite a run in `out`.
        callback: is called with steps and epochs; by default `progress` decides.
        progress: show a progress bar; None shows it on a terminal. Stopped runs (Ctrl-C) go on from
            their last checkpoint with `resume`.
        more: what other columns of a table are for, see `vardrop.app.data.Roles`; and how to train,
            see `Settings`. What is not given follows from the data, and the KL weight, the scale of
            the noise and the width of intervals from held-out rows.

    >>> import tempfile, vardrop as vd
    >>> from vardrop.app.runs import fit
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = fit("iris", "mlp", vd.bayes_by_backprop(), out=folder, epochs=2)
    ...     list(run.results["metrics"])[:3]
    ['accuracy', 'balanced_accuracy', 'auroc']
    """
    roles = {name: more.pop(name) for name in _ROLES if name in more}
    source = _source(data, validation, test, directory, Roles(target, task, tuple(drop), **roles))
    path = Path(out) if out is not None else free_directory(source.name)
    if isinstance(more.get("class_weight"), Mapping):
        more["class_weight"] = {label(c): w for c, w in more["class_weight"].items()}
    _check_names(more)
    chosen = Settings.from_json(more)
    for package in ("safetensors", "pandas", "sklearn"):  # told before anything is trained
        needed(package)
    device = chosen.torch_device()
    with join_processes(device) as world:
        dataset = source.read(data, validation, test, chosen.seed)
        about = dataset.about
        if isinstance(recipe, str):
            recipe = usual_method(about.kind) if recipe == "auto" else method_named(recipe)
        _check_settings(chosen, about, recipe, source.roles)
        if net == "auto":
            net = usual_net(about.kind, about.sizes["train"] + about.sizes["validation"])
        own = None if isinstance(net, str) else net
        name, settings = (
            str(net) if own is None else type(own).__name__,
            _fill(chosen, source, about),
        )
        config = Config(source, about, name, own is not None, recipe, where, exclude, settings)
        model = fresh_net(config, own)
        if config.method is not None:  # what cannot be converted is told before anything is written
            with preserve_rng(device):
                convert(copy.deepcopy(model), config.method, where, exclude)
        with new_directory(path, force) if world.first else nullcontext():
            if world.first:
                config.write(path)
            if world.first and callback is not None and dataset.preprocessing is not None:
                reading = source.roles if is_table(source.name) else None
                callback.describe(describe(dataset.preprocessing, reading))
            return _finish(FitJob(config, path, dataset, model, world), callback, progress)


def _check_names(more: Mapping[str, Any]) -> None:
    """Refuse an argument that nothing here has, with the name that it was probably meant to be."""
    settings = {f.name for f in dataclasses.fields(Settings)}
    known = {*inspect.signature(fit).parameters, *_ROLES, *settings} - {"more"}
    if unknown := [name for name in more if name not in settings]:
        raise VardropError(
            f"Expected arguments among {', '.join(sorted(known))}, but got {unknown[0]!r}."
            f"{nearest(unknown[0], known)}"
        )


def _source(data: Any, validation: Any, test: Any, directory: Any, roles: Roles) -> Data:
    """Which data, as it is kept: files by their path, what was handed over by what it is."""
    parts = {"name": data, "validation": validation, "test": None if test is False else test}
    in_memory = any(d is not None and _path(d) is None for d in parts.values())
    names = {k: None if d is None else _path(d) or type(d).__name__ for k, d in parts.items()}
    where = None if directory is None else str(directory)
    own_test = False if test is False else names["test"]
    name = names["name"] or "None"
    return Data(name, roles, where, names["validation"], own_test, in_memory)


def _path(data: Any) -> str | None:
    if not isinstance(data, str | os.PathLike):
        return None
    path = Path(data)
    return str(path.resolve()) if path.is_file() else str(data)


def _fill(given: Settings, source: Data, about: About) -> Settings:
    """The settings with what follows from the data in the place of what was not given.

    Parts that were given are no folds: they would mix what was to be kept apart.
    """
    roles = source.roles
    apart = (source.validation, roles.split, roles.group, roles.time)
    if given.folds is None and any(part is not None for part in apart):
        given = dataclasses.replace(given, folds=1)
    return given.for_data(about.sizes["train"] + about.sizes["validation"], about.kind == "image")


def _check_settings(given: Settings, about: About, recipe: BaseRecipe | None, roles: Roles) -> None:
    """Refuse settings that do not suit the target or the method."""
    weights, numbers = given.class_weight, about.task == "regression"
    if given.heteroscedastic and not numbers:
        raise VardropError(
            f"Expected a regression for `heteroscedastic`, but the target of {about.name} is a "
            "class. Leave it out."
        )
    if weights is not None and numbers:
        raise VardropError(
            f"Expected classes for `class_weight`, but the target of {about.name} is a number. "
            "Name a column of weights by `weight`."
        )
    if unknown := sorted(set(weights) - set(about.classes)) if isinstance(weights, dict) else []:
        raise VardropError(
            f"Expected `class_weight` for the classes {', '.join(about.classes)}, but got "
            f"{', '.join(map(repr, unknown))}."
        )
    if isinstance(recipe, HeadRecipe) and (weights or roles.weight):
        raise VardropError(
            "Expected no weights of rows or classes for a method with a head, whose loss is its "
            f"own, but got {weights or roles.weight!r}. Choose another method."
        )


def resume(
    out: str | Path,
    net: nn.Module | None = None,
    callback: RunCallback | None = None,
    data: Any = None,
    validation: Any = None,
    test: Any = None,
    progress: bool | None = None,
    **changes: Any,
) -> Run:
    """Go on with a run from its last checkpoint, as if it had never stopped.

    What defines the data (the seed of their split too) stays that of the run. With another
    `batch_size` the epoch that was interrupted begins anew; with another `beta` the competition for
    the best net does. A run that is at its end stays as it is.

    Args:
        out: the directory of the run.
        net: a fresh net of your own, where `fit` was given one.
        callback, progress: as for `fit`.
        data, validation, test: again what `fit` was given, where that was no name and no file.
        changes: settings to change from here on, such as a lower `lr`.
    """
    path = Path(out)
    device = _changed(Config.read(path), path, changes).settings.torch_device()
    with join_processes(device) as world, working(path) if world.first else nullcontext():
        config = _changed(Config.read(path), path, changes)  # by now nobody else can change it
        dataset = load_same_data(config, path, data, validation, test)
        model = fresh_net(config, net)
        if changes and world.first:
            config.write(path)
        job = FitJob(config, path, dataset, model, world, resuming=True)
        return _finish(job, callback, progress)


def _changed(config: Config, path: Path, changes: dict[str, Any]) -> Config:
    """The configuration with other settings, as far as a run that has begun can have them."""
    settings, old = Settings.from_json({**config.settings.to_json(), **changes}), config.settings
    reasons = {
        "seed": f"it split the data of {path}: rows of the test would be trained on",
        "class_weight": f"the KL weight of {path} was chosen with it",
    }
    if settings.pretrain != old.pretrain and read_phase(path) == "fit":
        reasons["pretrain"] = f"{path} is past its pretraining"
    for name, reason in reasons.items():
        before, now = getattr(old, name), getattr(settings, name)
        if before != now:
            raise VardropError(
                f"Expected `{name}` to stay {before!r}, because {reason}, but got {now!r}. Begin a "
                "new run."
            )
    return dataclasses.replace(config, settings=settings)


def _finish(job: FitJob, callback: RunCallback | None, progress: bool | None) -> Run:
    """Train and measure; without a callback, show a progress bar if requested or on a terminal."""
    visible = (on_terminal() if progress is None else progress) and job.world.first
    bar = ProgressBar() if visible else RunCallback()
    weights = job.config.settings.class_weight
    rows = job.data if weights is None else with_class_weight(job.data, weights)
    with preserve_rng(job.world.device):
        elbo = run_fit_job(dataclasses.replace(job, data=rows, callback=callback or bar))
    run = Run(job.config, elbo, Choice.read(job.path), job.path, job.data)
    if job.world.first and not (job.path / "results.json").is_file():  # else they are of this net
        measure(run)
    return run
