"""`fit`: data, net and method in; a trained run in its directory out."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

from torch import nn

from vardrop.app.runs.config import (
    FILES,
    TRIALS,
    Config,
    Data,
    check_free,
    free_directory,
    prepare,
    working,
)
from vardrop.app.runs.evaluate import measure
from vardrop.app.runs.models import build_net, method_named, usual_method, usual_net
from vardrop.app.runs.training import read_phase
from vardrop.app.runs.run import Run, load_same_data
from vardrop.app.runs.trials import Order, carried_out
from vardrop._core.checks import nearest
from vardrop.conversion import convert
from vardrop.app.data import About, Dataset, Roles, describe
from vardrop.app.data.preprocessing import Task, label
from vardrop.app.data.splits import with_class_weight
from vardrop.app.data.tables import is_table
from vardrop._core.errors import VardropError, needed
from vardrop._core.files import remove
from vardrop.recipes import BaseRecipe, HeadRecipe
from vardrop.app.runs.settings import Settings
from vardrop.app.runs.callbacks import Observer, ProgressBar, on_terminal
from vardrop.tuning.processes import World, joined, own_generators

Auto = Literal["auto"]
_ROLES = tuple(
    f.name for f in dataclasses.fields(Roles) if f.name not in ("target", "task", "drop")
)


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
    observer: Observer | None = None,
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
        observer: is told about steps and epochs; a progress bar on a terminal by default.
        more: what other columns of a table are for, see `vardrop.app.data.Roles`; and how to train, see
            `Settings`. What is not given follows from the data, and the KL weight, the scale of
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
    with joined(device) as world:
        dataset = source.read(data, validation, test, chosen.seed)
        config = _config(source, dataset.about, net, recipe, where, exclude, chosen)
        model = _fresh(config) if isinstance(net, str) else net
        if config.method is not None:  # what cannot be converted is told before anything is written
            with own_generators(device):
                convert(copy.deepcopy(model), config.method, where, exclude)
        if not world.first:
            return _train(config, path, dataset, model, observer, world, resuming=False)
        prepare(path, force)
        with working(path):
            check_free(path, force)
            for name in FILES:
                remove(path / name)
            shutil.rmtree(path / TRIALS, ignore_errors=True)
            config.write(path)
            if observer is not None and dataset.preprocessing is not None:
                reading = source.roles if is_table(source.name) else None
                observer.describe(describe(dataset.preprocessing, reading))
            return _train(config, path, dataset, model, observer, world, resuming=False)


def _check_names(more: Mapping[str, Any]) -> None:
    """Refuse an argument that nothing here has, with the name that it was probably meant to be."""
    settings = {f.name for f in dataclasses.fields(Settings)}
    if unknown := [name for name in more if name not in settings]:
        known = {*inspect.signature(fit).parameters, *_ROLES, *settings} - {"more"}
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


def _config(
    source: Data,
    about: About,
    net: str | nn.Module,
    recipe: BaseRecipe | str | None,
    where: str | None,
    exclude: str | None,
    given: Settings,
) -> Config:
    """The run, with what follows from the data in the place of what was not given."""
    if isinstance(recipe, str):
        recipe = usual_method(about.kind) if recipe == "auto" else method_named(recipe)
    if given.heteroscedastic and about.task == "classification":
        raise VardropError(
            f"Expected a regression for `heteroscedastic`, but the target of {about.name} is a "
            "class. Leave it out."
        )
    _check_class_weight(given, about)
    if isinstance(recipe, HeadRecipe) and (given.class_weight or source.roles.weight):
        raise VardropError(
            "Expected no weights of rows or classes for a method with a head, whose loss is its "
            f"own, but got {given.class_weight or source.roles.weight!r}. Choose another method."
        )
    rows = about.sizes["train"] + about.sizes["validation"]
    name = usual_net(about.kind, rows) if net == "auto" else net
    return Config(
        source,
        about,
        name if isinstance(name, str) else type(name).__name__,
        not isinstance(name, str),
        recipe,
        where,
        exclude,
        _settings(source, given, rows, about.kind == "image"),
    )


def _check_class_weight(given: Settings, about: About) -> None:
    found = given.class_weight
    if found is not None and about.task == "regression":
        raise VardropError(
            f"Expected classes for `class_weight`, but the target of {about.name} is a number. "
            "Name a column of weights by `weight`."
        )
    if unknown := sorted(set(found) - set(about.classes)) if isinstance(found, dict) else []:
        raise VardropError(
            f"Expected `class_weight` for the classes {', '.join(about.classes)}, but got "
            f"{', '.join(map(repr, unknown))}."
        )


def _settings(source: Data, given: Settings, rows: int, images: bool) -> Settings:
    """Parts that were given are no folds: they would mix what was to be kept apart."""
    roles = source.roles
    apart = (source.validation, roles.split, roles.group, roles.time)
    if given.folds is None and any(part is not None for part in apart):
        given = dataclasses.replace(given, folds=1)
    return given.for_data(rows, images)


def resume(
    out: str | Path,
    net: nn.Module | None = None,
    observer: Observer | None = None,
    data: Any = None,
    validation: Any = None,
    test: Any = None,
    **changes: Any,
) -> Run:
    """Go on with a run from its last checkpoint, as if it had never stopped.

    What defines the data (the seed of their split too) stays that of the run. With another
    `batch_size` the epoch that was interrupted begins anew; with another `beta` the competition for
    the best net does. A run that is at its end stays as it is.

    Args:
        out: the directory of the run.
        net: a fresh net of your own, where `fit` was given one.
        observer: as for `fit`.
        data, validation, test: again what `fit` was given, where that was no name and no file.
        changes: settings to change from here on, such as a lower `lr`.
    """
    path = Path(out)
    device = _changed(Config.read(path), path, changes).settings.torch_device()
    with joined(device) as world, working(path) if world.first else nullcontext():
        config = _changed(Config.read(path), path, changes)  # by now nobody else can change it
        dataset = load_same_data(config, path, data, validation, test)
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
    if settings.class_weight != old.class_weight:
        raise VardropError(
            f"Expected `class_weight` to stay {old.class_weight!r}, because the KL weight of "
            f"{path} was chosen with it, but got {settings.class_weight!r}. Begin a new run."
        )
    if settings.pretrain != old.pretrain and read_phase(path, config.checked) == "fit":
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
        return build_net(config.net, config.about.shape, config.outputs, config.about.embeddings)


def _train(
    config: Config,
    path: Path,
    data: Dataset,
    net: nn.Module,
    observer: Observer | None,
    world: World,
    resuming: bool,
) -> Run:
    watch = observer or (ProgressBar() if on_terminal() and world.first else Observer())
    own = config.settings.class_weight
    rows = data if own is None else with_class_weight(data, own)
    with own_generators(world.device):
        elbo = carried_out(Order(config, path, rows, net, watch, world, resuming))
    run = Run(path, config, elbo, data)
    if world.first and not (path / "results.json").is_file():  # else they are of this very net
        measure(run)
    return run
