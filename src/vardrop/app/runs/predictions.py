"""Predictions of a run as a table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vardrop._core.errors import VardropError, import_optional, report_errors
from vardrop._core.files import open_atomically
from vardrop.app.data.preprocessing import is_number
from vardrop.app.runs.config import check_output
from vardrop.app.runs.run import SAMPLES, Run

if TYPE_CHECKING:
    import pandas

    from vardrop.prediction import Prediction

_LEVEL = 0.95


def prediction_table(run: Run, p: Prediction) -> pandas.DataFrame:
    """A prediction as a table with one row per example.

    Columns for regression: `mean`, the ends of the 95% interval, and the aleatoric and epistemic
    variances. Columns for classification: `class`, its mean `probability`, the 95% interval of the
    probability over the draws, `entropy`, `aleatoric` and `epistemic` in nats, and the mean
    probability of every class. If a spreadsheet would run the name of a class as a formula, it has
    an apostrophe before it.

    Args:
        run: a trained run.
        p: one of its predictions.
    """
    pandas = import_optional("pandas")
    lower, upper = run.interval(p, _LEVEL)
    if not p.classifies:
        parts = {"mean": p.mean, "lower": lower, "upper": upper}
        parts |= {"aleatoric": p.aleatoric, "epistemic": p.epistemic}
        return pandas.DataFrame({name: t.flatten().tolist() for name, t in parts.items()})
    best = p.probs.argmax(1)
    chosen = {"probability": p.probs, "lower": lower, "upper": upper}
    names = [_cell(name) for name in run.about.classes]
    table = {"class": [names[i] for i in best.tolist()]}
    table |= {n: t.gather(1, best.unsqueeze(1)).flatten().tolist() for n, t in chosen.items()}
    for name in ("entropy", "aleatoric", "epistemic"):
        table[name] = getattr(p, name).tolist()
    table |= {f"p_{c}": p.probs[:, i].tolist() for i, c in enumerate(run.about.classes)}
    return pandas.DataFrame(table)


def _cell(name: str) -> str:
    """The name of a class as a cell. A text that a spreadsheet would run as a formula is quoted."""
    formula = name.startswith(("=", "+", "-", "@", "\t", "\r")) and not is_number(name)
    return f"'{name}" if formula else name


def write_predictions(
    run: Run, source: str | Path, out: str | Path, samples: int = SAMPLES
) -> None:
    """Predict the rows of a file and write them as CSV, atomically.

    Args:
        run: a trained run.
        source: a CSV or Parquet file for a run on a table; an .npy array for a run on images.
        out: the CSV file. It cannot be the source or a file of the run.
        samples: draws of the noise.
    """
    check_output(Path(out), run.directory, source, run.config.data.name)
    column, names, done = run.config.data.id, [], 0
    if run.about.preprocessing is None:
        rows = _images(run, Path(source))
    else:
        table = run.read_file(source)
        rows = run.about.preprocessing.inputs(table, str(source))
        names = [] if column is None else row_names(table, column, str(source))
    with open_atomically(Path(out)) as file:
        for p in run.predict_batches(rows, samples):
            table = prediction_table(run, p)
            if names:
                table.insert(0, column, names[done : done + len(table)])
            file.write(table.to_csv(index=False, header=done == 0).encode())
            done += len(table)


def row_names(rows: pandas.DataFrame, column: str, source: str) -> list[object]:
    """The names of the rows in the table."""
    if column not in rows.columns:
        raise VardropError(f"{source} has no column '{column}', which names the rows.")
    return [_cell(v) if isinstance(v, str) else v for v in rows[column]]


def _images(run: Run, path: Path) -> Tensor:
    shape = f"(N, {', '.join(map(str, run.about.shape))})"
    if path.suffix != ".npy" or not path.is_file():
        raise VardropError(f"Expected an .npy file of shape {shape}, but got {str(path)!r}.")
    with report_errors(
        lambda e: f"Expected {path} to hold numbers, but got: {' '.join(str(e).split())[:200]}."
    ):
        loaded = torch.from_numpy(import_optional("numpy").load(path, allow_pickle=False))
    if loaded.is_complex() or len(loaded) == 0 or tuple(loaded.shape[1:]) != run.about.shape:
        text = f"Expected real images of shape {shape} in {path}"
        raise VardropError(f"{text}, but got {loaded.dtype} of shape {tuple(loaded.shape)}.")
    return loaded.float()
