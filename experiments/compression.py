"""Sparse variational dropout on the LeNets, and what its sparsity is worth in bytes and seconds.

`fit` trains resumably; the threshold is chosen on examples held out of the training data, and the
test set is looked at once, at the end. Run it with

    python -m experiments.compression lenet300 /tmp/lenets results/compression

Molchanov, Ashukha & Vetrov 2017, "Variational dropout sparsifies deep neural networks", sec. 5.3.
"""

from __future__ import annotations

import dataclasses
import json
import math
import platform
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from experiments.sparse_lenets import NETS, SETTINGS, Setting, Split, error, fit, load_split
from vardrop.compression import (
    PackReport,
    choose_threshold,
    compare,
    export_onnx,
    fine_tune,
    masked,
    pack,
    save,
    shrink,
    sparsify,
    unpack,
)
from vardrop.compression.extras import require
from vardrop.compression.layout import affine_layers
from vardrop.compression.report import layer_costs
from vardrop.compression.scoring import accuracy
from vardrop.compression.sparse import race
from vardrop.data import IMAGE_SETS, load_images
from vardrop.layers import Variational
from vardrop.values import to_json


def _latencies(nets: dict[str, nn.Module], onnx: dict[str, Path], x: Tensor) -> dict[str, float]:
    """Best seconds of each net in torch and of each file in onnxruntime, one thread, in turns."""
    runtime = require("onnxruntime", "onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = 1
    calls: dict[str, Callable[[], Any]] = {n: partial(net.eval(), x) for n, net in nets.items()}
    for name, path in onnx.items():
        session = runtime.InferenceSession(path, options)
        calls[f"onnx {name}"] = partial(
            session.run, None, {session.get_inputs()[0].name: x.numpy()}
        )
    with torch.inference_mode():
        return race(calls, rounds=20)


def packed(
    small: nn.Module, fresh: Callable[[], nn.Module], split: Split, path: Path
) -> tuple[float, nn.Module, PackReport]:
    """The coarsest steps that cost at most 0.1 points of validation accuracy."""
    best = None
    for tolerance in (0.5, 1.0, 1.5, 2.0, 2.5, 3.0):
        report = pack(small, path, tolerance, split.validation, accuracy)
        drop = (report.score or 0.0) - (report.decoded_score or 0.0)
        if best is None or drop <= 0.001:
            best = tolerance, unpack(path, into=fresh()), report
    assert best is not None
    return best


def measure(setting: Setting, net: nn.Module, split: Split, directory: Path) -> dict[str, Any]:
    """Choose the threshold on validation data, shrink, pack, export; then look at the test."""
    dense, x = masked(net, math.inf)[0], split.test[0]
    chosen = choose_threshold(net, split.validation, accuracy, max_drop=setting.max_drop, points=61)
    small = shrink(net, x[:1], chosen, drop_inputs=True)
    if setting.fine_tune:
        fine_tune_run(setting, small, split)
    tolerance, decoded, packing = packed(small, NETS[setting.net], split, directory / "net.vdp")
    files = {"dense": directory / "dense.onnx", "small": directory / "small.onnx"}
    # Dead means are denormal numbers, which are slow: time a dense net with fresh weights instead.
    full = NETS[setting.net]().eval()
    export_onnx(full, files["dense"], x[:1])
    export_onnx(small, files["small"], x[:1])
    save(small, directory / "net.safetensors")
    nets = {"dense": dense, "small": small}
    costs = [layer_costs(n, (x[:1],)) for n in (full, small)]
    weights = [sum(m.weight.numel() for m in affine_layers(full).values())]
    weights.append(sum(c.weights for c in costs[1].values()))
    foreign = load_images("notmnist", "test").x - split.mean
    return {
        "threshold": float(chosen),
        "sweep": [dataclasses.asdict(p) for p in chosen.points],
        "weights": weights,
        "compression": weights[0] / weights[1],
        "macs": [sum(c.macs for c in cost.values()) for cost in costs],
        "layers": [{n: dataclasses.asdict(c) for n, c in cost.items()} for cost in costs],
        "notes": small.report.notes,  # type: ignore[union-attr]
        "test_error": {n: error(m, split.test) for n, m in (*nets.items(), ("packed", decoded))},
        "pack": {"tolerance": tolerance, **_bytes(full, packing)},
        "latency": {
            str(b): _latencies(
                {"dense": full, "small": small, "chosen": sparsify(small, x[:b])}, files, x[:b]
            )
            for b in (256, 1)
        },
        "table": dataclasses.asdict(compare(masked(net, 3.0)[0], small, split.test, foreign)),
    }


def _bytes(full: nn.Module, packing: PackReport) -> dict[str, Any]:
    """What was packed, beside the size of the dense net."""
    size = sum(4 * p.numel() for p in full.parameters())
    return {**dataclasses.asdict(packing), "dense_bytes": size, "ratio": size / packing.bytes}


def fine_tune_run(setting: Setting, small: nn.Module, split: Split) -> None:
    """Train what is left for a few epochs, shuffled by the seed."""
    generator = torch.Generator().manual_seed(setting.seed)
    optimizer = torch.optim.Adam(small.parameters(), lr=setting.lr)
    for epoch in range(setting.fine_tune):
        for group in optimizer.param_groups:
            group["lr"] = setting.lr * (1 - epoch / setting.fine_tune)
        order = torch.randperm(len(split.train[0]), generator=generator).split(setting.batch_size)
        batches = [(split.train[0][b], split.train[1][b]) for b in order]
        fine_tune(small, batches, nn.functional.cross_entropy, optimizer)


def run(name: str, directory: Path, results: Path) -> dict[str, Any]:
    """Train (or resume), measure and write one JSON."""
    setting = SETTINGS[name]
    split = load_split(setting)
    net, curve = fit(name, directory, split)
    start = time.perf_counter()
    figures = measure(setting, net, split, directory / name)
    record = {
        "setting": dataclasses.asdict(setting),
        "methods": {
            n: [to_json(v) for v in (m.posterior, m.prior, m.estimator) if v is not None]
            for n, m in net.named_modules()
            if isinstance(m, Variational)
        },
        "data": {"mnist": IMAGE_SETS["mnist"], "notmnist": IMAGE_SETS["notmnist"]},
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "machine": {"processor": platform.machine(), "threads": torch.get_num_threads()},
        "seconds": {
            "training": sum(e["seconds"] for e in curve),
            "measuring": time.perf_counter() - start,
        },
        **figures,
        "curve": curve,
    }
    results.mkdir(parents=True, exist_ok=True)
    (results / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    return record


if __name__ == "__main__":
    run(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
