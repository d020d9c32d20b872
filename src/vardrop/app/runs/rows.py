"""Score a run on rows that it has never seen: a new file, a DataFrame, arrays."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from vardrop.app.runs.config import check_output
from vardrop.app.runs.evaluate import in_units, known_targets, score_prediction
from vardrop.app.runs.predict import named_rows, prediction_table
from vardrop.app.runs.run import SAMPLES, Run
from vardrop.app.data import Preprocessing
from vardrop.app.data.datasets import row_weights
from vardrop.app.data.inputs import KINDS, Table, frame_of, read_input
from vardrop._core.errors import VardropError
from vardrop._core.files import write_atomically

if TYPE_CHECKING:
    import pandas


class _Rows(NamedTuple):
    """Rows with a target, as they were given, and what is to be said of them."""

    frame: pandas.DataFrame
    name: str
    notes: list[str]


def evaluate_rows(
    run: Run, data: Any, samples: int = SAMPLES, predictions: str | Path | None = None
) -> dict[str, Any]:
    """Score a run on rows of a new table, prepared as those of its training were.

    The run stays as it is. What the rows have that the training had not is told: new categories,
    missing values in columns that had none. Rows without a target are left out.

    Args:
        run: a trained run on a table.
        data: a CSV or Parquet file or a DataFrame, with the target; or a pair (X, y), where X may
            be an array with the columns of the training in their order.
        samples: draws of the noise.
        predictions: also write the predictions as CSV to this file, with the column that names the
            rows, where the run has one, and with the target.

    Returns:
        `metrics`, `by_class`, `confusion`, `baseline` and `notes`, as in `evaluate`; `data`, its
        name, and `rows`, how many were scored. Where the run has a column of weights, rows count
        by it.

    >>> import tempfile, vardrop as vd
    >>> from sklearn.datasets import load_iris
    >>> table = load_iris(as_frame=True).frame
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = vd.fit(table[::2], target="target", out=folder, epochs=2, folds=1)
    ...     found = evaluate_rows(run, table[1::2])
    >>> found["rows"], list(found["metrics"])[:3]
    (75, ['accuracy', 'balanced_accuracy', 'auroc'])
    """
    if run.about.preprocessing is None:
        raise VardropError(
            f"Expected a run on a table for new rows, but {run.directory} is one on images. Score "
            "it on test data, or predict an .npy file."
        )
    if predictions is not None:
        sources = [data] if isinstance(data, str | Path) else []
        check_output(Path(predictions), run.directory, run.config.data.name, *sources)
    rows = _with_target(run, data, run.about.preprocessing)
    x = run.about.preprocessing.inputs(rows.frame, rows.name)
    target = rows.frame[run.about.preprocessing.target]
    y = in_units(run, run.about.preprocessing.targets(target, rows.name))
    weight = _weight(run, rows)
    p = run.predict(x, samples)
    found = score_prediction(run, p, y, weight, known_targets(run))
    found["notes"] = [*rows.notes, *found["notes"]]
    if predictions is not None:
        table = prediction_table(run, p)
        for column in (target.name, run.config.data.roles.id):
            if column is not None:
                table.insert(0, column, named_rows(rows.frame, column, rows.name), True)
        write_atomically(Path(predictions), table.to_csv(index=False).encode())
    return {"data": rows.name, "rows": len(y), **found}


def _with_target(run: Run, data: Any, known: Preprocessing) -> _Rows:
    frame, name, checksum = _frame(run, data, known)
    if known.target not in frame.columns:
        raise VardropError(
            f"Expected {name} to have the target column '{known.target}' to score by, but it has "
            f"{', '.join(map(repr, frame.columns))}. Rows without a target can be predicted."
        )
    there = frame[known.target].notna()
    if not bool(there.any()):
        raise VardropError(
            f"Expected values in the target column '{known.target}' of {name}, but got none. Rows "
            "without a target can be predicted."
        )
    notes = []
    if checksum == run.about.checksum:
        notes.append(
            f"{name} is what the run was trained on: these scores say nothing of new rows."
        )
    if absent := int((~there).sum()):
        notes.append(f"{absent} rows without a value of '{known.target}' were left out.")
    kept = frame[there]
    missing = {column.name for column in known.columns} - set(kept.columns)
    return _Rows(kept, name, notes if missing else [*notes, *known.unseen(kept)])


def _frame(run: Run, data: Any, known: Preprocessing) -> tuple[pandas.DataFrame, str, str]:
    """A table with its name and checksum; arrays get the names of the training's columns."""
    names = [column.name for column in known.columns]
    if isinstance(data, tuple | list) and len(data) == 2 and not hasattr(data[0], "columns"):
        data = frame_of(data[0].cpu() if isinstance(data[0], Tensor) else data[0], names), data[1]
    roles = replace(run.config.data.roles, target=known.target)
    found = read_input(data, roles, known.text_columns)
    if not isinstance(found, Table):
        raise VardropError(f"Expected rows of a table: {KINDS}; but got inputs of other shapes.")
    return found.rows, found.name, found.checksum


def _weight(run: Run, rows: _Rows) -> Tensor | None:
    column = run.config.data.roles.weight
    if column is None:
        return None
    if column not in rows.frame.columns:
        rows.notes.append(f"{rows.name} has no column '{column}' of weights: each row counts once.")
        return None
    return row_weights(rows.frame[column], rows.name)
