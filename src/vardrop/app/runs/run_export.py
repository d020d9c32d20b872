"""Export a run as one ONNX file: raw rows in, predictions with uncertainty out."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, get_args

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
from vardrop.prediction import Ensemble, Predictor, draws

Serving = Literal["functions", "moments", "sample"]
LEVEL = 0.95
_ON_REQUEST = {"classification": ("lower", "upper", "set")}


def _calibration(run: Run) -> dict[str, Any]:
    """Arguments of a `Predictor`: likelihood with the scale of the noise, conformal rule, units."""
    choice, likelihood, rule = run.choice, run.elbo.likelihood, None
    assert isinstance(likelihood, Likelihood)
    if choice is not None:
        rule = choice.conformal(LEVEL)
        rule = rule if math.isfinite(rule.quantile) else None
        likelihood = likelihood.scaled(math.exp(choice.log_scale))
    units = None if run.about.preprocessing is None else run.config.units
    return {"likelihood": likelihood, "conformal": rule, "level": LEVEL, "units": units}


def export_run(
    run: Run,
    path: str | Path,
    samples: int = SAMPLES,
    *,
    mode: Serving = "functions",
    outputs: Sequence[str] | None = None,
) -> int:
    """Write a run as ONNX: raw rows in, predictions in the units of the target out.

    Every column of a table is an input with its name, see
    `vardrop.app.data.onnx_graph.with_preprocessing`. The outputs are the outputs of a `Predictor`,
    equal to `run.predict(rows, samples, draw="functions")`. Numbers are in double precision. The
    metadata contain version, method, likelihood, target, task, classes and columns.

    Args:
        run: a trained run.
        path: the file, which is written atomically.
        samples: draws. In the mode "functions", 0 uses the means of the weights.
        mode: one of these:

            - "functions": functions drawn from the posterior, stored in the file
            - "moments": one pass of mean and variance. Its interval is an interval of the
              predictive distribution and not conformal.
            - "sample": draws of the layers' estimators by the runtime

        outputs: names of outputs in their order, all by default.

    Returns:
        The number of bytes on disk.

    >>> import tempfile, vardrop as vd
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = vd.fit("iris", out=f"{folder}/run", epochs=2, folds=1)
    ...     size = export_run(run, f"{folder}/iris.onnx", samples=2)
    >>> size > 1000
    True
    """
    check_target(run, Path(path))
    check_choice("mode", mode, get_args(Serving))
    check_integer("samples", samples, 0 if mode == "functions" else 1)
    options, net = _calibration(run), run.net.eval()
    if mode == "moments":  # the rule was fitted on sampled predictions
        options["conformal"] = None
    if mode != "functions":
        predictor = Predictor(net, samples, mode=mode, **options)
    elif samples == 0 or not has_noise(net):
        predictor = Predictor(net, 1, mode="mean", **options)
    else:
        predictor = Ensemble(list(draws(net, samples, run.config.settings.seed)), **options)
    return _write(run, predictor, outputs, Path(path))


def check_target(run: Run, path: Path) -> None:
    """Raise an error if a file to write is in use, or its directory does not exist."""
    check_output(path, run.directory, run.config.data.name)
    if not path.absolute().parent.is_dir():
        raise VardropError(f"Directory not found: {path.parent}.")


def export_small(run: Run, net: nn.Module, path: str | Path) -> int:
    """Write a compressed model of a run as ONNX, and return the bytes on disk.

    For a table the graph includes the preprocessing, with the outputs of `export_run`. For images
    the outputs are the outputs of the model.
    """
    if run.about.preprocessing is None:
        return export_onnx(net, torch.zeros(1, *run.about.shape), path)
    return _write(run, Ensemble([net], **_calibration(run)), None, Path(path))


def _write(run: Run, predictor: Predictor, outputs: Sequence[str] | None, path: Path) -> int:
    onnx = import_optional("onnx", "compress")
    on_request = _ON_REQUEST.get(run.about.task, ())
    names = outputs or [n for n in predictor.output_names if n not in on_request]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "net.onnx"
        export_onnx(predictor, torch.zeros(2, *run.about.shape), file, outputs=names)
        model = onnx.load(file)
    metadata = {
        "samples": str(predictor.samples),
        "vardrop": version("vardrop"),
        "method": repr(run.config.method),
        "likelihood": repr(run.elbo.likelihood),
        "task": run.about.task,
        "classes": json.dumps(run.about.classes, ensure_ascii=False),
    }
    onnx.helper.set_model_props(model, metadata)
    if run.about.preprocessing is not None:
        model = with_preprocessing(model, run.about.preprocessing)
    raw = model.SerializeToString()
    write_atomically(path, raw)
    return len(raw)
