"""The options of the command line: their names, help and completion."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from vardrop.application import METHODS, NETS
from vardrop.data import DATASETS, OUT_OF_DISTRIBUTION
from vardrop.errors import VardropError
from vardrop.training.settings import RATES


def _begin_with(names: Iterable[str]) -> Callable[[str], list[str]]:
    return lambda incomplete: [name for name in names if name.startswith(incomplete)]


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
    typer.Option(help=f"{', '.join(NETS)}; mlp by default.", autocompletion=_begin_with(NETS)),
]
METHOD = Annotated[
    str | None,
    typer.Option(
        help="A name from `vardrop methods`, or none for the plain net; sparse_vd by default.",
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
TARGET = Annotated[str | None, typer.Option(help="The target column of a file.")]
TASK = Annotated[
    str | None, typer.Option(help="classification or regression; inferred by default.")
]
DROP = Annotated[
    list[str] | None, typer.Option(help="A column of a file to leave out; may be repeated.")
]
DATA_DIR = Annotated[
    Path | None,
    typer.Option(help="Where the image sets lie; VARDROP_DATA by default, else a download."),
]
WHERE = Annotated[str | None, typer.Option(help="Make only layers of this name noisy (a glob).")]
EXCLUDE = Annotated[str | None, typer.Option(help="Leave layers of this name plain (a glob).")]
EPOCHS = Annotated[int | None, typer.Option(help="Epochs; 30 by default.")]
BATCH_SIZE = Annotated[int | None, typer.Option(help="Examples a step; 100 by default.")]
LR = Annotated[float | None, typer.Option(help="Learning rate; 0.001 by default.")]
NOISE_LR = Annotated[float | None, typer.Option(help="Learning rate of the noise; as --lr.")]
WEIGHT_DECAY = Annotated[float | None, typer.Option(help="Weight decay; 0 by default.")]
RATE = Annotated[
    str | None,
    typer.Option(
        help=f"The rate over time: {', '.join(RATES)}; late by default.",
        autocompletion=_begin_with(RATES),
    ),
]
WARMUP = Annotated[
    str | None,
    typer.Option(help="Epochs between which the KL weight rises, such as 5,20; 0,0 for none."),
]
BETA = Annotated[float | None, typer.Option(help="The KL weight after the warm-up; 1 by default.")]
STEP_SAMPLES = Annotated[int | None, typer.Option(help="Draws a step; 1 by default.")]
CLIP = Annotated[float | None, typer.Option(help="The largest norm of a gradient.")]
PRETRAIN = Annotated[int | None, typer.Option(help="Epochs of the plain net first.")]
PATIENCE = Annotated[
    int | None, typer.Option(help="Stop after so many epochs without a better validation loss.")
]
PRECISION = Annotated[str | None, typer.Option(help="float32, or bfloat16 for mixed precision.")]
COMPILE = Annotated[bool, typer.Option("--compile", help="Use torch.compile.")]
DEVICE = Annotated[str | None, typer.Option(help="auto, cpu, cuda, ...; auto by default.")]
SEED = Annotated[
    int | None, typer.Option(help="Seed, also of the split; 0 by default, fixed with --resume.")
]
RESUME = Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")]
FORCE = Annotated[bool, typer.Option("--force", help="Overwrite the run in --out.")]
JSON = Annotated[bool, typer.Option("--json", help="Print JSON lines, for machines.")]
TENSORBOARD = Annotated[
    bool, typer.Option("--tensorboard", help="Log for TensorBoard into the run's directory.")
]
SAMPLES = Annotated[int, typer.Option(help="Draws of the noise.", min=1)]
OOD = Annotated[
    list[str] | None,
    typer.Option(
        help=f"An image set to tell apart: {', '.join(OUT_OF_DISTRIBUTION)}; may be repeated.",
        autocompletion=_begin_with(OUT_OF_DISTRIBUTION),
    ),
]
DEMO_OUT = Annotated[Path | None, typer.Option(help="A directory; runs/demo-<number> by default.")]
TABLE = Annotated[Path, typer.Argument(help="A CSV or Parquet file; images as .npy.")]
PREDICTIONS = Annotated[Path, typer.Option(help="The CSV file to write.")]
MAX_DROP = Annotated[
    float | None,
    typer.Option(
        help="What may be lost on validation data: accuracy (0.002 by default), or the share by "
        "which the RMSE may grow (0.01 by default)."
    ),
]
SPARSITY = Annotated[float | None, typer.Option(help="The share of weights to drop, instead.")]
ONNX = Annotated[Path | None, typer.Option(help="Also write the small net as ONNX.")]
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


def examples(*lines: str) -> str:
    """The end of a help text: one example a line, to be copied."""
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])


@contextmanager
def usage() -> Iterator[None]:
    """Errors inside are the caller's, who gave an option a value that it cannot have."""
    try:
        yield
    except VardropError as wrong:
        raise typer.BadParameter(str(wrong)) from wrong


def check_choice(name: str, value: str | None, known: tuple[str, ...]) -> None:
    """Raise unless the value is one of the known ones, or not given."""
    if value is not None and value not in known:
        raise VardropError(f"Expected {name} among {', '.join(known)}, but got {value!r}.")


def pair(text: str | None) -> tuple[float, float] | None:
    """Two numbers with a comma between them."""
    if text is None:
        return None
    try:
        first, second = (float(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(
            f"Expected --warmup to be two numbers such as 5,20, but got {text!r}."
        ) from None
    return first, second


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
