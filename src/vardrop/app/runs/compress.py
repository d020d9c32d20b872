"""Compress a run: choose the threshold on validation data, shrink, save, measure on test data."""

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
from vardrop._core.files import remove, write_tensors
from vardrop.app.runs.config import working
from vardrop.app.runs.export import check_target, export_small
from vardrop.app.runs.run import Run, likelihood_for, predicted
from vardrop.compression import (
    ShrinkPlan,
    choose_threshold,
    masked,
    pack,
    plan_shrink,
    save,
)
from vardrop.conversion import revert
from vardrop.layers import Variational
from vardrop.noisy import has_noise, relevance, tensor_name
from vardrop.tuning.slim import slim
from vardrop.tuning.slim_report import Slimmed

Metric = Callable[[Tensor, Tensor], float]
SMALL, PACKED = "small.safetensors", "small.vdp"
_ENOUGH = 1000  # rows of validation that show a small loss
MAX_DROPS = {"accuracy": 0.002, "rmse": 0.01}  # what may be lost where nothing is said


def compress(
    run: Run,
    max_drop: float | None = None,
    sparsity: float | None = None,
    onnx: str | Path | None = None,
) -> tuple[nn.Module, ShrinkPlan]:
    """Take out of a trained net what its method calls dead, and keep the small net with the run.

    Args:
        run: a run whose method selects weights or units.
        max_drop: how much may be lost on validation data: of accuracy, so that 0.002 is 0.2 points
            (where nothing is given); in regression, by which fraction the RMSE may grow, so that
            0.01 is 1 % (where nothing is given), whatever the units of the target. Fewer than 1000
            rows cannot show so little: where nothing is given, the method's own rule then is the
            most that goes.
        sparsity: the fraction to drop, instead.
        onnx: also write the small net as ONNX to this file, with the preprocessing of a table.

    Returns:
        The small plain net, and the plan that says what went. results.json has the measurements.
    """
    if not has_noise(run.net):
        raise VardropError(
            f"Expected a run with a method to compress, but {run.directory} is plain. "
            "Train with a method such as sparse_vd, or give a budget of macs, latency or bytes."
        )
    if onnx is not None:
        check_target(run, Path(onnx))
    score, metric = _metric(run)
    unasked = max_drop is None and sparsity is None
    if unasked:
        max_drop = MAX_DROPS[score]
    if max_drop is not None:
        check_number("max_drop", max_drop, at_least=0)
    with working(run.directory):
        threshold = _choose_threshold(run, score, metric, max_drop, sparsity)
        if unasked and len(run.data.validation.y) < _ENOUGH:  # no more than by the method's rule
            rule = next(iter(relevance(run.net).values()))
            threshold = (min if rule.keep_above else max)(threshold, rule.threshold)
        plan = plan_shrink(run.net, run.data.validation.x[:1], threshold)
        small = plan.apply(run.net)
        results = _measurements(run, small, plan, threshold)
        results["bytes"] = save(small, run.directory / SMALL)
        results["packed_bytes"] = pack(small, run.directory / PACKED, plan=plan).bytes
        if onnx is not None:
            results["onnx_bytes"] = export_small(run, small, onnx)
        _store_pruned(run, threshold)
        run.keep({**run.results, "compression": results})
    return small, plan


def slim_run(
    run: Run,
    *,
    macs: float | None = None,
    latency: float | None = None,
    bytes: float | None = None,
    onnx: str | Path | None = None,
) -> Slimmed:
    """Slim the net of a run to a budget on its own data, and keep the small net with the run.

    A noisy net is taken at its means; its noise does not come along.

    Args:
        run: any run, with a method or plain.
        macs, latency, bytes: the fraction to be left, as in `slim`; one of them.
        onnx: also write the small net as ONNX to this file, with the preprocessing of a table.

    Returns:
        The small net with its report. results.json has the measurements on test data.
    """
    if onnx is not None:
        check_target(run, Path(onnx))
    with working(run.directory):
        plain = copy.deepcopy(run.net)
        net, data = revert(plain) if has_noise(plain) else plain, run.data
        given: dict[str, Any] = {"macs": macs, "latency": latency, "bytes": bytes}
        given["seed"] = run.config.settings.seed
        slimmed = slim(net, data.train, data.validation, **given)
        results = _measurements(run, slimmed.net, slimmed.plan, None)
        results["bytes"] = save(slimmed.net, run.directory / SMALL)
        remove(run.directory / PACKED)  # it is of another small net
        results["latency_before"] = dict(slimmed.before.latency)
        results["latency_after"] = dict(slimmed.after.latency)
        results["notes"] = " ".join(slimmed.notes)
        if onnx is not None:
            results["onnx_bytes"] = export_small(run, slimmed.net, onnx)
        run.keep({**run.results, "compression": results})
    return slimmed


def _choose_threshold(
    run: Run, score: str, metric: Metric, max_drop: float | None, sparsity: float | None
) -> float:
    """The threshold that validation data allow.

    The logarithm turns a fraction of the RMSE into a difference, whatever its units.
    """
    x, y = run.data.validation
    if score == "accuracy":
        wanted, drop = metric, max_drop
    else:
        wanted = lambda output, y: -math.log(max(metric(output, y), 1e-300))  # noqa: E731
        drop = None if max_drop is None else math.log1p(max_drop)
    return float(choose_threshold(run.net, (x, y), wanted, max_drop=drop, sparsity=sparsity))


def _metric(run: Run) -> tuple[str, Metric]:
    """The name of the score, and the score itself."""
    if run.about.task == "classification":
        return "accuracy", lambda output, y: float((output.argmax(1) == y).double().mean())
    scale = run.config.units[1]
    means = likelihood_for(run.config).locations
    return "rmse", lambda output, y: scale * float((means(output) - y).square().mean().sqrt())


@torch.no_grad()
def _measurements(
    run: Run, small: nn.Module, plan: ShrinkPlan, threshold: float | None
) -> dict[str, Any]:
    (before, after), (macs, macs_left) = plan.total("weights"), plan.total("macs")
    score, metric = _metric(run)
    x, y = run.data.test if len(run.data.test.y) else run.data.validation
    outputs = torch.cat([small(batch) for batch in x.split(1000)])
    return {
        "score": score,
        "threshold": threshold,
        "test_score_before": metric(predicted(run.elbo, x, 0, 0).draws[0], y),
        "test_score_after": metric(outputs, y),
        "weights_before": before,
        "weights_after": after,
        "sparsity": 1 - after / before,
        "compression": plan.compression,
        "macs_before": macs,
        "macs_after": macs_left,
        "layers": [dataclasses.asdict(layer) for layer in plan.layers],
    }


def _store_pruned(run: Run, threshold: float) -> None:
    """Keep the weights of the noisy layers without what the threshold takes, for the report."""
    arrays, pruned = run.arrays(), masked(run.net, threshold)[0]
    for name, module in run.net.named_modules():
        for own in module.weight_axes if isinstance(module, Variational) else ():
            weight = getattr(pruned.get_submodule(name), own)
            arrays[f"weight_pruned.{tensor_name(name, own)}"] = weight
    write_tensors(run.directory / "arrays.safetensors", arrays)
