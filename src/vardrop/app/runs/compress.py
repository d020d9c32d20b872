"""Compress a run: choose the threshold on validation data, shrink, save, score on test data."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vardrop._core.checks import check_number
from vardrop._core.errors import VardropError
from vardrop._core.files import remove
from vardrop.app.data import Part
from vardrop.app.runs.config import working
from vardrop.app.runs.models import likelihood_for
from vardrop.app.runs.run import Model, Run, predict_tensor
from vardrop.app.runs.run_export import check_target, export_small
from vardrop.app.store import Record
from vardrop.compression import ShrinkPlan, Shrunk, choose_threshold, pack, save, shrink
from vardrop.conversion import revert
from vardrop.noisy import has_noise, relevance
from vardrop.tuning import Slimmed, slim

Metric = Callable[[Tensor, Tensor], float]
SMALL, PACKED = "small.safetensors", "small.vdp"
_ENOUGH = 1000  # validation rows that can show a small loss
MAX_DROPS = {"accuracy": 0.002, "rmse": 0.01}  # the default largest loss


def compress(
    run: Run,
    max_drop: float | None = None,
    sparsity: float | None = None,
    onnx: str | Path | None = None,
) -> Shrunk:
    """Remove the weights or units that the method marks as irrelevant, and store the small model.

    Args:
        run: a run whose method selects weights or units.
        max_drop: the largest loss on validation data. For classes it is a loss of accuracy, 0.002
            by default. For regression it is the fraction by which the RMSE may grow, 0.01 by
            default. Fewer than 1000 rows cannot show such a small loss. By default the rule of
            the method then limits the removal.
        sparsity: the fraction of weights or units to remove, instead of `max_drop`.
        onnx: also write the small model as ONNX to this file, with the preprocessing of a table.

    Returns:
        The small plain model and the plan. results.json has the measurements.
    """
    if onnx is not None:
        check_target(run, Path(onnx))
    with working(run.directory):
        threshold, shrunk = shrink_model(run, run.data.validation, max_drop, sparsity)
        packed = pack(shrunk, run.directory / PACKED).bytes
        _store(run, *shrunk, onnx, threshold=threshold, packed_bytes=packed)
    return shrunk


def shrink_model(
    model: Model, held_out: Part, max_drop: float | None = None, sparsity: float | None = None
) -> tuple[float, Shrunk]:
    """The threshold that held-out rows allow, and the small plain model with its plan."""
    if not has_noise(model.net):
        text = "A plain model cannot be compressed by a threshold."
        raise VardropError(f"{text} Train with sparse_vd, or set a budget of macs or bytes.")
    score, metric = _metric(model)
    by_default = max_drop is None and sparsity is None
    drop, quality = MAX_DROPS[score] if by_default else max_drop, metric
    if drop is not None:
        check_number("max_drop", drop, at_least=0)
    if score == "rmse":  # the logarithm turns a fraction of it into a difference
        quality = lambda output, y: -math.log(max(metric(output, y), 1e-300))  # noqa: E731
        drop = None if drop is None else math.log1p(drop)
    rows = (held_out.x, held_out.y)
    threshold = float(choose_threshold(model.net, rows, quality, max_drop=drop, sparsity=sparsity))
    if by_default and len(held_out.y) < _ENOUGH:  # the method's rule is the limit
        rule = next(iter(relevance(model.net).values()))
        threshold = (min if rule.keep_above else max)(threshold, rule.threshold)
    return threshold, shrink(model.net, held_out.x[:1], threshold)


def slim_run(
    run: Run,
    *,
    macs: float | None = None,
    latency: float | None = None,
    bytes: float | None = None,
    onnx: str | Path | None = None,
) -> Slimmed:
    """Slim the model of a run to a budget on its data, and store the small model.

    Of a noisy model the means of the weights are used.

    Args:
        run: any run, with a method or plain.
        macs, latency, bytes: the fraction to keep, as in `slim`; one of them.
        onnx: also write the small model as ONNX to this file, with the preprocessing of a table.

    Returns:
        The small model with its report. results.json has the measurements on test data.
    """
    if onnx is not None:
        check_target(run, Path(onnx))
    with working(run.directory):
        plain, seed = copy.deepcopy(run.net), run.config.settings.seed
        net, parts = revert(plain) if has_noise(plain) else plain, run.data
        budget: dict[str, Any] = {"macs": macs, "latency": latency, "bytes": bytes, "seed": seed}
        slimmed = slim(net, parts.train, parts.validation, **budget)
        remove(run.directory / PACKED)  # of an earlier small model
        others: Record = {
            "threshold": None,
            "notes": " ".join(slimmed.notes),
            "latency_before": dict(slimmed.before.latency),
            "latency_after": dict(slimmed.after.latency),
        }
        _store(run, slimmed.net, slimmed.plan, onnx, **others)
    return slimmed


def _metric(run: Model) -> tuple[str, Metric]:
    """The name of the score, and the score itself."""
    if run.about.task == "classification":
        return "accuracy", lambda output, y: float((output.argmax(1) == y).double().mean())
    scale, means = run.config.units[1], likelihood_for(run.config).locations
    return "rmse", lambda output, y: scale * float((means(output) - y).square().mean().sqrt())


@torch.no_grad()
def _store(
    run: Run, small: nn.Module, plan: ShrinkPlan, onnx: str | Path | None, **others: Any
) -> None:
    """Write the small model, and its measurements on test data into results.json."""
    (before, after), (macs, macs_left) = plan.total("weights"), plan.total("macs")
    score, metric = _metric(run)
    x, y = run.data.test if len(run.data.test.y) else run.data.validation
    content = {
        "score": score,
        "test_score_before": metric(predict_tensor(run.elbo, x, 0, 0).draws[0], y),
        "test_score_after": metric(torch.cat([small(batch) for batch in x.split(1000)]), y),
        "weights_before": before,
        "weights_after": after,
        "sparsity": 1 - after / before,
        "compression": plan.compression,
        "macs_before": macs,
        "macs_after": macs_left,
        "layers": [dataclasses.asdict(layer) for layer in plan.layers],
        "removed": {x.name: 1 - x.after.weights / max(1, x.before.weights) for x in plan.layers},
        "bytes": save(small, run.directory / SMALL),
        **others,
    }
    if onnx is not None:
        content["onnx_bytes"] = export_small(run, small, onnx)
    run.keep({**run.results, "compression": content})
