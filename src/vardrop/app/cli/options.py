"""The options of the command line: their names, help and completion."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import typer

import vardrop
from vardrop._core.errors import VardropError
from vardrop.app.cli.config_file import configured
from vardrop.app.data import DATASETS, OUT_OF_DISTRIBUTION, Roles
from vardrop.app.runs import METHODS, NETS, Settings
from vardrop.app.runs.compress import MAX_DROPS
from vardrop.app.runs.settings import FEW

Command = TypeVar("Command", bound=Callable[..., None])


def _begin_with(names: Iterable[str]) -> Callable[[str], list[str]]:
    return lambda incomplete: [name for name in names if name.startswith(incomplete)]


def _version(asked: bool) -> None:
    if asked:
        print(f"vardrop {vardrop.__version__}")
        raise typer.Exit


DATA = Annotated[
    str | None,
    typer.Argument(
        help=f"{', '.join(DATASETS)}, or a CSV or Parquet file.",
        autocompletion=_begin_with(DATASETS),
    ),
]
RUN = Annotated[Path, typer.Argument(help="The directory of a run.")]
RUNS = Annotated[list[Path], typer.Argument(help="The directories of one or more runs.")]
NET = Annotated[
    str | None,
    typer.Option(
        help=f"{', '.join(NETS)}; mlp by default, and mlp50 for a table below {FEW} rows.",
        autocompletion=_begin_with(NETS),
    ),
]
METHOD = Annotated[
    str | None,
    typer.Option(
        help="A name from `vardrop methods`, or none for the plain net; by default "
        "bayes_by_backprop with a prior whose scale is learned for tables, sparse_vd for images.",
        autocompletion=_begin_with([*METHODS, "none"]),
    ),
]
OPTION = Annotated[
    list[str] | None,
    typer.Option(help="An option of the method, such as drop_rate=0.2; may be repeated."),
]
OUT = Annotated[
    Path | None, typer.Option(help="The directory of the run; runs/<data>-<number> by default.")
]
VALIDATION = Annotated[
    Path | None, typer.Option(help="A file of your own for validation, like that of DATA.")
]
TEST = Annotated[Path | None, typer.Option(help="A file of your own for the test, likewise.")]
DATA_DIR = Annotated[
    Path | None,
    typer.Option(help="Where the image sets lie; VARDROP_DATA by default, else a download."),
]
WHERE = Annotated[str | None, typer.Option(help="Make only layers of this name noisy (a glob).")]
EXCLUDE = Annotated[str | None, typer.Option(help="Leave layers of this name plain (a glob).")]
RESUME = Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")]
FORCE = Annotated[bool, typer.Option("--force", help="Overwrite the run in --out.")]
JSON = Annotated[bool, typer.Option("--json", help="Print JSON lines, for machines.")]
TENSORBOARD = Annotated[
    bool, typer.Option("--tensorboard", help="Log for TensorBoard into the run's directory.")
]
CONFIG = Annotated[
    Path | None,
    typer.Option(
        help="A TOML file with options, such as epochs = 20; those that are typed win.",
        callback=configured,
        is_eager=True,
    ),
]
VERSION = Annotated[
    bool,
    typer.Option("--version", help="Print the version.", callback=_version, is_eager=True),
]
QUIET = Annotated[
    bool,
    typer.Option("--quiet", help="Print nothing but errors; with --json the result alone."),
]
IMPORT = Annotated[
    list[str] | None,
    typer.Option(
        "--import",
        help="Import a module of your own first, with the data sets and methods that it registers; "
        "may be repeated.",
        metavar="MODULE",
    ),
]
DEBUG = Annotated[bool, typer.Option("--debug", help="Show a traceback for an error.")]
SAMPLES = Annotated[int, typer.Option(help="Draws of the noise.", min=1)]
OOD = Annotated[
    list[str] | None,
    typer.Option(
        help=f"An image set to tell apart: {', '.join(OUT_OF_DISTRIBUTION)}; may be repeated.",
        autocompletion=_begin_with(OUT_OF_DISTRIBUTION),
    ),
]
NEW_ROWS = Annotated[
    Path | None,
    typer.Option("--data", help="Score new rows of this file in the place of the test data."),
]
NEW_PREDICTIONS = Annotated[
    Path | None, typer.Option(help="With --data: write the predictions to this CSV file.")
]
DEMO_OUT = Annotated[Path | None, typer.Option(help="A directory; runs/demo-<number> by default.")]
TABLE = Annotated[Path, typer.Argument(help="A CSV or Parquet file; images as .npy.")]
PREDICTIONS = Annotated[Path, typer.Option(help="The CSV file to write.")]
MAX_DROP = Annotated[
    float | None,
    typer.Option(
        help=f"What may be lost on validation data: accuracy ({MAX_DROPS['accuracy']} by default), "
        f"or the fraction by which the RMSE may grow ({MAX_DROPS['rmse']} by default)."
    ),
]
SPARSITY = Annotated[float | None, typer.Option(help="The fraction of weights to drop, instead.")]
MACS = Annotated[
    float | None,
    typer.Option(help="Train to this fraction of the multiplications instead, such as 0.5."),
]
LATENCY = Annotated[
    float | None, typer.Option(help="Train to this fraction of the time in torch, instead.")
]
BYTES = Annotated[float | None, typer.Option(help="Train to this fraction of the bytes, instead.")]
FUNCTIONS = Annotated[
    int,
    typer.Option(
        "--samples", min=0, help="Functions drawn into the file; 0 for the means of the weights."
    ),
]
SERVING = Annotated[
    Literal["functions", "moments", "sample"],
    typer.Option(
        help="Functions in the file; one pass that carries mean and variance; or draws by the "
        "runtime."
    ),
]
OUTPUTS = Annotated[
    str | None, typer.Option(help="What it answers with, such as probs,epistemic; all by default.")
]
MODEL = Annotated[
    Path, typer.Option("--onnx", help="The file to write: raw rows in, answers with doubt out.")
]
ONNX = Annotated[Path | None, typer.Option(help="Also write the small net as ONNX.")]
THINGS = Annotated[
    list[str] | None,
    typer.Argument(
        help="The directories of two or more runs; or, with --methods, the data.",
        metavar="RUNS...|DATA",
        autocompletion=_begin_with(DATASETS),
    ),
]
METHODS_ = Annotated[
    str | None,
    typer.Option("--methods", help="Fit these methods on DATA, such as none,l0,sparse_vd."),
]
SEEDS = Annotated[int, typer.Option(help="With --methods: how many seeds each, from 0 on.", min=1)]
SCORES = Annotated[
    str | None,
    typer.Option(help="The scores to show, such as auroc,nll; those to be read first by default."),
]
COMPARISON_OUT = Annotated[
    Path | None,
    typer.Option(
        help="A directory for comparison.json and comparison.png, and with --methods for the runs: "
        "the same command goes on with what is there."
    ),
]
REPORT_OUT = Annotated[
    Path | None, typer.Option(help="The HTML file; report.html in the first run by default.")
]
EXPERIMENT = Annotated[
    str | None,
    typer.Argument(help="A name from --list; `quick` for the minutes-long version of all."),
]
QUICK_NAME = Annotated[str | None, typer.Argument(help="After `quick`: the one experiment to run.")]
LIST = Annotated[bool, typer.Option("--list", help="Show the experiments and what is done.")]
PAGE = Annotated[bool, typer.Option("--page", help="Write results.md and its plots into --docs.")]
EXPERIMENTS = Annotated[
    Path | None,
    typer.Option(help="Where the descriptions lie; experiments/ of the clone by default."),
]
RESULTS = Annotated[
    Path | None,
    typer.Option(help="Where the results go; results/ of the clone by default, for quick nowhere."),
]
DOCS = Annotated[
    Path | None, typer.Option(help="Where --page writes; docs/ of the clone by default.")
]
ANEW = Annotated[bool, typer.Option("--force", help="Start anew, without the seeds that are done.")]


def with_settings(*without: str) -> Callable[[Command], Command]:
    """Give a command that takes `**more` one option per field of `Roles` and `Settings`.

    Names, types and defaults are those of the fields, the help is that of the docstring; what is
    not given is None. Fields in `without` get none.
    """
    return lambda command: _with_settings(command, without)


def _with_settings(command: Command, without: Sequence[str]) -> Command:
    settings = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=_option(field, types[field.name], helps[field.name]),
        )
        for value in (Roles, Settings)
        for helps, types in [(_arguments(value), get_type_hints(value))]
        for field in dataclasses.fields(value)
        if field.name not in without
    ]
    own = inspect.signature(command, eval_str=True)
    others = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
    command.__signature__ = own.replace(parameters=[*others, *settings])  # type: ignore[attr-defined]
    return command


def _arguments(described: type) -> dict[str, str]:
    """What a docstring says under `Args`, by name."""
    text = (inspect.getdoc(described) or "").partition("Args:\n")[2].partition("\n\n")[0]
    found = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", text, re.MULTILINE)
    return {name: " ".join(words.split()) for name, words in found}


def _option(field: dataclasses.Field[Any], kind: Any, text: str) -> Any:
    """The option for a field of this type."""
    weighs = any(get_origin(part) is dict for part in get_args(kind))
    if isinstance(kind, UnionType):  # with None, which is an option that is not given
        kind = get_args(kind)[0]
    none = field.default is None or field.default is False or field.default == ()
    usual = "" if none else field.default
    shown = f"{usual:g}" if isinstance(usual, float) else "on" if usual is True else str(usual)
    word = field.name.replace("_", "-")
    name = f"--{word}/--no-{word}" if field.default is True else f"--{word}"
    told = text[0].upper() + text[1:].rstrip(".") + (f"; {shown} by default." if shown else ".")
    if weighs:
        option = typer.Option(name, help=told, parser=_weights, metavar="<balanced|a=1,b=10>")
        return Annotated[str | None, option]
    if get_origin(kind) is Literal:
        words = _begin_with(get_args(kind))
        return Annotated[str | None, typer.Option(name, help=told, autocompletion=words)]
    if get_origin(kind) is tuple and get_args(kind)[-1] is Ellipsis:
        return Annotated[list[str] | None, typer.Option(name, help=f"{told} May be repeated.")]
    if get_origin(kind) is tuple:
        option = typer.Option(name, help=told, parser=_pair, metavar="<start,end>")
        return Annotated[str | None, option]
    return Annotated[kind | None, typer.Option(name, help=told)]


def _pair(text: str) -> tuple[float, float]:
    """Two numbers with a comma between them."""
    try:
        first, second = (float(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"Expected two numbers such as 5,20, but got {text!r}.") from None
    return first, second


def _weights(text: str) -> Literal["balanced"] | dict[str, float]:
    """A word, or numbers by class."""
    if text == "balanced":
        return "balanced"
    try:
        pairs = [part.rpartition("=") for part in text.split(",")]
        found = {name.strip(): float(weight) for name, _, weight in pairs}
        if "" in found:
            raise ValueError
    except ValueError:
        raise typer.BadParameter(
            f"Expected balanced, or weights by class such as no=1,yes=10, but got {text!r}."
        ) from None
    return found


def examples(*lines: str) -> str:
    """The end of a help text: one example per line, to be copied."""
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])


@contextmanager
def usage() -> Iterator[None]:
    """Errors inside are the caller's, who gave an option a value that it cannot have."""
    try:
        yield
    except VardropError as wrong:
        raise typer.BadParameter(str(wrong)) from wrong


def assignments(texts: list[str] | None) -> dict[str, Any]:
    """Options of a method: name=value, where the value is a Python literal or a word."""
    found: dict[str, Any] = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals:
            raise typer.BadParameter(
                f"Expected --option to be name=value, such as drop_rate=0.2, but got {text!r}."
            )
        try:
            found[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            found[name] = value
    return found


def listed(text: str | None) -> list[str] | None:
    """Names with commas between them; None where nothing was typed."""
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]
