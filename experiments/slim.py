"""Slimming a trained net to a fraction of its MACs, beside Torch-Pruning and beside training on.

One trained net per seed. From it: the same net trained on for as many epochs; `vardrop.slim`; and
Torch-Pruning's one-shot cut (group magnitudes, one ratio for all layers, found by bisection) with
as many epochs afterwards. Optimizer, cycle of the learning rate and images are the same. Settings
of `slim` were chosen on images 30 000 to 35 000 of the training set, which nothing else sees.
"""

from __future__ import annotations

import copy
import importlib
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments.trainings import Watch, error, images, lenet5
from vardrop._core.errors import VardropError
from vardrop._core.files import read_tensors, write_atomically, write_tensors
from vardrop.app.store import CHECKPOINT
from vardrop.objective import parameter_groups
from vardrop.tuning import latencies, slim

_BATCH, _HELD_OUT, _TIMED = 128, 5000, 64
Part = dict[str, float]


class _Block(nn.Module):
    """Two convolutions with BatchNorm beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            projection = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(self.conv1(x)).relu()
        return (self.norm2(self.conv2(y)) + self.shortcut(x)).relu()


class ResNet(nn.Module):
    """Three residual blocks of 16, 32 and 64 channels for images (N, 1, 28, 28)."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16)
        self.blocks = nn.Sequential(_Block(16, 16, 1), _Block(16, 32, 2), _Block(32, 64, 2))
        self.last = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.blocks(self.norm(self.stem(x)).relu()).mean((2, 3)))


def _by_pixel(net: nn.Module) -> nn.Module:
    """The net with the channels of its kernels side by side in memory, which is faster here."""
    return net.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def _resnet() -> nn.Module:
    return _by_pixel(ResNet())


def _vgg() -> nn.Module:
    """Six convolutions of 16 to 64 channels with BatchNorm, for images (N, 3, 32, 32)."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 16), (16, 32), (32, 64)):
        for before in (inputs, outputs):
            layers += [nn.Conv2d(before, outputs, 3, padding=1, bias=False)]
            layers += [nn.BatchNorm2d(outputs), nn.ReLU()]
        layers += [nn.MaxPool2d(2)]
    dense = (nn.Flatten(), nn.Linear(1024, 128), nn.ReLU(), nn.Linear(128, 10))
    return _by_pixel(nn.Sequential(*layers, *dense))


NETS: dict[str, Callable[[], nn.Module]] = {"resnet": _resnet, "lenet5": lenet5, "vgg": _vgg}


def train(
    net: nn.Module,
    x: Tensor,
    y: Tensor,
    epochs: int,
    lr: float,
    seed: int,
    weight_decay: float = 0.0,
    loss: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> nn.Module:
    """Adam with one cycle of the learning rate, in place; cross-entropy is the default loss."""
    loss = loss or (lambda inputs, targets: functional.cross_entropy(net(inputs), targets))
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(parameter_groups(net, lr, weight_decay=weight_decay))
    steps = max(1, len(x) // _BATCH)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=epochs * steps)
    net.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(x), generator=generator).split(_BATCH)[:steps]:
            optimizer.zero_grad()
            batch = x[rows], y[rows]
            value = (
                functional.cross_entropy(net(batch[0]), batch[1]) if loss is None else loss(*batch)
            )
            value.backward()
            optimizer.step()
            cycle.step()
    return net.eval()


def macs(net: nn.Module, x: Tensor) -> int:
    """Multiplications for one image, counted from the layers' own shapes."""
    found = 0

    def count(layer: Any, args: Any, output: Tensor) -> None:
        nonlocal found
        positions = output[0, 0].numel() if isinstance(layer, nn.Conv2d) else 1
        found += layer.weight.numel() * positions

    kinds = (nn.Conv2d, nn.Linear)
    handles = [m.register_forward_hook(count) for m in net.modules() if isinstance(m, kinds)]
    with torch.no_grad():
        net.eval()(x[:1])
    for handle in handles:
        handle.remove()
    return found


def torch_pruning(net: nn.Module, x: Tensor, fraction: float) -> nn.Module:
    """The mildest cut of Torch-Pruning that leaves at most this fraction of the MACs."""
    try:
        library: Any = importlib.import_module("torch_pruning")
    except ImportError as missing:
        raise VardropError(
            f"Expected the package torch_pruning to be installed, but got: {missing}. "
            "Install it with `pip install torch-pruning==1.6.1`."
        ) from missing
    before = macs(net, x)

    def cut(ratio: float) -> nn.Module:
        other = copy.deepcopy(net)
        last = [m for m in other.modules() if isinstance(m, nn.Linear)][-1]
        importance = library.importance.GroupMagnitudeImportance(p=2)
        library.pruner.MagnitudePruner(
            other, x[:64], importance=importance, pruning_ratio=ratio, ignored_layers=[last]
        ).step()
        return other

    low, high = 0.0, 0.95
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if macs(cut(middle), x) / before > fraction else (low, middle)
    return _by_pixel(cut(high))


class Seed:
    """The parts of one seed; each is kept when it is done, so that a cut run goes on."""

    def __init__(self, seed: int, watch: Watch, parts: int) -> None:
        self.seed, self.watch, self.parts, self.done = seed, watch, parts, 0

    def _said(self, name: str) -> None:
        self.done += 1
        if self.watch.tell is not None:
            self.watch.tell(self.done / self.parts, name)

    def part(self, name: str, compute: Callable[[], Part]) -> Part:
        """The figures of a part: those that are kept, or new ones."""
        folder = self.watch.directory
        path = None if folder is None else folder / f"{name}.json"
        if path is not None and path.is_file():
            self.done += 1
            return dict(json.loads(path.read_text()))
        found = compute()
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(found).encode())
        self._said(name)
        return found

    def trained(
        self, net: nn.Module, fit: Callable[[nn.Module], nn.Module], name: str = "trained"
    ) -> nn.Module:
        """The net that all others start from."""
        folder = self.watch.directory
        path = None if folder is None else folder / name / CHECKPOINT
        if path is not None and path.is_file():
            self.done += 1
            net.load_state_dict(read_tensors(path)[0])
            return net.eval()
        net = fit(net)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_tensors(path, net.state_dict())
        self._said(name)
        return net.eval()


def slim_beside_others(
    seed: int,
    net: str = "resnet",
    data: str = "fashion-mnist",
    examples: int = 30_000,
    dense_epochs: int = 3,
    epochs: int = 5,
    lr: float = 4e-3,
    fractions: Sequence[float] = (0.5, 0.25, 0.1),
    peer: bool = True,
    ways: Sequence[str] = ("torch", "onnxruntime"),
    watch: Watch | None = None,
) -> dict[str, Any]:
    """Test accuracy in per cent, MACs and latency that are left, by fraction."""
    everything, test = images(data), images(data, "test")
    x, y = everything.x[:examples], everything.y[:examples]
    later = slice(examples, examples + _HELD_OUT)
    held = everything.x[later], everything.y[later]
    parts = Seed(seed, watch or Watch(), 2 + len(fractions) * (1 + peer))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        start = NETS[net]()
    start = parts.trained(start, lambda n: train(n, x, y, dense_epochs, lr, seed))

    def accuracy(found: nn.Module) -> float:
        return 100 - error(found, *test)

    def slimmed(fraction: float) -> Part:
        found = slim(
            start, (x, y), held, macs=fraction, epochs=epochs, lr=lr, seed=seed, runtimes=["torch"]
        )
        return {"accuracy": accuracy(found.net), **left(found.net)}

    def pruned(fraction: float) -> Part:
        found = train(torch_pruning(start, x, fraction), x, y, epochs, lr, seed + 100)
        return {"accuracy": accuracy(found), **left(found)}

    def left(found: nn.Module) -> Part:
        nets = {"before": start, "after": found}
        times = latencies(nets, (x[:_TIMED],), tuple(ways))
        fractions = {f"latency by {way}": t["after"] / t["before"] for way, t in times.items()}
        return {"MACs": macs(found, x) / macs(start, x), **fractions}

    def dense() -> Part:
        longer = train(copy.deepcopy(start), x, y, epochs, lr, seed + 100)
        return {"accuracy, trained net": accuracy(start), "accuracy, trained on": accuracy(longer)}

    figures = parts.part("dense", dense)
    makers = {"slim": slimmed} | ({"Torch-Pruning": pruned} if peer else {})
    for fraction in fractions:
        found = {
            who: parts.part(f"{who} {fraction}", partial(f, fraction)) for who, f in makers.items()
        }
        for who, values in found.items():
            figures |= {f"{name} at {fraction:g}, {who}": value for name, value in values.items()}
        if peer:
            gap = found["slim"]["accuracy"] - found["Torch-Pruning"]["accuracy"]
            figures[f"accuracy at {fraction:g}, slim over Torch-Pruning"] = gap
    return {"figures": figures}


def slim_against_simple(
    seed: int,
    data: str = "fashion-mnist",
    examples: int = 10_000,
    validated: int = 2000,
    dense_epochs: int = 5,
    epochs: int = 5,
    narrow_epochs: int = 20,
    rates: Sequence[float] = (1e-3, 2e-3, 4e-3),
    fractions: Sequence[float] = (0.25, 0.1),
    watch: Watch | None = None,
) -> dict[str, Any]:
    """LeNet-5 at a fraction of its MACs: `slim`, pruned channels, and a narrow model from scratch.

    Channels are pruned by the L1 norm of their filters, with one ratio for all layers, and trained
    on for as many epochs as `slim`. The narrow model has the same layers and as many MACs, and
    trains from scratch for `narrow_epochs`, which take about as long as the trained model and
    `slim` together. The CPU seconds of all rows are reported. Every row chooses its learning rate
    from the same grid on validation images.
    """
    everything, test = images(data), images(data, "test")
    x, y = everything.x[:examples], everything.y[:examples]
    later = slice(examples, examples + validated)
    validation = everything.x[later], everything.y[later]
    parts = Seed(seed, watch or Watch(), 1 + 3 * len(fractions))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        start: nn.Module = lenet5()
    start = parts.trained(start, lambda net: train(net, x, y, dense_epochs, rates[-1], seed))

    def best(make: Callable[[float], nn.Module]) -> Part:
        clock = time.process_time()
        nets = [make(lr) for lr in rates]
        seconds = (time.process_time() - clock) / len(rates)
        net = min(nets, key=lambda net: error(net, *validation))
        share = macs(net, x) / macs(start, x)
        return {"accuracy": 100 - error(net, *test), "MACs": share, "seconds": seconds}

    def slim_net(fraction: float, lr: float) -> nn.Module:
        return slim(start, (x, y), validation, macs=fraction, epochs=epochs, lr=lr, seed=seed,
                    runtimes=["torch"]).net  # fmt: skip

    def prune_net(fraction: float, lr: float) -> nn.Module:
        return train(prune_channels(start, x, fraction), x, y, epochs, lr, seed + 100)

    def narrow_net(fraction: float, lr: float) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            net = lenet5(sizes=narrow_sizes(fraction * macs(start, x)))
        return train(net, x, y, narrow_epochs, lr, seed)

    makers = {"slim": slim_net, "pruned channels": prune_net, "narrow from scratch": narrow_net}
    figures = {"accuracy, trained model": 100 - error(start, *test)}
    for fraction in fractions:
        for row, make in makers.items():
            scores = parts.part(f"{row} {fraction}", partial(best, partial(make, fraction)))
            figures |= {f"{key} at {fraction:g}, {row}": value for key, value in scores.items()}
    return {"figures": figures}


def narrow_sizes(budget: float) -> tuple[int, int, int]:
    """The widest LeNet-5 within a number of MACs, with one factor for all of its layers."""
    factor, sizes = 1.0, (20, 50, 500)
    while _lenet5_macs(sizes) > budget:
        factor -= 0.001
        first, second, third = (max(1, round(factor * size)) for size in (20, 50, 500))
        sizes = first, second, third
    return sizes


def _lenet5_macs(sizes: tuple[int, int, int]) -> int:
    first, second, units = sizes
    return 25 * first * (24**2 + second * 8**2) + units * (16 * second + 10)


@torch.no_grad()
def prune_channels(net: nn.Module, x: Tensor, fraction: float) -> nn.Module:
    """LeNet-5 with the units of the largest L1 norms, at a fraction of the MACs."""
    layers: list[Any] = [m for m in net.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    sizes = narrow_sizes(fraction * macs(net, x))
    with torch.random.fork_rng(devices=[]):
        small = lenet5(sizes=sizes)
    targets: list[Any] = [m for m in small.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    inputs = torch.arange(1)
    for source, target, size in zip(layers, targets, (*sizes, 10), strict=True):
        norms = source.weight.abs().flatten(1).sum(1)
        units = norms.topk(size).indices.sort().values if size < len(norms) else torch.arange(size)
        target.weight.copy_(source.weight[units][:, inputs])
        target.bias.copy_(source.bias[units])
        inputs = units
        if target is targets[1]:  # each channel is 4 x 4 inputs of the dense layer
            inputs = (16 * units.unsqueeze(1) + torch.arange(16)).flatten()
    return small
