"""A run as one ONNX file that answers raw rows in the units of the target, with its doubt."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from vardrop._core.checks import check_choice, check_integer
from vardrop._core.errors import VardropError, import_optional
from vardrop._core.files import write_atomically
from vardrop.app.data.onnx_graph import with_preprocessing
from vardrop.app.runs.config import check_output
from vardrop.app.runs.run import SAMPLES, Run
from vardrop.export import export_onnx
from vardrop.likelihoods import Likelihood
from vardrop.noisy import has_noise
from vardrop.prediction import Conformal, Ensemble, Predictor, draws

LEVEL = 0.95
_ON_REQUEST = {"classification": ("lower", "upper", "set")}


def _calibrated(run: Run) -> tuple[Likelihood, Conformal | None]:
    """What an output means, with the scale of the noise; and the rule of intervals, or of sets."""
    choice, likelihood = run.choice, run.elbo.likelihood
    assert isinstance(likelihood, Likelihood)  # a run has one of ours
    if choice is None:
        return likelihood, None
    rule = choice.conformal(LEVEL)
    scaled = likelihood.scaled(math.exp(choice.log_scale))
    return scaled, rule if math.isfinite(rule.quantile) else None


def _make_predictor(run: Run, mode: Any, samples: int) -> Predictor:
    """A predictor in the units of the target, with the calibration of the run."""
    likelihood, rule = _calibrated(run)
    net, seed = run.net.eval(), run.config.settings.seed
    if mode == "moments":  # the rule was fitted on sampled predictions
        rule = None
    units = None if run.about.preprocessing is None else run.config.units
    options: dict[str, Any] = {"likelihood": likelihood, "conformal": rule, "level": LEVEL}
    if mode != "functions":
        return Predictor(net, samples, mode=mode, units=units, **options)
    if samples == 0 or not has_noise(net):
        return Predictor(net, 1, mode="mean", units=units, **options)
    return Ensemble(list(draws(net, samples, seed)), units=units, **options)


def export_run(
    run: Run,
    path: str | Path,
    samples: int = SAMPLES,
    *,
    mode: Literal["functions", "moments", "sample"] = "functions",
    outputs: Sequence[str] | None = None,
) -> int:
    """Write a run as ONNX: raw rows in, answers in the units of the target out.

    Of a table every column is an input under its own name, see
    `vardrop.app.data.onnx_graph.with_preprocessing`. The outputs are those of a `Predictor` in the
    units of the target: those of `run.predict(rows, samples, draw="functions")`, or with 0 samples
    those of the means. Numbers are in double precision. The metadata contain version, method,
    likelihood, target, task, classes and columns.

    Args:
        run: a trained run.
        path: the file; it is there whole or not at all.
        samples: draws, of at least one where the mode is none of functions.
        mode: "functions" drawn from the posterior, all in the file; "moments", one pass that
            carries mean and variance, whose interval is that of the predictive distribution and
            not conformal; "sample", draws as the layers' estimators, by the runtime.
        outputs: which, in this order; all by default.

    Returns:
        The bytes on disk.

    >>> import tempfile, vardrop as vd
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = vd.fit("iris", out=f"{folder}/run", epochs=2, folds=1)
    ...     size = export_run(run, f"{folder}/iris.onnx", samples=2)
    >>> size > 1000
    True
    """
    check_target(run, Path(path))
    check_choice("mode", mode, ("functions", "moments", "sample"))
    check_integer("samples", samples, 0 if mode == "functions" else 1)
    return _write(run, _make_predictor(run, mode, samples), outputs, Path(path))


def check_target(run: Run, path: Path) -> None:
    """Refuse a file that is in use, or whose directory is not there."""
    check_output(path, run.directory, run.config.data.name)
    if not path.absolute().parent.is_dir():
        raise VardropError(f"Expected a directory to write {path} into, but there is none.")


def export_small(run: Run, net: nn.Module, path: str | Path) -> int:
    """Write a plain net that was made from a run's as ONNX; of a table with its preprocessing.

    Outputs as of `export_run`; on images those of the net itself.
    """
    if run.about.preprocessing is None:
        return export_onnx(net, path, torch.zeros(1, *run.about.shape))
    likelihood, rule = _calibrated(run)
    ensemble = Ensemble(
        [net], likelihood=likelihood, conformal=rule, level=LEVEL, units=run.config.units
    )
    return _write(run, ensemble, None, Path(path))


def _write(run: Run, predictor: Predictor, outputs: Sequence[str] | None, path: Path) -> int:
    onnx = import_optional("onnx", "compress")
    on_request = _ON_REQUEST.get(run.about.task, ())
    names = outputs or [n for n in predictor.output_names if n not in on_request]
    for name in names:
        check_choice("outputs", name, predictor.output_names)
    exported = _export(onnx, predictor, names, run.about.shape)
    # Nothing inside a graph has the name of an output, or of a column.
    model = onnx.compose.add_prefix(exported, "answer/")
    for value, name in zip(model.graph.output, names, strict=True):
        model.graph.node.append(onnx.helper.make_node("Identity", [value.name], [name]))
        value.name = name
    metadata = {"samples": str(predictor.samples), "vardrop": version("vardrop")}
    metadata |= {"method": repr(run.config.method), "likelihood": repr(run.elbo.likelihood)}
    metadata |= {
        "task": run.about.task,
        "classes": json.dumps(run.about.classes, ensure_ascii=False),
    }
    onnx.helper.set_model_props(model, metadata)
    if run.about.preprocessing is not None:
        model = with_preprocessing(model, run.about.preprocessing)
    else:
        (value,) = model.graph.input
        model.graph.node.insert(0, onnx.helper.make_node("Identity", ["x"], [value.name]))
        value.name = "x"
    raw = model.SerializeToString()
    write_atomically(path, raw)
    return len(raw)


def _export(onnx: Any, predictor: Predictor, names: Sequence[str], shape: tuple[int, ...]) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "net.onnx"
        export_onnx(predictor, path, torch.zeros(2, *shape), outputs=names)
        return onnx.load(path)
