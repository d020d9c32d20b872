"""Frozen predictors in plain forward passes: python benchmarks/serving.py [seconds per case].

32 draws by a predictor of `freeze`, by moments and by `predict`, in units of the plain net in
torch; and as graphs in onnxruntime, in units of the plain net there. Every round runs every
contender once, in turn; medians of processor time on one thread, with the least time beside it,
which other work on the machine moves less. The figures go to serving.json.
"""

from __future__ import annotations

import copy
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from machine import facts
from torch import Tensor, nn

import vardrop as vd
from nets import lenet5, mlp

SAMPLES = 32
HERE = Path(__file__).parent
Run = Callable[[], object]
CASES: dict[str, Callable[[], nn.Module]] = {
    "MLP 784-300-100-10": lambda: mlp(784, 300, 100, 10),
    "LeNet-5": lenet5,
}


def rounds(runs: dict[str, tuple[Run, int]], seconds: float) -> dict[str, list[float]]:
    """Processor seconds of a call in every round, all contenders in turn."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run, _ in runs.values():
        run()
    end = time.perf_counter() + seconds
    while len(times["plain"]) < 3 or time.perf_counter() < end:
        for name, (run, often) in runs.items():
            start = time.process_time()
            for _ in range(often):
                run()
            times[name].append((time.process_time() - start) / often)
    return times


def ratios(runs: dict[str, tuple[Run, int]], seconds: float) -> dict[str, Any]:
    times = rounds(runs, seconds)
    middle, least = statistics.median(times["plain"]), min(times["plain"])
    found: dict[str, Any] = {"plain, us": round(1e6 * middle, 1)}
    for name, values in times.items():
        found[name] = [round(statistics.median(values) / middle, 2), round(min(values) / least, 2)]
    return found


def in_torch(plain: nn.Module, net: nn.Module, x: Tensor, seconds: float) -> dict[str, Any]:
    def forward() -> Tensor:
        with torch.no_grad():
            return plain(x)  # type: ignore[no-any-return]

    often, few = (200, 20) if len(x) == 1 else (4, 1)
    frozen, analytic = vd.freeze(net, samples=SAMPLES), vd.freeze(net, SAMPLES, mode="moments")
    runs: dict[str, tuple[Run, int]] = {
        "plain": (forward, often),
        "predict": (lambda: vd.predict(net, x, SAMPLES), few),
        "frozen": (lambda: frozen(x), few),
        "frozen, moments": (lambda: analytic(x), few),
    }
    compiled = torch.compile(analytic.graph(x))

    def moments() -> object:
        with torch.no_grad():
            return compiled(x)

    runs["moments, compiled"] = (moments, few)
    if len(x) > 1:
        whole = vd.freeze(net, samples=SAMPLES, draw="functions")
        runs["frozen, weight draws"] = (lambda: whole(x), 1)
    return ratios(runs, seconds)


def in_onnxruntime(plain: nn.Module, net: nn.Module, x: Tensor, seconds: float) -> dict[str, Any]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    names, feed = ("probs", "epistemic"), {"x": x.numpy()}

    def graph(net: nn.Module, **more: Any) -> Run:
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "net.onnx")
            vd.export_onnx(net, x[:1], path, **more)
            session = onnxruntime.InferenceSession(path, options)
        own = {session.get_inputs()[0].name: feed["x"]}
        return lambda: session.run(None, own)

    often = 50 if len(x) == 1 else 1
    frozen, analytic = vd.freeze(net, samples=SAMPLES), vd.freeze(net, SAMPLES, mode="moments")
    runs: dict[str, tuple[Run, int]] = {
        "plain": (graph(plain), 4 * often),
        "draws": (graph(frozen, outputs=names), often),
        "moments": (graph(analytic, outputs=names), often),
    }
    return ratios(runs, seconds)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 10.0
    found: dict[str, Any] = {"machine": facts(), "load": os.getloadavg()[0], "cases": {}}
    for name, build in CASES.items():
        for rows in (1, 256):
            plain = build().eval()
            net = vd.convert(copy.deepcopy(plain), vd.sparse_vd()).eval()
            x = torch.randn(rows, 1, 28, 28)
            case = {"torch": in_torch(plain, net, x, seconds)}
            case["onnxruntime"] = in_onnxruntime(plain, net, x, seconds / 2)
            found["cases"][f"{name} b{rows}"] = case
            print(name, rows, json.dumps(case), flush=True)
            (HERE / "serving.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
