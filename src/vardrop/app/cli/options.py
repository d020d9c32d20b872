"""The options of the command line: their names, help and completion."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import typer
from typer import Argument, Option

import vardrop
from vardrop._core.errors import VardropError
from vardrop.app.cli.config_file import read_config
from vardrop.app.data import DATASETS, OUT_OF_DISTRIBUTION, Roles
from vardrop.app.runs import METHODS, NETS, Settings
from vardrop.app.runs.compress import MAX_DROPS
from vardrop.app.runs.settings import FEW

Command = TypeVar("Command", bound=Callable[..., None])


def _begin_with(names: Iterable[str]) -> Callable[[str], list[str]]:
    return lambda incomplete: [name for name in names if name.startswith(incomplete)]


def _print_version(asked: bool) -> None:
    if asked:
        print(f"vardrop {vardrop.__version__}")
        raise typer.Exit


MaybePath = Path | None
MaybeText = str | None
MaybeTexts = list[str] | None
Fraction = float | None
_NETS = f"{', '.join(NETS)}; mlp by default, mlp50 for a table of fewer than {FEW} rows."
_METHODS = """A name from `vardrop methods`, or none for the plain model; by default
bayes_by_backprop with a learned prior for tables, sparse_vd for images."""
_DROP = f"""Largest loss on validation data: of accuracy ({MAX_DROPS["accuracy"]} by default), or as
a fraction of the RMSE ({MAX_DROPS["rmse"]} by default)."""
_OOD = f"An out-of-distribution image set: {', '.join(OUT_OF_DISTRIBUTION)}; may be repeated."
_SERVING = "Functions drawn in advance, one pass of mean and variance, or draws by the runtime."
_COMPARISON = "A directory for the table and picture, and with --methods for the runs."
_IMPORT = "Import a module that registers data sets or methods; may be repeated."
_CONFIG = "A TOML file with options, such as epochs = 20; typed options win."
_ON_DATA = _begin_with(DATASETS)
_ON_NETS = _begin_with(NETS)
_ON_METHODS = _begin_with([*METHODS, "none"])
_ON_OOD = _begin_with(OUT_OF_DISTRIBUTION)

DATA = Annotated[
    MaybeText, Argument(help=f"{', '.join(DATASETS)}, or a table.", autocompletion=_ON_DATA)
]
RUN = Annotated[Path, Argument(help="The directory of a run.")]
RUNS = Annotated[list[Path], Argument(help="The directories of one or more runs.")]
NET = Annotated[MaybeText, Option(help=_NETS, autocompletion=_ON_NETS)]
METHOD = Annotated[MaybeText, Option(help=_METHODS, autocompletion=_ON_METHODS)]
OPTION = Annotated[MaybeTexts, Option(help="Such as drop_rate=0.2, for the method; repeatable.")]
OUT = Annotated[MaybePath, Option(help="The directory; runs/<data>-<number> by default.")]
VALIDATION = Annotated[MaybePath, Option(help="A file for validation, with the columns of DATA.")]
TEST = Annotated[MaybePath, Option(help="A file for the test, with the columns of DATA.")]
DATA_DIR = Annotated[MaybePath, Option(help="Where image sets are; VARDROP_DATA by default.")]
WHERE = Annotated[MaybeText, Option(help="Make only layers of this name noisy (a glob).")]
EXCLUDE = Annotated[MaybeText, Option(help="Leave layers of this name plain (a glob).")]
RESUME = Annotated[bool, Option("--resume", help="Continue the run in --out.")]
FORCE = Annotated[bool, Option("--force", help="Overwrite the run in --out.")]
JSON = Annotated[bool, Option("--json", help="Print JSON lines.")]
TENSORBOARD = Annotated[bool, Option("--tensorboard", help="Log for TensorBoard in the run.")]
CONFIG = Annotated[MaybePath, Option(help=_CONFIG, callback=read_config, is_eager=True)]
VERSION = Annotated[
    bool, Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
]
QUIET = Annotated[bool, Option("--quiet", help="Print only errors; with --json only the result.")]
IMPORT = Annotated[MaybeTexts, Option("--import", help=_IMPORT, metavar="MODULE")]
DEBUG = Annotated[bool, Option("--debug", help="Show the traceback of an error.")]
SAMPLES = Annotated[int, Option(help="Draws of the noise.", min=1)]
OOD = Annotated[MaybeTexts, Option(help=_OOD, autocompletion=_ON_OOD)]
NEW_ROWS = Annotated[MaybePath, Option("--data", help="Score this file instead of the test data.")]
NEW_PREDICTIONS = Annotated[MaybePath, Option(help="With --data: write predictions to this CSV.")]
DEMO_OUT = Annotated[MaybePath, Option(help="A directory; runs/demo-<number> by default.")]
TABLE = Annotated[Path, Argument(help="A CSV or Parquet file; images as .npy.")]
PREDICTIONS = Annotated[Path, Option(help="The CSV file to write.")]
MAX_DROP = Annotated[Fraction, Option(help=_DROP)]
SPARSITY = Annotated[Fraction, Option(help="Remove this fraction of the weights instead.")]
MACS = Annotated[Fraction, Option(help="Train to this fraction of the multiplications instead.")]
LATENCY = Annotated[Fraction, Option(help="Train to this fraction of the time in torch instead.")]
BYTES = Annotated[Fraction, Option(help="Train to this fraction of the bytes instead.")]
FUNCTIONS = Annotated[
    int, Option("--samples", min=0, help="Functions in the file; 0 for the means of the weights.")
]
SERVING = Annotated[Literal["functions", "moments", "sample"], Option(help=_SERVING)]
OUTPUTS = Annotated[MaybeText, Option(help="Such as probs,epistemic; all outputs by default.")]
MODEL = Annotated[Path, Option("--onnx", help="The file to write.")]
ONNX = Annotated[MaybePath, Option(help="Also write the small model as ONNX.")]
COMPARED = Annotated[
    MaybeTexts,
    Argument(
        help="The directories of two or more runs; with --methods, the data.",
        metavar="RUNS...|DATA",
        autocompletion=_ON_DATA,
    ),
]
METHODS_ = Annotated[MaybeText, Option("--methods", help="Fit these on DATA, such as none,l0.")]
SEEDS = Annotated[int, Option(help="With --methods: the number of seeds, from 0 on.", min=1)]
SCORES = Annotated[MaybeText, Option(help="Such as auroc,nll; the most important by default.")]
COMPARISON_OUT = Annotated[MaybePath, Option(help=_COMPARISON)]
REPORT_OUT = Annotated[MaybePath, Option(help="The file; report.html in the first run by default.")]
EXPERIMENT = Annotated[MaybeText, Argument(help="A name from --list.")]
QUICK = Annotated[bool, Option("--quick", help="The version of minutes: of NAME, or of all.")]
LIST = Annotated[bool, Option("--list", help="Show the experiments and what is done.")]
PAGE = Annotated[bool, Option("--page", help="Write results.md and its plots into --docs.")]
EXPERIMENTS = Annotated[MaybePath, Option(help="Descriptions; experiments/ of the clone if unset.")]
RESULTS = Annotated[
    MaybePath, Option(help="Results; results/ of the clone by default, nowhere with --quick.")
]
DOCS = Annotated[MaybePath, Option(help="Where --page writes; docs/ of the clone by default.")]
RESTART = Annotated[bool, Option("--force", help="Start again, without finished seeds.")]


def with_settings(*without: str) -> Callable[[Command], Command]:
    """Give a command that takes `**more` one option per field of `Roles` and `Settings`.

    Names, types, defaults and help are those of the fields; an option that is not given is None.
    Fields in `without` get none.
    """

    def decorate(command: Command) -> Command:
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
        signature = inspect.signature(command, eval_str=True)
        others = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        command.__signature__ = signature.replace(parameters=[*others, *settings])  # type: ignore[attr-defined]
        return command

    return decorate


def _arguments(described: type) -> dict[str, str]:
    """The texts under `Args` of a docstring, by name."""
    text = (inspect.getdoc(described) or "").partition("Args:\n")[2].partition("\n\n")[0]
    found = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", text, re.MULTILINE)
    return {name: " ".join(words.split()) for name, words in found}


def _option(field: dataclasses.Field[Any], kind: Any, text: str) -> Any:
    """The option for a field of this type."""
    by_class = any(get_origin(part) is dict for part in get_args(kind))
    if isinstance(kind, UnionType):  # with None, for an option that is not given
        kind = get_args(kind)[0]
    default, word = field.default, field.name.replace("_", "-")
    usual = f"{default:g}" if isinstance(default, float) else "on" if default is True else default
    end = "." if default is None or default is False or default == () else f"; {usual} by default."
    name, text = f"--{word}", text[0].upper() + text[1:].rstrip(".") + end
    more: dict[str, Any] = {}
    if default is True:
        name += f"/--no-{word}"
    if by_class:
        kind, more = str, {"parser": _weights, "metavar": "<balanced|a=1,b=10>"}
    elif get_origin(kind) is Literal:
        kind, more = str, {"autocompletion": _begin_with(get_args(kind))}
    elif get_origin(kind) is tuple and get_args(kind)[-1] is Ellipsis:
        kind, text = list[str], f"{text} May be repeated."
    elif get_origin(kind) is tuple:
        kind, more = str, {"parser": _pair, "metavar": "<start,end>"}
    return Annotated[kind | None, Option(name, help=text, **more)]


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
    """Report errors inside as wrong options."""
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


def split_names(text: str | None) -> list[str] | None:
    """Names with commas between them; None if nothing was typed."""
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]
