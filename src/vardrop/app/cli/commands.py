"""The commands: parse, call one verb, print."""

from __future__ import annotations

import os
import shlex
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import typer

import vardrop
from vardrop._core.errors import VardropError
from vardrop.app import runs
from vardrop.app.cli import options as o, printing
from vardrop.app.cli.config_file import imported
from vardrop.app.runs import Settings, load_run, method_named
from vardrop.app.runs.callbacks import (
    JsonLines,
    Observer,
    ObserverList,
    ProgressBar,
    TensorBoard,
    TextObserver,
    on_terminal,
)
from vardrop.app.runs.config import free_directory
from vardrop.app.runs.models import check_net_name
from vardrop.recipes import BaseRecipe

_BESIDE = Path(vardrop.__file__).resolve().parents[2] / "experiments"  # in a clone

app = typer.Typer(
    name="vardrop",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.callback(epilog="Example: vardrop fit digits --net lenet5 --out runs/a")
def program(
    context: typer.Context,
    version: o.VERSION = False,
    quiet: o.QUIET = False,
    import_: o.IMPORT = None,
    debug: o.DEBUG = False,
) -> None:
    """Noise that is learned: train, look, prune, report.

    These options may stand before or after a command.
    """
    imported(import_ or ())
    context.obj = quiet


@app.command(epilog="Example: vardrop demo --out /tmp/demo")
def demo(out: o.DEMO_OUT = None) -> None:
    """Train on scikit-learn's digits, look at the uncertainty, prune, write a report."""
    from vardrop.app.demo import main

    main(out)


@app.command(epilog="Example: vardrop methods")
def methods(json: o.JSON = False) -> None:
    """List the named methods, one line each, with the paper."""
    printing.methods(runs.methods(), json)


@app.command(
    epilog=o.examples(
        "vardrop fit digits --net lenet5 --out runs/a",
        "vardrop fit houses.csv --target price --out runs/h",
        "vardrop fit --resume --out runs/a",
    )
)
@o.with_settings()
def fit(
    context: typer.Context,
    data: o.DATA = None,
    net: o.NET = None,
    method: o.METHOD = None,
    option: o.OPTION = None,
    out: o.OUT = None,
    validation: o.VALIDATION = None,
    test: o.TEST = None,
    data_dir: o.DATA_DIR = None,
    where: o.WHERE = None,
    exclude: o.EXCLUDE = None,
    resume: o.RESUME = False,
    force: o.FORCE = False,
    json: o.JSON = False,
    tensorboard: o.TENSORBOARD = False,
    config: o.CONFIG = None,
    **more: Any,
) -> None:
    """Train a net on data and keep everything in a directory; go on with it after a stop."""
    given = {name: value for name, value in more.items() if value is not None}
    settings = {f.name: given.pop(f.name) for f in fields(Settings) if f.name in given}
    with o.usage():
        Settings.from_json(settings).torch_device()
    if resume:
        fixed = (data, net, method, option, validation, test, data_dir, where, exclude, force)
        path = _resumed(out, any(fixed) or bool(given))
        watch = observer(context, json, path if tensorboard else None)
        with _stoppable(path):
            run = runs.resume(path, None, watch, **settings)
        printing.run(run, json)
        return
    if data is None:
        raise typer.BadParameter("Expected DATA, but got none. Try `vardrop fit digits`.")
    with o.usage():
        recipe = _recipe(method, option)
        if net is not None:
            check_net_name(net)
    path = out or free_directory(data)
    with _stoppable(path):
        run = runs.fit(
            data,
            net or "auto",
            recipe,
            out=path,
            validation=validation,
            test=test,
            directory=data_dir,
            where=where,
            exclude=exclude,
            force=force,
            observer=observer(context, json, path if tensorboard else None),
            **given,
            **settings,
        )
    printing.run(run, json)


@contextmanager
def _stoppable(out: Path) -> Iterator[None]:
    """Tell who interrupts a run how it goes on."""
    try:
        yield
    except KeyboardInterrupt:
        begun = (out / "config.json").is_file()
        typed = f"vardrop fit --resume --out {shlex.quote(str(out))}"
        told = f"stopped. Go on with `{typed}`." if begun else "stopped before it began."
        raise VardropError(told) from None


def _recipe(method: str | None, option: list[str] | None) -> BaseRecipe | Literal["auto"] | None:
    options = o.assignments(option)
    if method is None and options:
        raise VardropError("Expected --method with --option, but got none. Name the method.")
    return "auto" if method is None else method_named(method, options)


def _resumed(out: Path | None, more: bool) -> Path:
    if out is None:
        raise typer.BadParameter("Expected --out with --resume, but got none. Name the run.")
    if more:
        raise typer.BadParameter(
            "Expected only --out and settings with --resume, but got more. Data, net and method "
            "are those of the run."
        )
    return out


def observer(context: typer.Context, json: bool, tensorboard: Path | None) -> Observer:
    """Who is told: machines by --json, people by a bar on a terminal; only the first process."""
    if os.environ.get("RANK", "0") != "0":
        return Observer()
    if context.obj:  # --quiet
        return Observer() if tensorboard is None else TensorBoard(tensorboard / "tensorboard")
    found: list[Observer] = [JsonLines()] if json else [TextObserver()]
    if on_terminal() and not json:
        found.append(ProgressBar())
    if tensorboard is not None:
        found.append(TensorBoard(tensorboard / "tensorboard"))
    return ObserverList(found)


@app.command(epilog="Example: vardrop predict runs/h new.csv --out predictions.csv")
def predict(run: o.RUN, table: o.TABLE, out: o.PREDICTIONS, samples: o.SAMPLES = 100) -> None:
    """Predict new rows: mean, interval, aleatoric and epistemic uncertainty, one row each."""
    loaded = load_run(run)
    runs.write_predictions(loaded, table, out, samples)
    printing.standing(loaded)
    printing.say(f"{out} written")


@app.command(
    epilog=o.examples(
        "vardrop evaluate runs/a --ood fashion-mnist",
        "vardrop evaluate runs/h --data new.csv --predictions answers.csv",
    )
)
def evaluate(
    run: o.RUN,
    data: o.NEW_ROWS = None,
    predictions: o.NEW_PREDICTIONS = None,
    ood: o.OOD = None,
    data_dir: o.DATA_DIR = None,
    samples: o.SAMPLES = 32,
    json: o.JSON = False,
) -> None:
    """Score a run on test data or on new rows, and tell test images from other image sets."""
    if (ood and data is not None) or (predictions is not None and data is None):
        raise typer.BadParameter("Expected --data without --ood, and --predictions with --data.")
    loaded = load_run(run, directory=data_dir)
    if data is not None:
        found = runs.evaluate_rows(loaded, data, samples, predictions)
        printing.standing(loaded)
        printing.rows(loaded, found, json)
        return
    runs.evaluate(loaded, ood or (), samples)
    printing.standing(loaded)
    printing.run(loaded, json)


@app.command(
    epilog=o.examples(
        "vardrop compress runs/a --max-drop 0.002 --onnx small.onnx",
        "vardrop compress runs/a --macs 0.5",
    )
)
def compress(
    run: o.RUN,
    max_drop: o.MAX_DROP = None,
    sparsity: o.SPARSITY = None,
    macs: o.MACS = None,
    latency: o.LATENCY = None,
    bytes: o.BYTES = None,
    onnx: o.ONNX = None,
    json: o.JSON = False,
) -> None:
    """Take out what the method calls dead, by validation data; or train to a budget of MACs."""
    fractions = {"macs": macs, "latency": latency, "bytes": bytes}
    given = {"max-drop": max_drop, "sparsity": sparsity, **fractions}
    if sum(value is not None for value in given.values()) > 1:
        names = [f"--{name}" for name in given]
        raise typer.BadParameter(
            f"Expected {', '.join(names[:-1])} or {names[-1]}, but got several."
        )
    loaded = load_run(run)
    if any(value is not None for value in fractions.values()):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the notes of the report say it too
            slimmed = runs.slim_run(loaded, onnx=onnx, **fractions)
        printing.standing(loaded)
        printing.slimmed(loaded, slimmed, json)
        return
    _, plan = runs.compress(loaded, max_drop, sparsity, onnx)
    printing.standing(loaded)
    printing.compression(loaded, plan, json)


@app.command(
    epilog=o.examples(
        "vardrop export runs/h --onnx model.onnx",
        "vardrop export runs/a --onnx model.onnx --mode moments --outputs probs,epistemic",
    )
)
def export(
    run: o.RUN,
    onnx: o.MODEL,
    samples: o.FUNCTIONS = 32,
    mode: o.SERVING = "functions",
    outputs: o.OUTPUTS = None,
) -> None:
    """Write a run as one ONNX file that takes raw rows and answers in the units of the target."""
    names = None if outputs is None else [name.strip() for name in outputs.split(",")]
    loaded = load_run(run)
    size = runs.export_run(loaded, onnx, samples, mode=mode, outputs=names)
    printing.standing(loaded)
    printing.say(f"{onnx} written, {size:,} bytes")


@app.command(epilog="Example: vardrop report runs/a runs/b --out both.html")
def report(runs: o.RUNS, out: o.REPORT_OUT = None) -> None:
    """Write one self-contained HTML file about one run, or several side by side."""
    from vardrop.app.report import report as write

    printing.say(str(write(runs, out)))


@app.command(
    epilog=o.examples(
        "vardrop reproduce --list",
        "vardrop reproduce kingma/kl",
        "vardrop reproduce quick",
        "vardrop reproduce quick gal/toy",
        "vardrop reproduce --page",
    )
)
def reproduce(
    name: o.EXPERIMENT = None,
    only: o.QUICK_NAME = None,
    list_: o.LIST = False,
    page: o.PAGE = False,
    experiments: o.EXPERIMENTS = None,
    results: o.RESULTS = None,
    docs: o.DOCS = None,
    force: o.ANEW = False,
) -> None:
    """Run an experiment of the papers in a clone, going on where a stopped run stood."""
    if (name is not None) + list_ + page != 1 or (only is not None and name != "quick"):
        raise typer.BadParameter(
            "Expected one name, `quick`, `quick` and a name, --list or --page. "
            "Try `vardrop reproduce --list`."
        )
    directory = experiments_directory(experiments)
    command, kept = experiments_command(directory), results or directory.parent / "results"
    if list_:
        command.show(directory, kept)
    elif page:
        command.page(directory, kept, docs or directory.parent / "docs")
    elif name == "quick":
        raise typer.Exit(command.quick(directory, only, results, force))
    else:
        command.run(directory, name, kept, force)


def experiments_directory(given: Path | None = None, beside: Path = _BESIDE) -> Path:
    """The directory of descriptions: the given one, ./experiments, or the one beside the source."""
    here = Path("experiments")
    if given is not None:
        return given
    return here if any(here.glob("*/*.toml")) else _code(here, beside)


def experiments_command(directory: Path, beside: Path = _BESIDE) -> Any:
    """The module that runs what the descriptions in `directory` say."""
    code = _code(directory, beside).resolve()
    if str(code.parent) not in sys.path:
        sys.path.insert(0, str(code.parent))
    return import_module("experiments.command")


def _code(*places: Path) -> Path:
    """The first of the places that holds the experiments' code."""
    for place in places:
        if (place / "command.py").is_file():
            return place
    searched = dict.fromkeys(str(place.resolve().parent) for place in places)
    raise VardropError(
        f"Expected a clone of vardrop's repository, but got no experiments/command.py in "
        f"{' or '.join(searched)}. The experiments of the papers are not part of the installed "
        "package: clone the repository, or unpack the source distribution (`pip download --no-deps "
        "--no-binary vardrop vardrop`), and run `vardrop reproduce` there."
    )
