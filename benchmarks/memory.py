"""Peak memory, each figure in a process of its own: python benchmarks/memory.py <what> <name>.

The allocator is told to give freed tensors back, so that what is resident is in use (Linux).
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys

import torch
from measuring import Row, Run, figure, plain_step
from train_step import noisy_step

import vardrop as vd
from nets import TRAIN, mlp

STEPS = {
    "plain": plain_step,
    "sparse_vd": lambda net, x, y: noisy_step(net, vd.sparse_vd(), x, y, None),
    "sparse_vd, KL value every 10": lambda net, x, y: noisy_step(
        net, vd.sparse_vd(), x, y, None, every=10
    ),
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


def prediction_memory(samples: int = 10_000, few: int = 2000) -> dict[str, object]:
    """Peak memory of many draws over that of a few blocks of draws, both keeping nine draws."""
    net = vd.convert(mlp(784, 300, 100, 10), vd.sparse_vd()).eval()
    x = torch.randn(256, 1, 28, 28)

    def median_peak(
        draws: int,
    ) -> int:  # of several calls: the allocator keeps freed memory at times
        return statistics.median_low(
            peak(lambda: vd.predict(net, x, draws, keep=9)) for _ in range(5)
        )

    median_peak(few)  # the first calls allocate what later ones reuse
    one, many = median_peak(few), median_peak(samples)
    return {
        "case": "memory, MLP, batch 256",
        f"{few} draws, kB": one,
        f"{samples} draws, kB": many,
        "ratio": round(many / one, 2),
    }


def train_peak(case: str, candidate: str) -> int:
    """Kilobytes that a net, its optimizer and three steps need above an idle process."""
    chosen = next(c for c in TRAIN if c.name == case)
    x, y = chosen.data()
    STEPS[candidate](mlp(784, 10, 10), torch.rand(8, 784), torch.randint(10, (8,)))()

    def run() -> None:
        step = STEPS[candidate](chosen.make(), x, y)
        for _ in range(3):
            step()

    return peak(run)


def _elsewhere(*arguments: str) -> str:
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, __file__, *arguments],
        env=environment, check=True, capture_output=True, text=True,
    )  # fmt: skip
    return done.stdout.splitlines()[-1]


def training(quick: bool) -> list[Row]:
    found = []
    for case in TRAIN[: 3 if quick else None]:
        names = [name for name in STEPS if not (quick and name == "sparse_vd")]
        kilobytes = {name: int(_elsewhere("train", case.name, name)) for name in names}
        found += [
            figure("peak memory of a train step", case.name, n, k / kilobytes["plain"], f"{k} kB")
            for n, k in kilobytes.items()
        ]
    return found


def prediction(samples: int = 10_000) -> list[Row]:
    """Peak of many draws over that of few."""
    figures = json.loads(_elsewhere("predict", str(samples)))
    group = f"peak memory of {samples} draws, 2000 draws = 1"
    case, ratio = figures.pop("case"), figures.pop("ratio")
    note = ", ".join(f"{name}: {value}" for name, value in figures.items())
    return [figure(group, case, "predict", ratio, note)]


def main() -> None:
    torch.set_num_threads(1)
    what, *rest = sys.argv[1:]
    print(train_peak(*rest) if what == "train" else json.dumps(prediction_memory(int(rest[0]))))


if __name__ == "__main__":
    main()
