"""A MobileNet-like CNN and a U-Net, slimmed, compared with alternatives in equal training time.

One trained model per seed. From it: `vardrop.slim`; channels pruned by their L1 norms; the cut of
Torch-Pruning (if it is installed); and a narrow model of the same kind from scratch. The last three
train for as many CPU seconds as `slim`, with the same optimizer and one cycle of the learning rate.
"""

from __future__ import annotations

import copy
import importlib.util
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments.slim import ResNet, Seed, macs, torch_pruning, train
from experiments.trainings import Watch, error, images
from vardrop.compression import shrink
from vardrop.compression.layer_views import affine_layers
from vardrop.compression.unit_gates import UnitGates
from vardrop.tuning import latencies, slim

_BATCH, _TIMED, _WARMUP = 128, 64, 0.3
Part = dict[str, float]


def _convolve(inputs: int, outputs: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> Any:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return conv, nn.BatchNorm2d(outputs)


class _Inverted(nn.Module):
    """Two pointwise convolutions with a depthwise one between them, and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        hidden = 2 * inputs
        self.body = nn.Sequential(
            *(*_convolve(inputs, hidden, 1), nn.ReLU(inplace=True)),
            *(*_convolve(hidden, hidden, 3, stride, hidden), nn.ReLU(inplace=True)),
            *_convolve(hidden, outputs, 1),
        )
        self.has_shortcut = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return y + x if self.has_shortcut else y


class MobileNet(nn.Module):
    """Five inverted residual blocks of 16 to 48 channels for images (N, 1, 28, 28).

    Args:
        width: factor on all numbers of channels.
    """

    def __init__(self, width: float = 1.0) -> None:
        super().__init__()
        a, b, c, d = (max(1, round(width * channels)) for channels in (16, 32, 48, 96))
        self.stem = nn.Sequential(*_convolve(1, a, 3, 2), nn.ReLU(inplace=True))
        blocks = _Inverted(a, a), _Inverted(a, b, 2), _Inverted(b, b), _Inverted(b, c, 2)
        self.blocks = nn.Sequential(*blocks, _Inverted(c, c))
        self.top = nn.Sequential(*_convolve(c, d, 1), nn.ReLU(inplace=True))
        self.last = nn.Linear(d, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.top(self.blocks(self.stem(x))).mean((2, 3)))


def _convolve_twice(inputs: int, outputs: int) -> nn.Module:
    relu = nn.ReLU(inplace=True)
    return nn.Sequential(*_convolve(inputs, outputs), relu, *_convolve(outputs, outputs), relu)


class UNet(nn.Module):
    """Three resolutions of 16, 32 and 64 channels, down and up again, for images (N, 1, 28, 28).

    Args:
        width: factor on all numbers of channels.
    """

    def __init__(self, width: float = 1.0) -> None:
        super().__init__()
        a, b, c = (max(1, round(width * channels)) for channels in (16, 32, 64))
        self.stem = nn.Sequential(*_convolve(1, a, 3, 2), nn.ReLU(inplace=True))
        self.one, self.two, self.bottom = map(_convolve_twice, (a, a, b), (a, b, c))
        self.up_two, self.up_one = map(_convolve_twice, (c + b, b + a), (b, a))
        self.pool, self.last = nn.MaxPool2d(2), nn.Linear(a, 10)

    def forward(self, x: Tensor) -> Tensor:
        one = self.one(self.stem(x))
        two = self.two(self.pool(one))
        y = functional.interpolate(self.bottom(self.pool(two)), size=two.shape[2:])
        y = self.up_two(torch.cat([y, two], 1))
        y = functional.interpolate(y, size=one.shape[2:])
        return self.last(self.up_one(torch.cat([y, one], 1)).mean((2, 3)))


_KINDS: dict[str, Callable[..., nn.Module]] = {
    "MobileNet": MobileNet, "U-Net": UNet, "ResNet": ResNet,
}  # fmt: skip


def _make(kind: str, seed: int, **width: float) -> nn.Module:
    """An untrained model with its kernels in the faster layout."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = _KINDS[kind](**width)
    return net.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


class _TimedLoss:
    """The cross-entropy, and the CPU seconds from its first to its last training step."""

    def __init__(self) -> None:
        self.begin = self.end = 0.0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        if output.requires_grad:
            self.end = time.process_time()
            self.begin = self.begin or self.end
        return functional.cross_entropy(output, target)


def _train_for(
    seconds: float, lr: float, seed: int, x: Tensor, y: Tensor, net: nn.Module
) -> nn.Module:
    """Adam with one cycle of the learning rate in a number of CPU seconds, in place."""
    optimizer, begin = torch.optim.Adam(net.parameters(), lr), time.process_time()
    generator = torch.Generator().manual_seed(seed)
    order: list[Tensor] = []
    net.train()
    while (done := (time.process_time() - begin) / seconds) < 1:
        if done < _WARMUP:
            factor = max(0.04, (1 - math.cos(math.pi * done / _WARMUP)) / 2)
        else:
            factor = (1 + math.cos(math.pi * (done - _WARMUP) / (1 - _WARMUP))) / 2
        optimizer.param_groups[0]["lr"] = lr * factor
        order = order or list(torch.randperm(len(x), generator=generator).split(_BATCH))
        rows = order.pop()
        optimizer.zero_grad()
        if len(rows) > 1:  # BatchNorm needs two
            functional.cross_entropy(net(x[rows]), y[rows]).backward()
            optimizer.step()
    return net.eval()


def prune_l1(net: nn.Module, x: Tensor, fraction: float) -> nn.Module:
    """The channels of the largest L1 norms, with one ratio for all layers, within the MACs.

    Channels that can only be removed together are ranked by the sum of their norms.
    """
    net = copy.deepcopy(net)
    gates, layers = UnitGates(net, (x[:1],)), affine_layers(net)
    norms = {name: view.weight.abs().flatten(1).sum(1) for name, view in layers.items()}
    scores = [sum(float(norms[n][i]) for u in m for n, i in u.emitters) for m in gates.units]
    gates.logit.data = 10 + torch.tensor(scores)  # the gates are wide open: they scale nothing
    low, high = 0.0, 1.0
    for _ in range(12):
        middle = (low + high) / 2
        fits = float(gates.cost(gates.evenly(middle))) <= fraction
        low, high = (middle, high) if fits else (low, middle)
    gates.fold(net, gates.evenly(low))
    small = shrink(net, x[:1], progress=False).net
    return small.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def _narrow(kind: str, seed: int, x: Tensor, budget: float) -> nn.Module:
    """The widest untrained model of a kind within a number of MACs, one factor for all layers."""
    widths = (1 - step / 200 for step in range(200))
    return next(n for w in widths if macs(n := _make(kind, seed, width=w), x) <= budget)


def slim_cnns(
    seed: int,
    kinds: Sequence[str] = ("MobileNet", "U-Net"),
    timed: Sequence[str] = ("ResNet",),
    examples: int = 4000,
    validated: int = 1000,
    dense_epochs: int = 10,
    epochs: int = 10,
    lr: float = 4e-3,
    fractions: Sequence[float] = (0.5, 0.25),
    runtimes: Sequence[str] = ("torch", "onnxruntime"),
    watch: Watch | None = None,
) -> dict[str, Any]:
    """Test accuracy in percent, MACs, CPU seconds and latency, by model, fraction and row.

    Of the models in `timed` only `slim` to half of the MACs is measured.
    """
    everything, test = images("fashion-mnist"), images("fashion-mnist", "test")
    x, y = everything.x[:examples], everything.y[:examples]
    later = slice(examples, examples + validated)
    validation = everything.x[later], everything.y[later]
    has_peer = importlib.util.find_spec("torch_pruning") is not None
    parts = len(kinds) * (1 + len(fractions) * (3 + has_peer)) + 2 * len(timed)
    progress = Seed(seed, watch or Watch(), parts)

    def measure(start: nn.Module, net: nn.Module, seconds: float) -> Part:
        nets = {"before": start, "after": net}
        times = latencies(nets, (x[:_TIMED],), tuple(runtimes))
        left = {f"latency in {name}": t["after"] / t["before"] for name, t in times.items()}
        share = macs(net, x) / macs(start, x)
        return {"accuracy": 100 - error(net, *test), "MACs": share, "seconds": seconds, **left}

    def slim_net(start: nn.Module, fraction: float) -> Part:
        loss = _TimedLoss()
        net = slim(start, (x, y), validation, macs=fraction, epochs=epochs, lr=lr, seed=seed,
                   loss=loss, runtimes=["torch"]).net  # fmt: skip
        return measure(start, net, loss.end - loss.begin)

    def train_net(start: nn.Module, make: Callable[[], nn.Module], seconds: float) -> Part:
        return measure(start, _train_for(seconds, lr, seed, x, y, make()), seconds)

    figures: Part = {}
    for kind in (*kinds, *timed):
        start = progress.trained(
            _make(kind, seed),
            partial(train, x=x, y=y, epochs=dense_epochs, lr=lr, seed=seed),
            f"{kind} trained",
        )
        figures[f"accuracy, {kind}"] = 100 - error(start, *test)
        for fraction in fractions if kind in kinds else (0.5,):
            makers = {
                "pruned channels": partial(prune_l1, start, x, fraction),
                "Torch-Pruning": partial(torch_pruning, start, x, fraction),
                "narrow from scratch": partial(_narrow, kind, seed, x, fraction * macs(start, x)),
            }
            if not has_peer:
                del makers["Torch-Pruning"]
            rows = {"slim": partial(slim_net, start, fraction)}
            seconds = progress.part(f"{kind} {fraction} slim", rows["slim"])["seconds"]
            if kind in kinds:
                rows |= {r: partial(train_net, start, m, seconds) for r, m in makers.items()}
            for row, compute in rows.items():
                measured = progress.part(f"{kind} {fraction} {row}", compute)
                where = f"{kind} at {fraction:g}, {row}"
                figures |= {f"{name}, {where}": value for name, value in measured.items()}
    return {"figures": figures}
