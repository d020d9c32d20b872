"""Score a run: on test data, on images of other sets, on new rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vardrop import metrics
from vardrop._core.errors import VardropError, import_optional
from vardrop._core.files import write_atomically, write_tensors
from vardrop.app.data import Preprocessing, load_out_of_distribution
from vardrop.app.data.datasets import row_weights
from vardrop.app.data.inputs import KINDS, Table, frame_of, read_input
from vardrop.app.runs import scores
from vardrop.app.runs.config import check_output, working
from vardrop.app.runs.predict import named_rows, prediction_table
from vardrop.app.runs.run import SAMPLES, Run
from vardrop.compression import zero_pruned_weights
from vardrop.gates import Gate
from vardrop.layers import Variational
from vardrop.metrics.checks import weighted_mean
from vardrop.noisy import has_noise, relevance, tensor_name

if TYPE_CHECKING:
    import pandas

    from vardrop.prediction import Prediction

_WEIGHED = (
    "The classes were weighed in training: probabilities, NLL, Brier score and calibration error "
    "are valid for data in which the classes are as frequent as the weights make them."
)
_UNTESTED = "No rows were kept for a test: the scores are of rows that were held out in turn."


def evaluate(run: Run, ood: Sequence[str] = (), samples: int = SAMPLES) -> dict[str, Any]:
    """Score a run on test data and its out-of-distribution detection, and store the results.

    Args:
        run: a trained run.
        ood: image sets that the model was not trained on; see `load_out_of_distribution`.
        samples: draws of the noise.

    Returns:
        The content of results.json: `metrics`, those to be read first at the beginning, and
        `confusion`; `baseline`, the same scores of the mean or of the most frequent class;
        `notes`, what the test rows cannot tell; `ood` with areas under the ROC curve; `held_out`,
        what rows that were held out of the training decided, and `against`, by how much the net is
        worse on them than others. A score that is undefined or not finite is None, and `notes` or
        `not_finite` say why.
    """
    with working(run.directory):
        return measure(run, ood, samples)


def measure(run: Run, ood: Sequence[str] = (), samples: int = SAMPLES) -> dict[str, Any]:
    """As `evaluate`, for a caller that holds the lock of the directory."""
    data, choice, arrays = run.data, run.choice, run.arrays()
    results: dict[str, Any] = {
        "ood": {},
        "compression": {},
        **run.results,
        "task": data.task,
        "known": _summarize_targets(run),
        "held_out": {} if choice is None else choice.to_json(),
        "against": {} if choice is None else choice.against(),
        "layers": _layers(run.net),
        "metrics": {},
        "notes": [_UNTESTED, *_notes(run)],
    }
    if len(data.test.y):
        p, weight = run.predict(data.test.x, samples), data.test.weight
        y = in_units(run, data.test.y)
        results |= score_prediction(run, p, y, weight, results["known"])
        results["test_rows"] = data.rows["test"]
        arrays["log_prob"] = p.log_prob(y).double().flatten()
        arrays |= {} if weight is None else {"row_weight": weight}
        if p.classifies:
            arrays |= {"probs": p.probs, "labels": y}
            arrays |= {"entropy_in": p.entropy, "epistemic_in": p.epistemic}
        else:
            lower, upper = run.interval(p, scores.LEVEL)
            arrays |= {"x": data.test.x, "y": y, "mean": p.mean, "lower": lower, "upper": upper}
        for name in ood:
            images = load_out_of_distribution(name, data.shape, run.config.data.directory)
            other = run.predict(images, samples)
            kinds = ("entropy", "epistemic") if int(p.samples.max()) > 1 else ("entropy",)
            pairs = {kind: (getattr(p, kind), getattr(other, kind)) for kind in kinds}
            areas = {f"auroc_{k}": float(metrics.auroc(*pair)) for k, pair in pairs.items()}
            results["ood"] = {**results["ood"], name: areas}
            arrays[f"entropy_out_{name}"] = other.entropy
            arrays[f"epistemic_out_{name}"] = other.epistemic
    elif ood:
        raise VardropError(f"Expected test rows to tell {', '.join(ood)} from. {_UNTESTED}")
    write_tensors(run.directory / "arrays.safetensors", {**_layer_arrays(run.net), **arrays})
    run.keep(results)
    return run.results


def _summarize_targets(run: Run) -> dict[str, Any]:
    """Class counts, or mean and standard deviation, of the training targets."""
    rows = run.data.train.join(run.data.validation)
    weight = None if rows.weight is None else rows.weights
    if run.about.task == "classification":
        return {"counts": torch.bincount(rows.y, weight, len(run.about.classes)).tolist()}
    y = in_units(run, rows.y).double().flatten()
    mean = float(weighted_mean(y, weight))
    return {"mean": mean, "std": float(weighted_mean((y - mean).square(), weight).sqrt())}


def in_units(run: Run, y: Tensor) -> Tensor:
    """Targets in their original units, in double precision; classes unchanged."""
    mean, std = run.config.units
    return y if run.about.task == "classification" else y.double() * std + mean


def score_prediction(
    run: Run, p: Prediction, y: Tensor, weight: Tensor | None, targets: Mapping[str, Any]
) -> dict[str, Any]:
    """Scores of a prediction, and of the baseline that predicts the same for every row."""
    if not p.classifies:
        interval = run.interval(p, scores.LEVEL)
        scored = scores.number_scores(p.mean, p.std, p.log_prob(y), y, interval, weight)
        constant = scores.constant(targets["mean"], targets["std"], y, weight)
        return {**dataclasses.asdict(scored), "baseline": {"name": "mean", **constant}}
    classes, counts = run.about.classes, torch.tensor(targets["counts"]).double()
    # From log-probabilities: a probability that has rounded to zero would make the NLL infinite.
    scored = scores.class_scores(p.probs, p.log_prob(y), y, classes, counts / counts.sum(), weight)
    scored.notes.extend(_notes(run))
    majority = scores.majority(counts, y, classes, weight)
    return {**dataclasses.asdict(scored), "baseline": {"name": "majority", **majority}}


def _notes(run: Run) -> list[str]:
    """A note if class weights change the meaning of probabilities."""
    return [] if run.config.settings.class_weight is None else [_WEIGHED]


def _layers(net: nn.Module) -> list[dict[str, Any]]:
    """Name, kind and number of weights of each layer, biases left out."""
    layers = []
    for name, module in net.named_modules():
        names = module.weight_axes if isinstance(module, Variational) else ("weight",)
        counts = [t.numel() for n, t in module.named_parameters(recurse=False) if n in names]
        if counts:
            layers.append({"name": name, "kind": type(module).__name__, "weights": sum(counts)})
    return layers


@torch.no_grad()
def _layer_arrays(net: nn.Module) -> dict[str, Tensor]:
    """Weights of the noisy layers, before and after the method's own pruning."""
    layers = {n: m for n, m in net.named_modules() if isinstance(m, Variational)}
    tensors = [(name, w) for name, layer in layers.items() for w in layer.weight_axes]
    arrays = {f"weight.{tensor_name(n, w)}": getattr(layers[n], w) for n, w in tensors}
    depends = any(isinstance(m, Gate) and m.noise.input_dependent for m in net.modules())
    if has_noise(net) and relevance(net) and not depends:  # else no constant mask says what goes
        after = dict(zero_pruned_weights(net)[0].named_parameters())
        for name, w in tensors:
            if f"{name}.{w}" in after:
                arrays[f"weight_pruned.{tensor_name(name, w)}"] = after[f"{name}.{w}"]
    return arrays


def evaluate_rows(
    run: Run, data: Any, samples: int = SAMPLES, predictions: str | Path | None = None
) -> dict[str, Any]:
    """Score a run on rows of a new table, preprocessed like its training data.

    The run is left unchanged. Notes report new categories and missing values in columns that had
    none in training. Rows without a target are left out.

    Args:
        run: a trained run on a table.
        data: a CSV or Parquet file or a DataFrame, with the target; or a pair (X, y), where X may
            be an array with the columns of the training in their order.
        samples: draws of the noise.
        predictions: also write the predictions as CSV to this file, with the column that names the
            rows, where the run has one, and with the target.

    Returns:
        `metrics`, `confusion`, `baseline` and `notes`, as in `evaluate`; `data`, its
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
        text = f"Expected a run on a table for new rows, but {run.directory} is one on images."
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
        notes.append(f"{name} has no column '{column}' of weights: each row counts once.")
    targets = run.results.get("known") or _summarize_targets(run)
    scored = score_prediction(run, p, y, weight, targets)
    if predictions is not None:
        table = prediction_table(run, p)
        for column in (columns.target, run.config.data.id):
            if column is not None:
                table.insert(0, column, named_rows(frame, column, name), True)
        write_atomically(Path(predictions), table.to_csv(index=False).encode())
    return {"data": name, "rows": len(y), **scored, "notes": [*notes, *scored["notes"]]}


def _rows_with_target(
    run: Run, data: Any, columns: Preprocessing
) -> tuple[pandas.DataFrame, str, list[str]]:
    """Rows that have a target, their name, and what is to be said of them.

    Arrays get the names of the training's columns.
    """
    names = [column.name for column in columns.columns]
    if isinstance(data, tuple | list) and len(data) == 2 and not hasattr(data[0], "columns"):
        data = frame_of(data[0].cpu() if isinstance(data[0], Tensor) else data[0], names), data[1]
    roles = dataclasses.replace(run.config.data, target=columns.target)
    table = read_input(data, roles, columns.text_columns)
    if not isinstance(table, Table):
        raise VardropError(f"Expected rows of a table: {KINDS}; but got inputs of other shapes.")
    there = table.rows.get(columns.target, import_optional("pandas").Series(dtype=float)).notna()
    if not bool(there.any()):
        raise VardropError(
            f"Expected values in the target column '{columns.target}' of {table.name} to score by, "
            "but got none. Rows without a target can be predicted."
        )
    notes = []
    if table.checksum == run.about.checksum:
        text = "is what the run was trained on: these scores say nothing of new rows."
        notes.append(f"{table.name} {text}")
    if absent := int((~there).sum()):
        notes.append(f"{absent} rows without a value of '{columns.target}' were left out.")
    frame = table.rows[there]
    if set(names) <= set(frame.columns):
        notes += columns.unseen(frame)
    return frame, table.name, notes
