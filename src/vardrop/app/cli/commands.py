"""The commands: parse the options, call one function, print."""

from __future__ import annotations

import os
import shlex
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

import vardrop
from vardrop._core.errors import VardropError
from vardrop.app import runs
from vardrop.app.cli import options as o, printing
from vardrop.app.cli.config_file import import_modules
from vardrop.app.runs import Settings, load_run, method_named
from vardrop.app.runs.callbacks import (
    CallbackList,
    JsonLines,
    ProgressBar,
    RunCallback,
    TensorBoard,
    TextLines,
    on_terminal,
)
from vardrop.app.runs.config import free_directory
from vardrop.app.runs.models import check_net_name
from vardrop.app.score_texts import check_scores
from vardrop.recipes import BaseRecipe

if TYPE_CHECKING:
    from vardrop.app.report import Comparison

_BESIDE = Path(vardrop.__file__).resolve().parents[2] / "experiments"  # in a clone
_SETTINGS = fields(Settings)

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
    """Bayesian neural networks and model compression: train, evaluate, compress, report.

    These options may be given before or after a command.
    """
    import_modules(import_ or ())
    context.obj = quiet


@app.command(epilog="Example: vardrop demo --out /tmp/demo")
def demo(out: o.DEMO_OUT = None) -> None:
    """Train on scikit-learn's digits, evaluate the uncertainty, prune, write a report."""
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
    """Train a model on data and keep everything in a directory; resume after a stop."""
    given = {name: value for name, value in more.items() if value is not None}
    settings = _settings(given, net)
    given = {name: value for name, value in given.items() if name not in settings}
    if resume:
        path = _check_resume(out, context)
        with _stoppable(path):
            watch = make_callback(context, json, path if tensorboard else None)
            run = runs.resume(path, None, watch, **settings)
        printing.run(run, json)
        return
    if data is None:
        raise typer.BadParameter("Expected DATA, but got none. Try `vardrop fit digits`.")
    with o.usage():
        recipe = _recipe(method, option)
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
            callback=make_callback(context, json, path if tensorboard else None),
            **given,
            **settings,
        )
    printing.run(run, json)


def _settings(given: Mapping[str, Any], net: str | None) -> dict[str, Any]:
    """The settings among the given options; wrong ones, or a wrong net, are errors of usage."""
    settings = {f.name: given[f.name] for f in _SETTINGS if f.name in given}
    with o.usage():
        Settings.from_json(settings).torch_device()
        if net is not None:
            check_net_name(net)
    return settings


@contextmanager
def _stoppable(out: Path) -> Iterator[None]:
    """Print how to resume an interrupted run."""
    try:
        yield
    except KeyboardInterrupt:
        if not (out / "config.json").is_file():
            raise VardropError("stopped before it began.") from None
        typed = f"vardrop fit --resume --out {shlex.quote(str(out))}"
        raise VardropError(f"stopped. Resume with `{typed}`.") from None


def _recipe(method: str | None, option: list[str] | None) -> BaseRecipe | Literal["auto"] | None:
    options = o.assignments(option)
    if method is None and options:
        raise VardropError("Expected --method with --option, but got none. Name the method.")
    return "auto" if method is None else method_named(method, options)


def _check_resume(out: Path | None, context: typer.Context) -> Path:
    """The run to resume, if nothing but settings was given with it."""
    allowed = {f.name for f in fields(Settings)} | {
        "out",
        "resume",
        "json",
        "tensorboard",
        "config",
    }
    if out is None:
        raise typer.BadParameter("Expected --out with --resume, but got none. Name the run.")
    for name in context.params.keys() - allowed:
        source = context.get_parameter_source(name)
        if source is not None and source.name != "DEFAULT":
            raise typer.BadParameter(
                "Expected only --out and settings with --resume, because the data, the model and "
                f"the method are those of the run, but got {name}."
            )
    return out


def make_callback(context: typer.Context, json: bool, tensorboard: Path | None) -> RunCallback:
    """JSON lines with --json, text and a bar on a terminal otherwise; only in the first process."""
    if os.environ.get("RANK", "0") != "0":
        return RunCallback()
    if context.obj:  # --quiet
        return RunCallback() if tensorboard is None else TensorBoard(tensorboard / "tensorboard")
    found: list[RunCallback] = [JsonLines()] if json else [TextLines()]
    if on_terminal() and not json:
        found.append(ProgressBar())
    if tensorboard is not None:
        found.append(TensorBoard(tensorboard / "tensorboard"))
    return CallbackList(found)


@app.command(epilog="Example: vardrop predict runs/h new.csv --out predictions.csv")
def predict(run: o.RUN, table: o.TABLE, out: o.PREDICTIONS, samples: o.SAMPLES = 100) -> None:
    """Predict new rows: mean, interval, aleatoric and epistemic uncertainty."""
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
    """Score a run on test data or on new rows, and its out-of-distribution detection."""
    if ood and data is not None:
        raise typer.BadParameter("--data cannot be combined with --ood.")
    if predictions is not None and data is None:
        raise typer.BadParameter("--predictions requires --data.")
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
    """Remove weights that validation data does not need, or train to a budget of MACs."""
    fractions = {"macs": macs, "latency": latency, "bytes": bytes}
    given = {"max-drop": max_drop, "sparsity": sparsity, **fractions}
    names = [f"--{name}" for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise typer.BadParameter(f"{names[0]} cannot be combined with {names[1]}.")
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
    """Write a run as one ONNX file that takes raw rows and predicts in units of the target."""
    loaded = load_run(run)
    size = runs.export_run(loaded, onnx, samples, mode=mode, outputs=o.split_names(outputs))
    printing.standing(loaded)
    printing.say(f"{onnx} written, {size:,} bytes")


@app.command(
    epilog=o.examples(
        "vardrop compare runs/a runs/b runs/c",
        "vardrop compare iris --methods none,l0,sparse_vd --seeds 5 --out runs/iris-methods",
    )
)
@o.with_settings("seed", "compare")
def compare(
    context: typer.Context,
    compared: o.COMPARED = None,
    methods: o.METHODS_ = None,
    seeds: o.SEEDS = 5,
    scores: o.SCORES = None,
    out: o.COMPARISON_OUT = None,
    net: o.NET = None,
    validation: o.VALIDATION = None,
    test: o.TEST = None,
    data_dir: o.DATA_DIR = None,
    where: o.WHERE = None,
    exclude: o.EXCLUDE = None,
    json: o.JSON = False,
    config: o.CONFIG = None,
    **more: Any,
) -> None:
    """Compare runs on the same data, or methods that are fitted with several seeds."""
    parts = {"net": net, "validation": validation, "test": test, "directory": data_dir}
    options = {**parts, "where": where, "exclude": exclude, **more}
    given = {name: value for name, value in options.items() if value is not None}
    names, wanted = o.split_names(methods), o.split_names(scores)
    if names is None and (given or len(compared or ()) < 2):
        option = f" --{next(iter(given)).replace('_', '-')} requires --methods." if given else ""
        raise typer.BadParameter(f"Expected two or more runs, or data and --methods.{option}")
    if names is None:
        found = runs.compare_runs(compared or ())
        with o.usage():
            found.select(wanted)
    else:
        out = out or free_directory(f"{Path((compared or ['data'])[0]).stem}-comparison")
        with o.usage():
            check_scores(wanted or ())
        found = _compare_methods(context, compared or [], names, seeds, out, json, given)
    if out is not None:
        found.write(out, wanted)
    printing.comparison(found, wanted, out, json)


def _compare_methods(
    context: typer.Context,
    data: list[str],
    methods: list[str],
    seeds: int,
    out: Path,
    json: bool,
    given: Mapping[str, Any],
) -> Comparison:
    if len(data) != 1:
        raise typer.BadParameter(
            f"Expected one data set with --methods, but got {', '.join(data) or 'none'}."
        )
    _settings(given, given.get("net"))
    with o.usage():
        for name in set(methods) - {"auto"}:
            method_named(name)
    watch = make_callback(context, json, None)
    try:
        return runs.compare_methods(data[0], methods, seeds, out=out, callback=watch, **given)
    except KeyboardInterrupt:
        typed = f"--out {shlex.quote(str(out))}"
        raise VardropError(f"stopped. Run the same command with {typed} to resume.") from None


@app.command(epilog="Example: vardrop report runs/a runs/b --out both.html")
def report(runs: o.RUNS, out: o.REPORT_OUT = None) -> None:
    """Write one self-contained HTML file about one run or several."""
    from vardrop.app.report import report as write

    printing.say(str(write(runs, out)))


@app.command(
    epilog=o.examples(
        "vardrop reproduce --list",
        "vardrop reproduce kingma/kl",
        "vardrop reproduce gal/toy --quick",
        "vardrop reproduce --quick",
        "vardrop reproduce --page",
    )
)
def reproduce(
    name: o.EXPERIMENT = None,
    quick: o.QUICK = False,
    list_: o.LIST = False,
    page: o.PAGE = False,
    experiments: o.EXPERIMENTS = None,
    results: o.RESULTS = None,
    docs: o.DOCS = None,
    force: o.RESTART = False,
) -> None:
    """Run an experiment of the papers in a clone, from where a stopped run ended."""
    if (name is not None or quick) + list_ + page != 1:
        raise typer.BadParameter(
            "Expected a name, --quick, --list or --page. Try `vardrop reproduce --list`."
        )
    directory = experiments_directory(experiments)
    command, kept = experiments_command(directory), results or directory.parent / "results"
    if list_:
        command.show(directory, kept)
    elif page:
        command.page(directory, kept, docs or directory.parent / "docs")
    elif quick:
        raise typer.Exit(command.quick(directory, name, results, force))
    else:
        try:
            command.run(directory, name, kept, force)
        except KeyboardInterrupt:
            text = "stopped. The same command continues from the last checkpoint."
            raise VardropError(text) from None


def experiments_directory(given: Path | None = None, beside: Path = _BESIDE) -> Path:
    """The directory of descriptions: the given one, ./experiments, or the one of the clone."""
    here = Path("experiments")
    if given is not None:
        return given
    return here if any(here.glob("*/*.toml")) else _code(here, beside)


def experiments_command(directory: Path, beside: Path = _BESIDE) -> Any:
    """The module that runs the descriptions in `directory`."""
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
        f"{' or '.join(searched)}. The experiments of the papers are not in the installed package: "
        "clone the repository or unpack the source distribution, and run `vardrop reproduce` there."
    )
