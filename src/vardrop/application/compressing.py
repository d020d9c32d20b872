"""Compress a run: choose the threshold on validation data, shrink, save, measure on test data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vardrop.application.run import Run, predicted
from vardrop.compression import choose_threshold, export_onnx, masked, save, shrink
from vardrop.compression.report import ShrinkReport
from vardrop.errors import VardropError
from vardrop.files import read_tensors, write_json, write_tensors
from vardrop.layers import Variational
from vardrop.training.recording import noisy

SMALL = "small.safetensors"


def compress(
    run: Run,
    max_drop: float | None = None,
    sparsity: float | None = None,
    onnx: str | Path | None = None,
) -> nn.Module:
    """Take out of a trained net what its method calls dead, and keep the small net with the run.

    Args:
        run: a run whose method selects weights or units.
        max_drop: how much accuracy (or, in regression, RMSE) may be lost on validation data;
            0.002 where nothing is given.
        sparsity: the share to drop, instead.
        onnx: also write the small net as ONNX to this file.

    Returns:
        The small plain net; `small.report` says what went. results.json has the figures.
    """
    if not noisy(run.net):
        raise VardropError(
            f"Expected a run with a method to compress, but {run.directory} is plain. "
            "Train with a method such as sparse_vd."
        )
    if max_drop is None and sparsity is None:
        max_drop = 0.002
    if onnx is not None and not Path(onnx).absolute().parent.is_dir():
        raise VardropError(f"Expected a directory to write {onnx} into, but there is none.")
    score, sign, metric = _metric(run)
    x, y = run.data.validation
    chosen = choose_threshold(
        run.net, (x, y), lambda output, y: sign * metric(output, y), max_drop=max_drop,
        sparsity=sparsity,
    )  # fmt: skip
    example = x[:1]
    small = shrink(run.net, example, chosen)
    found = {"score": score, **_figures(run, small, metric, float(chosen))}
    found["bytes"] = save(small, run.directory / SMALL)
    if onnx is not None:
        found["onnx_bytes"] = export_onnx(small, onnx, example)
    curve = [
        {"threshold": p.threshold, "sparsity": p.sparsity, "metric": sign * p.score}
        for p in chosen.points
    ]
    _store(run, float(chosen), {"compression": found, "curve": curve})
    return small


def _metric(run: Run) -> tuple[str, int, Callable[[Tensor, Tensor], float]]:
    """The name of the score, its sign where more is to be better, and the score itself."""
    if run.about.task == "classification":
        return "accuracy", 1, lambda output, y: float((output.argmax(1) == y).double().mean())
    found = run.about.preprocessing
    scale = 1.0 if found is None else found.target_std
    return "rmse", -1, lambda output, y: scale * float((output - y).square().mean().sqrt())


@torch.no_grad()
def _figures(
    run: Run, small: nn.Module, metric: Callable[[Tensor, Tensor], float], threshold: float
) -> dict[str, Any]:
    report: ShrinkReport = small.report  # type: ignore[assignment]
    (before, after), (macs, macs_left) = report.total("weights"), report.total("macs")
    x, y = run.data.test
    outputs = torch.cat([small(batch) for batch in x.split(1000)])
    return {
        "threshold": threshold,
        "test_score_before": metric(predicted(run.elbo, x, 0, 0).mean, y),
        "test_score_after": metric(outputs, y),
        "weights_before": before,
        "weights_after": after,
        "sparsity": 1 - after / before,
        "compression": report.compression,
        "macs_before": macs,
        "macs_after": macs_left,
        "layers": [dataclasses.asdict(layer) for layer in report.layers],
    }


def _store(run: Run, threshold: float, found: dict[str, Any]) -> None:
    write_json(run.directory / "results.json", {**run.results, **found})
    path = run.directory / "arrays.safetensors"
    arrays = read_tensors(path)[0] if path.is_file() else {}
    pruned, _ = masked(run.net, threshold)
    layers = [n for n, m in run.net.named_modules() if isinstance(m, Variational)]
    arrays |= {f"weight_pruned.{n}": pruned.get_submodule(n).weight for n in layers}  # type: ignore[misc]
    write_tensors(path, arrays)
