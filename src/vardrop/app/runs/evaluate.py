"""Predictions of a run, and its scores on test data, out-of-distribution images and new rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from vardrop import metrics
from vardrop._core.errors import VardropError, import_optional, report_errors
from vardrop._core.files import open_atomically, write_atomically, write_tensors
from vardrop.app.data.datasets import load_out_of_distribution, row_weights
from vardrop.app.data.inputs import KINDS, Table, frame_of, read_input
from vardrop.app.data.preprocessing import Preprocessing, is_number
from vardrop.app.runs import scores
from vardrop.app.runs.config import check_output, working
from vardrop.app.runs.run import SAMPLES, Run
from vardrop.app.store import Record
from vardrop.layers import Variational

if TYPE_CHECKING:
    import pandas

    from vardrop.app.data.inputs import Source
    from vardrop.prediction import Prediction

_WEIGHED = (
    "The classes were weighted in training: probabilities, NLL, Brier score and calibration error "
    "are valid for data in which the classes have the weighted frequencies."
)
_TRAINED_ON = "is the data that the run was trained on: the scores are not valid for new rows."
_UNTESTED = "There is no test part: the scores are on rows that were held out in turn."


def evaluate(run: Run, ood: Sequence[str] = (), samples: int = SAMPLES) -> Record:
    """Score a run on test data and its out-of-distribution detection, and store the results.

    Args:
        run: a trained run.
        ood: image sets that the model was not trained on; see `load_out_of_distribution`.
        samples: draws of the noise.

    Returns:
        The content of results.json:

        - `metrics`, the most important ones first, and `confusion`
        - `baseline`, the same scores of the mean or of the most frequent class
        - `notes` on the limits of the test rows
        - `ood`, AUROC of out-of-distribution detection
        - `held_out`, the choices on held-out rows, and `against`, differences from baselines there

        A score that is undefined or not finite is None, with the reason in `notes` or `not_finite`.
    """
    with working(run.directory):
        return measure(run, ood, samples)


def measure(run: Run, ood: Sequence[str] = (), samples: int = SAMPLES) -> Record:
    """Evaluate a run in a directory that the caller has locked."""
    parts, choice, arrays = run.data, run.choice, run.arrays()
    content: Record = {
        "ood": {},
        "compression": {},
        **run.results,
        "task": parts.task,
        "known": _summarize_targets(run),
        "held_out": {} if choice is None else choice.to_json(),
        "against": {} if choice is None else choice.against(),
        "layers": [*_layers(run.net)],
        "metrics": {},
        "notes": [_UNTESTED, *_notes(run)],
    }
    if len(parts.test.y):
        p, weight = run.predict(parts.test.x, samples), parts.test.weight
        y = in_units(run, parts.test.y)
        content |= score_prediction(run, p, y, weight, content["known"])
        content["test_rows"] = parts.rows["test"]
        arrays["log_prob"] = p.log_prob(y).double().flatten()
        arrays |= {} if weight is None else {"row_weight": weight}
        if p.classifies:
            arrays |= {"probs": p.probs, "labels": y}
            arrays |= {"entropy_in": p.entropy, "epistemic_in": p.epistemic}
        else:
            lower, upper = run.interval(p, scores.LEVEL)
            arrays |= {"x": parts.test.x, "y": y, "mean": p.mean, "lower": lower, "upper": upper}
        for name in ood:
            images = load_out_of_distribution(name, parts.shape, run.config.data.directory)
            other, areas = run.predict(images, samples), {}
            for kind in ("entropy", "epistemic"):
                inside, outside = getattr(p, kind), getattr(other, kind)
                arrays[f"{kind}_out_{name}"] = outside
                if kind == "entropy" or int(p.samples.max()) > 1:
                    areas[f"auroc_{kind}"] = float(metrics.auroc(inside, outside))
            content["ood"] = {**content["ood"], name: areas}
    elif ood:
        raise VardropError(f"OOD detection needs test rows. {_UNTESTED}")
    write_tensors(run.directory / "arrays.safetensors", arrays)
    run.keep(content)
    return run.results


def _summarize_targets(run: Run) -> Record:
    """Class counts, or mean and standard deviation, of the training targets."""
    rows = run.data.train.join(run.data.validation)
    weight = None if rows.weight is None else rows.weights
    return scores.summarize_targets(in_units(run, rows.y), weight, len(run.about.classes))


def in_units(run: Run, y: Tensor) -> Tensor:
    """Targets in their original units, in double precision; classes unchanged."""
    mean, std = run.config.units
    return y if run.about.task == "classification" else y.double() * std + mean


def score_prediction(
    run: Run, p: Prediction, y: Tensor, weight: Tensor | None, targets: Record
) -> Record:
    """Scores of a prediction, and of the baseline that predicts the same for every row."""
    both = p, scores.baseline_prediction(targets, len(y))
    # With log-probabilities, because a probability rounded to zero makes the NLL infinite.
    if p.classifies:
        counts = torch.tensor(targets["counts"]).double()
        rest = y, run.about.classes, counts / counts.sum(), weight
        scored, simple = (scores.class_scores(q.probs, q.log_prob(y), *rest) for q in both)
        scored.notes.extend(_notes(run))
    else:
        ends = run.interval(p, scores.LEVEL), both[1].interval(scores.LEVEL)
        scored, simple = (
            scores.number_scores(q.mean, q.std, q.log_prob(y), y, interval, weight)
            for q, interval in zip(both, ends, strict=True)
        )
    name = "majority" if p.classifies else "mean"
    return {**dataclasses.asdict(scored), "baseline": {"name": name, **simple.metrics}}


def _notes(run: Run) -> list[str]:
    """A note if class weights change the meaning of probabilities."""
    return [] if run.config.settings.class_weight is None else [_WEIGHED]


def _layers(net: nn.Module) -> Iterator[Record]:
    """Name, type and number of weights of each layer, without biases."""
    for name, module in net.named_modules():
        names = module.weight_axes if isinstance(module, Variational) else ("weight",)
        parameters = module.named_parameters(recurse=False)
        if count := sum(t.numel() for n, t in parameters if n in names):
            yield {"name": name, "kind": type(module).__name__, "weights": count}


def evaluate_rows(
    run: Run, data: Source, samples: int = SAMPLES, predictions: str | Path | None = None
) -> Record:
    """Score a run on rows of a new table, preprocessed like its training data.

    The run is left unchanged. Notes report new categories and missing values in columns that had
    none in training. Rows without a target are left out.

    Args:
        run: a trained run on a table.
        data: a CSV or Parquet file or a DataFrame, with the target; or a pair (X, y). X may be an
            array with the training columns in their order.
        samples: draws of the noise.
        predictions: also write the predictions as CSV to this file, with the target and, if the
            run has one, the column of row names.

    Returns:
        `metrics`, `confusion`, `baseline` and `notes`, as in `evaluate`; `data`, its name, and
        `rows`, the number of scored rows. If the run has a column of weights, scores are weighted.

    >>> import tempfile, vardrop as vd
    >>> from sklearn.datasets import load_iris
    >>> table = load_iris(as_frame=True).frame
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = vd.fit(table[::2], target="target", out=folder, epochs=2, folds=1)
    ...     scored = evaluate_rows(run, table[1::2])
    >>> scored["rows"], list(scored["metrics"])[:3]
    (75, ['accuracy', 'balanced_accuracy', 'auroc'])
    """
    if run.about.preprocessing is None:
        text = f"New rows need a run on a table, but {run.directory} is a run on images."
        raise VardropError(f"{text} Score it on test data, or predict an .npy file.")
    if predictions is not None:
        sources = [data] if isinstance(data, str | Path) else []
        check_output(Path(predictions), run.directory, run.config.data.name, *sources)
    columns = run.about.preprocessing
    frame, name, notes = _rows_with_target(run, data, columns)
    target, p = frame[columns.target], run.predict(columns.inputs(frame, name), samples)
    y, weight = in_units(run, columns.targets(target, name)), None
    if (column := run.config.data.weight) in frame.columns:
        weight = row_weights(frame[column], name)
    elif column is not None:
        notes.append(f"{name} has no weight column '{column}': each row counts once.")
    scored = score_prediction(
        run, p, y, weight, run.results.get("known") or _summarize_targets(run)
    )
    if predictions is not None:
        table = prediction_table(run, p)
        for column in (columns.target, run.config.data.id):
            if column is not None:
                table.insert(0, column, row_names(frame, column, name), True)
        write_atomically(Path(predictions), table.to_csv(index=False).encode())
    return {"data": name, "rows": len(y), **scored, "notes": [*notes, *scored["notes"]]}


def _rows_with_target(
    run: Run, data: Source, columns: Preprocessing
) -> tuple[pandas.DataFrame, str, list[str]]:
    """Rows with a target, the name of the data, and notes. Arrays get the training columns."""
    names = [column.name for column in columns.columns]
    if isinstance(data, tuple | list) and len(data) == 2 and not hasattr(data[0], "columns"):
        data = frame_of(data[0].cpu() if isinstance(data[0], Tensor) else data[0], names), data[1]
    roles = dataclasses.replace(run.config.data, target=columns.target)
    table = read_input(data, roles, columns.text_columns)
    if not isinstance(table, Table):
        raise VardropError(f"Expected rows of a table: {KINDS}; but got inputs of other shapes.")
    there = table.rows.get(columns.target, import_optional("pandas").Series(dtype=float)).notna()
    if not bool(there.any()):
        text = f"The target column '{columns.target}' of {table.name} is empty or missing."
        raise VardropError(f"{text} Rows without a target can be predicted.")
    notes = []
    if table.checksum == run.about.checksum:
        notes.append(f"{table.name} {_TRAINED_ON}")
    if absent := int((~there).sum()):
        notes.append(f"{absent} rows without a value of '{columns.target}' were left out.")
    frame = table.rows[there]
    if set(names) <= set(frame.columns):
        notes += columns.unseen(frame)
    return frame, table.name, notes


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
    lower, upper = run.interval(p, scores.LEVEL)
    if not p.classifies:
        parts = {"mean": p.mean, "lower": lower, "upper": upper}
        parts |= {"aleatoric": p.aleatoric, "epistemic": p.epistemic}
        return pandas.DataFrame({name: t.flatten().tolist() for name, t in parts.items()})
    best = p.probs.argmax(1)
    chosen = {"probability": p.probs, "lower": lower, "upper": upper}
    names = [_cell(name) for name in run.about.classes]
    table = {"class": [names[i] for i in best.tolist()]}
    table |= {n: t.gather(1, best.unsqueeze(1)).flatten().tolist() for n, t in chosen.items()}
    table |= {n: getattr(p, n).tolist() for n in ("entropy", "aleatoric", "epistemic")}
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
        rows = _read_images(Path(source), run.about.shape)
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


def _read_images(path: Path, shape: tuple[int, ...]) -> Tensor:
    text = f"Expected {path} to hold numbers in an .npy file of shape (N, {str(shape)[1:]}"
    if path.suffix != ".npy" or not path.is_file():
        raise VardropError(f"{text}.")
    with report_errors(lambda e: f"{text}, but got: {' '.join(str(e).split())[:200]}."):
        loaded = torch.from_numpy(import_optional("numpy").load(path, allow_pickle=False))
    if loaded.is_complex() or len(loaded) == 0 or loaded.shape[1:] != shape:
        raise VardropError(f"{text}, but got {loaded.dtype} of shape {tuple(loaded.shape)}.")
    return loaded.float()
