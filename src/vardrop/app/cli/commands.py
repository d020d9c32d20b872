"""The commands: parse the options, call one function, print."""

from __future__ import annotations

import inspect
import os
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer
from typer import Argument, Option

import vardrop
from vardrop._core.errors import VardropError, printable
from vardrop.app import runs
from vardrop.app.cli import options as o, printing
from vardrop.app.cli.options import Fraction, MaybePath, MaybeText, MaybeTexts
from vardrop.app.data import DATASETS, OUT_OF_DISTRIBUTION
from vardrop.app.runs import METHODS, Settings, load_run, method_named, run_callbacks
from vardrop.app.runs.compress import MAX_DROPS
from vardrop.app.runs.config import free_directory
from vardrop.app.runs.distributed import resolve_device
from vardrop.app.runs.models import check_net_name
from vardrop.app.runs.run_export import Serving
from vardrop.app.score_texts import check_scores

_CLONE = Path(vardrop.__file__).resolve().parents[2] / "experiments"
_SETTINGS = {field.name for field in fields(Settings)}
_RESUMED = {"out", "resume", "json", "config"}  # other options that --resume can be combined with
_IMPORT = "Import a module that registers data sets or methods; may be repeated."
_METHODS = """A name from `vardrop methods`, or none for the plain model. The default is
bayes_by_backprop with a learned prior for tables and sparse_vd for images."""
_DROP = f"""Largest loss on validation data: of accuracy ({MAX_DROPS["accuracy"]} by default), or as
a fraction of the RMSE ({MAX_DROPS["rmse"]} by default)."""
_OOD = f"An out-of-distribution image set: {', '.join(OUT_OF_DISTRIBUTION)}. May be repeated."
_OPTION = "An option of the recipe, such as drop_rate=0.2. May be repeated."
_SERVING = "Functions drawn in advance, one pass of mean and variance, or draws by the runtime."
_COMPARED = "The directories of two or more runs, or the data if --recipes is used."
_COMPARISON = "A directory for the table and picture, and with --recipes for the runs."
_DATA_NAMES = o.complete(DATASETS)

app = typer.Typer(
    name="vardrop",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"max_content_width": 100},
)


def command(*examples: str) -> Callable[[o.Command], o.Command]:
    """Register a command, with examples to copy at the end of its help."""
    epilog = "\n".join(["\b", "Examples:", *(f"  {line}" for line in examples)])

    def register(function: o.Command) -> o.Command:
        summary = (inspect.getdoc(function) or "").partition("\n\n")[0]
        return app.command(cls=o.GroupedCommand, short_help=summary, epilog=epilog)(function)

    return register


@app.callback(epilog="Example: vardrop fit digits --net lenet5 --out runs/a")
def program(
    context: typer.Context,
    version: Annotated[
        bool,
        Option("--version", help="Print the version.", callback=o.print_version, is_eager=True),
    ] = False,
    quiet: Annotated[bool, Option("--quiet", help="Print errors and --json results only.")] = False,
    import_: Annotated[MaybeTexts, Option("--import", help=_IMPORT, metavar="MODULE")] = None,
    debug: Annotated[bool, Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Bayesian neural networks and model compression: train, evaluate, compress, report.

    These options can be placed before or after a command.
    """
    o.import_modules(import_ or ())
    context.obj = quiet


@command("vardrop demo --out /tmp/demo")
def demo(
    out: Annotated[MaybePath, Option(help="A directory; runs/demo-<number> by default.")] = None,
) -> None:
    """Compare learned noise with simpler methods on digits, in a minute, and write a report."""
    from vardrop.app.demo import main

    main(out)


@command("vardrop methods")
def methods(json: o.JSON = False) -> None:
    """Recommend a method for each purpose, and list all methods with their papers."""
    printing.methods(runs.methods(), json)


@command(
    "vardrop fit digits --net lenet5 --out runs/a",
    "vardrop fit houses.csv --target price --out runs/h",
    "vardrop fit --resume --out runs/a",
)
@o.with_settings()
def fit(
    context: typer.Context,
    data: Annotated[
        MaybeText, Argument(help=f"{', '.join(DATASETS)}, or a table.", autocompletion=_DATA_NAMES)
    ] = None,
    recipe: Annotated[
        MaybeText, Option(help=_METHODS, autocompletion=o.complete([*METHODS, "none"]))
    ] = None,
    option: Annotated[MaybeTexts, Option(help=_OPTION, metavar="<name=value>")] = None,
    out: Annotated[MaybePath, Option(help="A directory; runs/<data>-<number> by default.")] = None,
    resume: Annotated[bool, Option("--resume", help="Continue the run in --out.")] = False,
    force: Annotated[bool, Option("--force", help="Overwrite the run in --out.")] = False,
    json: o.JSON = False,
    config: o.CONFIG = None,
    **settings: Any,
) -> None:
    """Train a model on data and store the run in a directory, or resume an interrupted run."""
    options = _choose_options(settings)
    if resume and out is None:
        raise typer.BadParameter("--resume requires --out, the directory of the run.")
    for name in context.params.keys() - _SETTINGS - _RESUMED if resume else ():
        source = context.get_parameter_source(name)
        if source is not None and source.name != "DEFAULT":
            reason = "The data, the model and the method of the run are fixed."
            raise typer.BadParameter(f"{name} cannot be combined with --resume. {reason}")
    if data is None and not resume:
        raise typer.BadParameter("Expected DATA, but got none. Try `vardrop fit digits`.")
    path = out or free_directory(data or "")
    recipe_options = o.assignments(option or (), "--option to be name=value")
    if recipe is None and recipe_options:
        raise typer.BadParameter("--option requires --recipe.")
    with o.usage():
        chosen_recipe = "auto" if recipe is None else method_named(recipe, recipe_options)
    typed = f"vardrop fit --resume --out {shlex.quote(str(path))}"
    with _on_interrupt(f"Resume with `{typed}`.", path):
        options["callback"] = make_callback(context, json)
        if resume:
            run = runs.resume(path, **options)
        else:
            run = runs.fit(data, recipe=chosen_recipe, out=path, force=force, **options)
    printing.run(run, json)


def _choose_options(typed: Mapping[str, Any]) -> dict[str, Any]:
    """The options that were passed. Wrong settings or a wrong model are errors of usage."""
    options = {name: chosen for name, chosen in typed.items() if chosen is not None}
    with o.usage():
        chosen = Settings.from_json({k: options[k] for k in options if k in _SETTINGS})
        resolve_device(chosen.device)
        if "net" in options:
            check_net_name(options["net"])
    if "data_dir" in options:
        options["directory"] = options.pop("data_dir")
    return options


@contextmanager
def _on_interrupt(text: str, run: Path | None = None) -> Iterator[None]:
    """Print how to resume what was interrupted; a run can be resumed once it has its config."""
    try:
        yield
    except KeyboardInterrupt:
        begun = run is None or (run / "config.json").is_file()
        raise VardropError(f"stopped. {text}" if begun else "stopped before it began.") from None


def make_callback(context: typer.Context, json: bool) -> run_callbacks.RunCallback:
    """JSON lines with --json, else text and a progress bar. Other processes print nothing."""
    if os.environ.get("RANK", "0") != "0" or context.obj:  # --quiet
        return run_callbacks.RunCallback()
    if json:
        return run_callbacks.JsonLines()
    return run_callbacks.TextBar() if sys.stderr.isatty() else run_callbacks.TextLines()


def _load(path: Path, directory: Path | None = None) -> runs.Run:
    """A run. If its training was interrupted, one line on stderr reports that."""
    run = load_run(path, directory=directory)
    if run.standing:
        print(f"vardrop: {printable(run.standing)}", file=sys.stderr)
    return run


@command("vardrop predict runs/h new.csv --out predictions.csv")
def predict(
    run: o.RUN,
    table: Annotated[Path, Argument(help="A CSV or Parquet file; images as .npy.")],
    out: Annotated[Path, Option(help="The CSV file to write.")],
    samples: o.SAMPLES = 100,
) -> None:
    """Predict new rows: mean, interval, aleatoric and epistemic uncertainty."""
    runs.write_predictions(_load(run), table, out, samples)
    printing.print_line(f"{out} written")


@command(
    "vardrop evaluate runs/a --ood fashion-mnist",
    "vardrop evaluate runs/h --data new.csv --predictions answers.csv",
)
def evaluate(
    run: o.RUN,
    data: Annotated[MaybePath, Option(help="Score this file instead of the test data.")] = None,
    predictions: Annotated[MaybePath, Option(help="A CSV file for predictions of --data.")] = None,
    ood: Annotated[
        MaybeTexts, Option(help=_OOD, autocompletion=o.complete(OUT_OF_DISTRIBUTION))
    ] = None,
    data_dir: o.DATA_DIR = None,
    samples: o.SAMPLES = 32,
    json: o.JSON = False,
) -> None:
    """Score a run on test data or on new examples, and its out-of-distribution detection."""
    if ood and data is not None:
        raise typer.BadParameter("--data cannot be combined with --ood.")
    if predictions is not None and data is None:
        raise typer.BadParameter("--predictions requires --data.")
    loaded = _load(run, directory=data_dir)
    if data is not None:
        printing.rows(loaded, runs.evaluate_rows(loaded, data, samples, predictions), json)
    else:
        runs.evaluate(loaded, ood or (), samples)
        printing.run(loaded, json)


@command(
    "vardrop compress runs/a --max-drop 0.002 --onnx small.onnx",
    "vardrop compress runs/a --macs 0.5",
)
def compress(
    run: o.RUN,
    max_drop: Annotated[Fraction, Option(help=_DROP)] = None,
    sparsity: Annotated[Fraction, Option(help="Remove this fraction of the weights.")] = None,
    macs: Annotated[Fraction, Option(help="Train to this fraction of the multiplications.")] = None,
    latency: Annotated[Fraction, Option(help="Train to this fraction of the torch time.")] = None,
    bytes: Annotated[Fraction, Option(help="Train to this fraction of the bytes instead.")] = None,
    onnx: Annotated[MaybePath, Option(help="Also write the small model as ONNX.")] = None,
    json: o.JSON = False,
) -> None:
    """Remove weights that validation data does not need, or train to a budget of MACs."""
    fractions = {"macs": macs, "latency": latency, "bytes": bytes}
    budgets = {"max-drop": max_drop, "sparsity": sparsity, **fractions}
    names = [f"--{name}" for name, budget in budgets.items() if budget is not None]
    if len(names) > 1:
        raise typer.BadParameter(f"{names[0]} cannot be combined with {names[1]}.")
    loaded = _load(run)
    if any(fraction is not None for fraction in fractions.values()):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # they are repeated in the report's notes
            slimmed = runs.slim_run(loaded, onnx=onnx, **fractions)
        printing.compression(loaded, slimmed, json)
    else:
        _, plan = runs.compress(loaded, max_drop, sparsity, onnx)
        printing.compression(loaded, plan, json)


@command(
    "vardrop export runs/h --onnx model.onnx",
    "vardrop export runs/a --onnx model.onnx --mode moments --outputs probs,epistemic",
)
def export(
    run: o.RUN,
    onnx: Annotated[Path, Option(help="The file to write.")],
    samples: Annotated[int, Option(min=0, help="Functions; 0 for the means of the weights.")] = 32,
    mode: Annotated[Serving, Option(help=_SERVING)] = "functions",
    outputs: Annotated[MaybeText, Option(help="Such as probs,epistemic; all by default.")] = None,
) -> None:
    """Write a run as one ONNX file that takes raw rows and predicts in units of the target."""
    size = runs.export_run(_load(run), onnx, samples, mode=mode, outputs=o.split_names(outputs))
    printing.print_line(f"{onnx} written, {size:,} bytes")


@command(
    "vardrop compare runs/a runs/b runs/c",
    "vardrop compare iris --recipes none,l0,sparse_vd --seeds 5 --out runs/iris-methods",
)
@o.with_settings("seed", "compare")
def compare(
    context: typer.Context,
    compared: Annotated[
        MaybeTexts, Argument(help=_COMPARED, metavar="RUNS...|DATA", autocompletion=_DATA_NAMES)
    ] = None,
    recipes: Annotated[MaybeText, Option(help="Fit these on DATA, such as none,l0.")] = None,
    seeds: Annotated[int, Option(help="With --recipes: how many seeds.", min=1)] = 5,
    scores: Annotated[MaybeText, Option(help="Such as auroc,nll; main ones by default.")] = None,
    out: Annotated[MaybePath, Option(help=_COMPARISON)] = None,
    json: o.JSON = False,
    config: o.CONFIG = None,
    **settings: Any,
) -> None:
    """Compare runs on the same data, or methods fitted with several seeds."""
    typed = [name.replace("_", "-") for name, chosen in settings.items() if chosen is not None]
    names, wanted = o.split_names(recipes), o.split_names(scores)
    if names is None and (typed or len(compared or ()) < 2):
        first = f" --{typed[0]} requires --recipes." if typed else ""
        raise typer.BadParameter(f"Expected two or more runs, or data and --recipes.{first}")
    if names is None:
        comparison = vardrop.compare_runs(compared or ())
        with o.usage():
            comparison.select(wanted)
    else:
        if compared is None or len(compared) != 1:
            sets = ", ".join(compared or ["none"])
            raise typer.BadParameter(f"Expected one data set with --recipes, but got {sets}.")
        with o.usage():
            check_scores(wanted or ())
            for name in set(names) - {"auto"}:
                method_named(name)
        options = _choose_options(settings)
        out = out or free_directory(f"{Path(compared[0]).stem}-comparison")
        options["callback"] = make_callback(context, json)
        same = f"Run the same command with --out {shlex.quote(str(out))} to resume."
        with _on_interrupt(same):
            comparison = runs.compare_methods(compared[0], names, seeds, out=out, **options)
    if out is not None:
        comparison.write(out, wanted)
    printing.comparison(comparison, wanted, out, json)


@command("vardrop report runs/a runs/b --out both.html")
def report(
    runs: Annotated[list[Path], Argument(help="The directories of one or more runs.")],
    out: Annotated[MaybePath, Option(help="A file; report.html in the run by default.")] = None,
) -> None:
    """Write one self-contained HTML file about one run or several."""
    from vardrop.app.report import report as write

    printing.print_line(str(write(runs, out)))


@command(
    "vardrop reproduce --list",
    "vardrop reproduce kingma/kl",
    "vardrop reproduce gal/toy --quick",
    "vardrop reproduce --quick",
    "vardrop reproduce --page",
)
def reproduce(
    name: Annotated[MaybeText, Argument(help="A name from --list.")] = None,
    quick: Annotated[bool, Option("--quick", help="Minutes instead of hours.")] = False,
    list_: Annotated[bool, Option("--list", help="Show the experiments and their state.")] = False,
    page: Annotated[bool, Option("--page", help="Write docs/results.md and its plots.")] = False,
    results: Annotated[MaybePath, Option(help="A directory; results/ by default.")] = None,
    force: Annotated[bool, Option("--force", help="Start again, without finished seeds.")] = False,
) -> None:
    """Run an experiment of the papers in a clone. An interrupted one is resumed."""
    if (name is not None or quick) + list_ + page != 1:
        raise typer.BadParameter(
            "Expected a name, --quick, --list or --page. Try `vardrop reproduce --list`."
        )
    directory, experiments = import_experiments()
    stored = results or directory.parent / "results"
    if list_:
        experiments.show(directory, stored)
    elif page:
        experiments.page(directory, stored, directory.parent / "docs")
    elif quick:
        raise typer.Exit(experiments.quick(directory, name, results, force))
    else:
        with _on_interrupt("The same command continues from the last checkpoint."):
            experiments.run(directory, name, stored, force)


def import_experiments(clone: Path = _CLONE) -> tuple[Path, ModuleType]:
    """The directory of descriptions, ./experiments or that of a clone, and the module to run them.

    Args:
        clone: the experiments of the clone that holds this package.
    """
    here = Path("experiments")
    code = next((path for path in (here, clone) if (path / "command.py").is_file()), None)
    if code is None:
        searched = dict.fromkeys(str(path.resolve().parent) for path in (here, clone))
        raise VardropError(
            f"File not found: experiments/command.py in {' or '.join(searched)}. The installed "
            "package has no experiments. Run `vardrop reproduce` in a clone of the repository."
        )
    if (root := str(code.resolve().parent)) not in sys.path:
        sys.path.insert(0, root)
    directory = here if any(here.glob("*/*.toml")) else code
    return directory, import_module("experiments.command")
