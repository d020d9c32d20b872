"""Speed and memory of prediction, as ratios in one run: python benchmarks/predict.py [rounds].

32 draws by `predict` against loops over the same net, and against the loops of other libraries in
the environments that peers.py makes. Every round runs every contender once, in turn; medians of
processor time on one thread, so that other work on the machine weighs on all alike. The figures go
to predict.json.
"""

from __future__ import annotations

import copy
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import vardrop as vd
from nets import lenet5, mlp
from vardrop.prediction import predict
from vardrop.prediction.moments import propagate

SAMPLES = 32
HERE = Path(__file__).parent
ENVIRONMENTS = Path.home() / ".cache" / "vardrop-bench"
PEERS = ("torchbnn", "bayesian-torch", "cplxmodule")
LOOPS = ("loop of local reparameterisation", "loop of weight draws")
Run = Callable[[], object]


def lrt_loop(net: nn.Module, x: Tensor) -> Run:
    """What a user writes by hand: the noise on, a forward pass a draw, the mean probability."""

    def run() -> Tensor:
        with torch.no_grad(), vd.sampling(net):
            total = torch.zeros(())
            for _ in range(SAMPLES):
                total = total + net(x).softmax(1)
            return total / SAMPLES

    return run


def weight_loop(net: nn.Module, x: Tensor) -> Run:
    """A loop that draws all weights for every pass, as weight-sampling libraries do."""
    sampled = copy.deepcopy(net)
    for module in sampled.modules():
        if hasattr(module, "estimator"):
            module.estimator = vd.weight_sample
    return lrt_loop(sampled, x)


def peer_loops(seconds: float) -> dict[str, dict[str, float]]:
    """Loops of other libraries in plain forward passes, by case; each in its own environment."""
    found: dict[str, dict[str, float]] = {}
    for name in PEERS:
        done = subprocess.run(
            [str(ENVIRONMENTS / name / "bin" / "python"), str(HERE / "peer_loops.py"), name,
             str(seconds)],
            env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=True,
        )  # fmt: skip
        for case, ratios in json.loads(done.stdout.splitlines()[-1]).items():
            found.setdefault(case, {}).update(ratios)
    return found


def medians(contenders: dict[str, Run], rounds: int, seconds: float = 8.0) -> dict[str, float]:
    """Median processor seconds of each, all contenders in turn in every round.

    Short contenders have more rounds than asked for: until the seconds are over.
    """
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for run in contenders.values():
        run()
    end = time.perf_counter() + seconds
    while len(times["plain"]) < rounds or time.perf_counter() < end:
        for name, run in contenders.items():
            start = time.process_time()
            run()
            times[name].append(time.process_time() - start)
    return {name: statistics.median(t) for name, t in times.items()}


def repeated(run: Run, times: int) -> Run:
    def many() -> None:
        for _ in range(times):
            run()

    return many


def speed(name: str, build: Callable[[], nn.Module], batch: int, rounds: int) -> dict[str, Any]:
    """Every way to predict and two loops by hand, in plain forward passes."""
    plain = build().eval()
    net = vd.convert(copy.deepcopy(plain), vd.sparse_vd()).eval()
    x = torch.randn(batch, 1, 28, 28)

    def forward() -> Tensor:
        with torch.no_grad():
            return plain(x)  # type: ignore[no-any-return]

    # Short calls are repeated, so that each finds the caches as it leaves them.
    often, few = (200, 20) if batch == 1 else (5, 1)
    runs: dict[str, tuple[Run, int]] = {
        "plain": (forward, often),
        "moments": (lambda: propagate(net, x), few),
        "predict": (lambda: predict(net, x, SAMPLES), few),
        "weights": (lambda: predict(net, x, SAMPLES, draw="functions"), 1),
        LOOPS[0]: (lrt_loop(net, x), 1),
        LOOPS[1]: (weight_loop(net, x), 1),
    }
    found = medians({k: repeated(*run) for k, run in runs.items()}, rounds)
    found = {k: v / runs[k][1] for k, v in found.items()}
    return {
        "case": f"{name} b{batch}",
        "plain, us": round(1e6 * found["plain"], 1),
        "forwards": {k: round(v / found["plain"], 1) for k, v in found.items()},
        "faster than": {k: round(found[k] / found["predict"], 2) for k in LOOPS},
    }


def _resident(field: str) -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field))


def peak(run: Run) -> int:
    """Kilobytes above the resident set before the call (Linux)."""
    with open("/proc/self/clear_refs", "w") as reset:
        reset.write("5")
    before = _resident("VmRSS")
    run()
    return _resident("VmHWM") - before


def memory(samples: int = 10_000) -> dict[str, object]:
    """Peak memory of many draws against that of few, both keeping few."""
    net = vd.convert(mlp(784, 300, 100, 10), vd.sparse_vd()).eval()
    x, few = torch.randn(256, 1, 28, 28), 9

    def run(draws: int) -> object:
        return predict(net, x, draws, keep=few)

    run(few)  # what a first call leaves behind
    one, many = peak(lambda: run(few)), peak(lambda: run(samples))
    return {
        "case": "memory, MLP, batch 256",
        f"{few} draws, kB": one,
        f"{samples} draws, kB": many,
        "ratio": round(many / one, 2),
    }


def memory_in_a_process_of_its_own() -> dict[str, Any]:
    """With an allocator that gives freed tensors back, so that what is resident is in use."""
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}
    command = [sys.executable, __file__, "memory"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)  # type: ignore[no-any-return]


CASES: dict[str, Callable[[], nn.Module]] = {
    "MLP 784-300-100-10": lambda: mlp(784, 300, 100, 10),
    "LeNet-5": lambda: lenet5().to(memory_format=torch.channels_last),
}


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if sys.argv[1:] == ["memory"]:
        print(json.dumps(memory()), flush=True)
        return
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    cases = [speed(name, CASES[name], n, rounds) for name in CASES for n in (256, 1)]
    peers = peer_loops(seconds=2.0)
    for case in cases:
        case["peers, forwards"] = peers[case["case"]]
        case["faster than the fastest peer"] = round(
            min(peers[case["case"]].values()) / case["forwards"]["predict"], 2
        )
    found = {"speed": cases, "memory": memory_in_a_process_of_its_own()}
    (HERE / "predict.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
