"""`fit` trains a model on data and stores the run in a directory; `resume` continues it."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from vardrop._core.checks import check_type
from vardrop._core.errors import VardropError, import_optional
from vardrop._core.rng import preserve_rng
from vardrop.app.data.preprocessing import Roles, Task, label
from vardrop.app.data.splits import About, with_class_weight
from vardrop.app.data.tables import describe, is_table
from vardrop.app.runs.config import Config, Data, free_directory, new_directory, working
from vardrop.app.runs.distributed import join_processes, resolve_device
from vardrop.app.runs.evaluate import measure
from vardrop.app.runs.held_out import Choice
from vardrop.app.runs.models import fresh_net, method_named
from vardrop.app.runs.run import Run
from vardrop.app.runs.run_callbacks import ProgressBar, RunCallback
from vardrop.app.runs.settings import FEW, Settings
from vardrop.app.runs.training import read_phase
from vardrop.app.runs.trials import FitJob, estimate_seconds, run_fit_job
from vardrop.app.store import method_name
from vardrop.conversion import convert
from vardrop.recipes import BaseRecipe, HeadRecipe

if TYPE_CHECKING:
    from vardrop.app.data.inputs import Source

_ROLES = {f.name for f in dataclasses.fields(Roles)} - {"target", "task", "drop"}


def fit(
    data: Source,
    net: str | nn.Module = "auto",
    recipe: BaseRecipe | str | None = "auto",
    *,
    out: str | Path | None = None,
    target: str | None = None,
    task: Task | None = None,
    drop: Sequence[str] = (),
    validation: Source | None = None,
    test: Source | bool | None = None,
    directory: str | Path | None = None,
    include: str | None = None,
    exclude: str | None = None,
    force: bool = False,
    callback: RunCallback | None = None,
    progress: bool | None = None,
    **options: Any,
) -> Run:
    """Train a model on named data or a table, store the run in a directory, score it on test data.

    Args:
        data: a name such as "digits" or "mnist", a CSV or Parquet file, a DataFrame with its
            `target`, a pair (X, y), a torch `Dataset` or `DataLoader`; see `load_dataset`.
        net: "mlp50", "mlp", "lenet300", "lenet5", or a custom network, which is trained in place.
            The default is "mlp50" for a table below 2000 rows, else "mlp".
        recipe: the method, or its name as on the command line. None leaves the network unchanged.
            The default is `bayes_by_backprop(prior=Normal(learned=True))` for tables and
            `sparse_vd()` for images.
        out: the directory, runs/<data>-<number> by default. One that holds files is an error.
        target, task, drop: roles of columns of a table, see `load_dataset`.
        validation, test: custom data for these parts, of the same kind as `data`. With test=False
            the model is trained on all rows, and scored on rows that were held out in turn.
        directory: directory of the image sets.
        include, exclude: globs on the names of the layers to make noisy, or not; see `convert`.
        force: overwrite a run in `out`.
        callback: is called after steps and epochs. By default `progress` decides.
        progress: show a progress bar. None shows it on a terminal. After Ctrl-C, `resume` continues
            from the last checkpoint.
        options: roles of other columns of a table, see `vardrop.app.data.Roles`, and settings of
            the training, see `Settings`. Settings that are not passed follow from the data. The
            KL weight, the scale of the noise and the width of intervals are chosen on held-out
            rows.

    Returns:
        The trained run.

    >>> import tempfile, vardrop as vd
    >>> from vardrop.app.runs import fit
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = fit("iris", "mlp", vd.bayes_by_backprop(), out=folder, epochs=2)
    ...     list(run.results["metrics"])[:3]
    ['accuracy', 'balanced_accuracy', 'auroc']
    """
    check_arguments(net=net, out=out, drop=drop, include=include, exclude=exclude, force=force)
    check_arguments(callback=callback, progress=progress)
    roles = {name: options.pop(name) for name in _ROLES if name in options}
    roles |= {"target": target, "task": task, "drop": tuple(drop)}
    source = _describe_source(data, validation, test, directory, roles)
    path = Path(out) if out is not None else free_directory(source.name)
    if isinstance(options.get("class_weight"), Mapping):
        options["class_weight"] = {label(c): w for c, w in options["class_weight"].items()}
    chosen = Settings.from_json(options, {*inspect.signature(fit).parameters, *_ROLES})
    for package in ("safetensors", "pandas", "sklearn"):  # an error before anything is trained
        import_optional(package)
    device = resolve_device(chosen.device)
    with join_processes(device) as world:
        dataset = source.read(data, validation, test, chosen.seed)
        about = dataset.about
        rows = about.sizes["train"] + about.sizes["validation"]
        if isinstance(recipe, str):
            recipe = method_named(recipe, kind=about.kind)
        _check_settings(chosen, about, recipe, source)
        if net == "auto":
            net = "mlp50" if about.kind == "table" and rows < FEW else "mlp"
        custom = None if isinstance(net, str) else net
        name = net if isinstance(net, str) else type(net).__name__
        apart = (source.validation, source.split, source.group, source.time)
        if chosen.folds is None and any(part is not None for part in apart):
            chosen = dataclasses.replace(chosen, folds=1)  # folds would mix custom parts
        settings = chosen.for_data(rows, about.kind == "image")
        config = Config(source, about, name, custom is not None, recipe, include, exclude, settings)
        model = fresh_net(config, custom)
        if recipe is not None:  # a model that cannot be converted fails before anything is written
            with preserve_rng(device):
                convert(copy.deepcopy(model), recipe, include, exclude)
        with new_directory(path, force) if world.first else nullcontext():
            if world.first:
                config.write(path)
            job = FitJob(config, path, dataset, model, world)
            if world.first and callback is not None:
                callback.describe(_describe_job(job))
            return _finish(job, callback, progress)


def _describe_job(job: FitJob) -> str:
    """The data, the task, the model, the method, the directory and the expected time of a fit."""
    config, about, columns = job.config, job.config.about, job.data.preprocessing
    sizes = ", ".join(f"{count:,} {part}" for part, count in about.sizes.items() if count)
    seconds, epochs = estimate_seconds(job), config.settings.epochs
    span = f"{math.ceil(seconds)} s" if seconds < 100 else f"{seconds / 60:.0f} min"
    classes = f", {len(about.classes)} classes" if about.classes else ""
    lines = [
        f"data    {about.name}, examples: {sizes}",
        f"task    {about.task}{classes}",
        f"model   {config.net}, {sum(p.numel() for p in job.net.parameters()):,} parameters",
        f"method  {method_name(config.method)}",
        f"output  {job.path}",
        f"time    about {span} for {epochs} epochs on {job.world.device}, trials included",
    ]
    if columns is not None:
        lines.append(describe(columns, config.data if is_table(config.data.name) else None))
    return "\n".join(lines)


_TYPES: dict[str, tuple[Any, str]] = {
    "net": (nn.Module | str, "a network or its name"),
    "out": (str | os.PathLike | None, "a directory"),
    "drop": (list | tuple, "a list of names of columns"),
    **dict.fromkeys(("include", "exclude"), (str | None, "a name pattern")),
    "force": (bool, "True or False"),
    "callback": (RunCallback | None, "a RunCallback"),
    "progress": (bool | None, "True, False or None"),
}


def check_arguments(**arguments: object) -> None:
    """Raise an error for an argument of `fit` or a similar verb that has a wrong type."""
    for name, argument in arguments.items():
        check_type(name, argument, *_TYPES[name])


def _describe_source(
    data: Source,
    validation: Source | None,
    test: Source | bool | None,
    directory: str | Path | None,
    roles: Mapping[str, Any],
) -> Data:
    """The stored description of data: the path of a file, the type of data in memory."""
    stored: dict[str, Any] = {"name": data, "validation": validation, "test": test}
    in_memory = False
    for name, part in stored.items():
        if isinstance(part, str | os.PathLike):
            path = Path(part)
            stored[name] = str(path.resolve()) if path.is_file() else str(part)
        elif part is not None and part is not False:
            stored[name], in_memory = type(part).__name__, True
    stored["name"] = str(stored["name"])
    folder = None if directory is None else str(directory)
    return Data(**{**roles, **stored}, directory=folder, in_memory=in_memory)


def _check_settings(
    settings: Settings, about: About, recipe: BaseRecipe | None, roles: Roles
) -> None:
    """Raise an error for settings that do not suit the target or the method."""
    weights, numbers = settings.class_weight, about.task == "regression"
    unknown = sorted(set(weights) - set(about.classes)) if isinstance(weights, dict) else []
    head_weights = isinstance(recipe, HeadRecipe) and (weights or roles.weight)
    problems = {
        f"`heteroscedastic` needs a regression, but the target of {about.name} is a class.": (
            settings.heteroscedastic and not numbers
        ),
        f"`class_weight` needs classes, but the target of {about.name} is a number. Set `weight` "
        "to a column of weights.": weights is not None and numbers,
        f"Expected `class_weight` for the classes {', '.join(about.classes)}, but got "
        f"{', '.join(map(repr, unknown))}.": unknown,
        "Weights of rows or classes are not supported by methods with a head, which has its own "
        f"loss, but got {head_weights!r}. Choose another method.": head_weights,
    }
    if texts := [text for text, wrong in problems.items() if wrong]:
        raise VardropError(texts[0])


def resume(
    out: str | Path,
    net: nn.Module | None = None,
    callback: RunCallback | None = None,
    data: Source | None = None,
    validation: Source | None = None,
    test: Source | bool | None = None,
    progress: bool | None = None,
    **changes: Any,
) -> Run:
    """Resume a run from its last checkpoint, with bit-identical results.

    The data and the seed of their split cannot change. With another `batch_size` the interrupted
    epoch starts again. With another `beta` the search for the best model starts again. A finished
    run is left unchanged.

    Args:
        out: the directory of the run.
        net: a fresh network, if the run has a custom one.
        callback, progress: as for `fit`.
        data, validation, test: as for `fit`, if they were passed in memory.
        changes: settings to change from here on, such as a lower `lr`.

    Returns:
        The trained run.
    """
    check_arguments(out=out, callback=callback, progress=progress)
    check_type("net", net, nn.Module | None, "a fresh network")
    path = Path(out or ".")
    device = resolve_device(_apply_changes(Config.read(path), path, changes).settings.device)
    with join_processes(device) as world, working(path) if world.first else nullcontext():
        # Read again, now that no other process can change it.
        config = _apply_changes(Config.read(path), path, changes)
        dataset = config.load_data(path, data, validation, test)
        job = FitJob(config, path, dataset, fresh_net(config, net), world, resuming=True)
        if changes and world.first:
            config.write(path)
        return _finish(job, callback, progress)


def _apply_changes(config: Config, path: Path, changes: dict[str, Any]) -> Config:
    """The configuration with other settings, or an error if a started run cannot have them."""
    settings, old = Settings.from_json({**vars(config.settings), **changes}), config.settings
    numbers = [n for n in ("epochs", "batch_size", "lr", "folds") if getattr(settings, n) is None]
    reasons = {
        "seed": f"it split the data of {path}, and test rows would be used for training",
        "class_weight": f"the KL weight of {path} was chosen with it",
        **dict.fromkeys(numbers, "a started run has a number"),
    }
    if settings.pretrain != old.pretrain and read_phase(path) == "fit":
        reasons["pretrain"] = f"{path} is past its pretraining"
    for name, reason in reasons.items():
        before, now = getattr(old, name), getattr(settings, name)
        if before != now:
            text = f"Expected `{name}` to stay {before!r}, because {reason}, but got {now!r}."
            raise VardropError(f"{text} Start a new run.")
    return dataclasses.replace(config, settings=settings)


def _finish(job: FitJob, callback: RunCallback | None, progress: bool | None) -> Run:
    """Train and measure; without a callback, show a progress bar if requested or on a terminal."""
    visible = (sys.stderr.isatty() if progress is None else progress) and job.world.first
    callback = callback or (ProgressBar() if visible else RunCallback())
    weights = job.config.settings.class_weight
    data = job.data if weights is None else with_class_weight(job.data, weights)
    with preserve_rng(job.world.device):
        elbo = run_fit_job(dataclasses.replace(job, data=data, callback=callback))
    run = Run(job.config, elbo, Choice.read(job.path), job.path, job.data)
    if job.world.first and not (job.path / "results.json").is_file():  # else of this model
        measure(run)
    return run
