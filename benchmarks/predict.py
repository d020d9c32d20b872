"""Time of a prediction, in passes of the plain model: python benchmarks/predict.py [seconds].

32 draws of models written as classes, with BatchNorm, max pooling and in-place ReLU, and of their
`nn.Sequential` twins. In every round each candidate runs once. The table has medians of processor
time on one thread over the median of the plain model, in its default memory layout and in
channels-last. The numbers are written to predict.json.
"""

from __future__ import annotations

import copy
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import vardrop as vd
from nets import Block, EncoderLayer

SAMPLES = 32
Run = Callable[[], object]


class CNN(nn.Module):
    """Two convolutions with BatchNorm, in-place ReLU and max pooling, and two dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32)
        self.conv2, self.norm2 = nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64)
        self.relu, self.pool = nn.ReLU(inplace=True), nn.MaxPool2d(2)
        self.dense, self.head = nn.Linear(64 * 49, 128), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.relu(self.norm1(self.conv1(x))))
        x = self.pool(self.relu(self.norm2(self.conv2(x))))
        return self.head(self.relu(self.dense(x.flatten(1))))

    def twin(self) -> nn.Sequential:
        """The same layers in a row."""
        return nn.Sequential(
            self.conv1, self.norm1, self.relu, self.pool, self.conv2, self.norm2, self.relu,
            self.pool, nn.Flatten(), self.dense, self.relu, self.head,
        )  # fmt: skip


class MLP(nn.Module):
    """784-300-100-10 with in-place ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(784, 300), nn.Linear(300, 100)
        self.relu, self.head = nn.ReLU(inplace=True), nn.Linear(100, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.relu(self.second(self.relu(self.first(x.flatten(1))))))

    def twin(self) -> nn.Sequential:
        """The same layers in a row."""
        return nn.Sequential(nn.Flatten(), self.first, self.relu, self.second, self.relu, self.head)


class ResNet(nn.Module):
    """ResNet-18 of a quarter of its width."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        sizes = ((16, 16, 1), (16, 32, 2), (32, 64, 2), (64, 128, 2))
        blocks = (b for i, o, s in sizes for b in (Block(i, o, s), Block(o, o, 1)))
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(torch.relu_(self.norm(self.stem(x))))
        return self.head(x.mean((2, 3)))


class Encoder(nn.Module):
    """One encoder layer over 64 positions of width 128."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = EncoderLayer(128, 4), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x).mean(1))


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "CNN b256": (CNN, (256, 1, 28, 28)),
    "MLP b256": (MLP, (256, 1, 28, 28)),
    "CNN b1": (CNN, (1, 1, 28, 28)),
    "MLP b1": (MLP, (1, 1, 28, 28)),
    "ResNet-18/4 b32": (ResNet, (32, 3, 32, 32)),
    "encoder layer b32": (Encoder, (32, 64, 128)),
}


def candidates(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> dict[str, Run]:
    """The plain model and every way to predict, for one case."""
    torch.manual_seed(0)
    plain, x = make().eval(), torch.randn(shape)
    recipes = {"": vd.sparse_vd(), ", Flipout": vd.bayes_by_backprop(estimator=vd.flipout)}
    runs: dict[str, Run] = {"plain": lambda: plain(x)}
    if x.dim() == 4:
        last = copy.deepcopy(plain).to(memory_format=torch.channels_last)
        images = x.contiguous(memory_format=torch.channels_last)
        runs["plain, channels-last"] = lambda: last(images)
    for name, recipe in recipes.items():
        net = vd.convert(copy.deepcopy(plain), recipe).eval()
        nets = {"class": net}
        if hasattr(net, "twin"):
            nets["Sequential"] = net.twin()
        for kind, model in nets.items():
            kept = vd.Predictor(model, SAMPLES)
            runs[f"predict, {kind}{name}"] = lambda model=model: vd.predict(model, x, SAMPLES)
            runs[f"Predictor, {kind}{name}"] = lambda kept=kept: kept(x)
    return runs


@torch.no_grad()
def measure(runs: dict[str, Run], seconds: float) -> dict[str, float]:
    """Median processor seconds of every candidate, in turn."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
        run()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["plain"]) < 5:
        for name, run in runs.items():
            repeats = 5 if name.startswith("plain") else 1
            start = time.process_time()
            for _ in range(repeats):
                run()
            times[name].append((time.process_time() - start) / repeats)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    torch.set_num_threads(1)
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 20.0
    passes: dict[str, dict[str, float]] = {}
    for case, (make, shape) in CASES.items():
        medians = measure(candidates(make, shape), seconds)
        passes[case] = {name: round(t / medians["plain"], 2) for name, t in medians.items()}
        passes[case]["plain, ms"] = round(1e3 * medians["plain"], 4)
        print(case, json.dumps(passes[case], indent=1), flush=True)
    Path(__file__).with_suffix(".json").write_text(json.dumps(passes, indent=1) + "\n")


if __name__ == "__main__":
    main()
