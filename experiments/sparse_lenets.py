"""Sparse variational dropout on the LeNets: a training that can be interrupted at any epoch."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from experiments.nets import lenet5, mlp
from vardrop.compression import load
from vardrop.conversion import convert
from vardrop.data import load_images
from vardrop.noisy import log_alpha
from vardrop.objective import ELBO, Categorical, linear_warmup, parameter_groups
from vardrop.posteriors import MultiplicativeGaussian
from vardrop.priors import LogUniform
from vardrop.recipes import Recipe, sparse_vd

NETS: dict[str, Callable[[], nn.Module]] = {
    "lenet300": lambda: mlp(784, 300, 100, 10),
    "lenet5": lenet5,
}


@dataclasses.dataclass(frozen=True)
class Setting:
    """One run: Adam, its rate times a factor that is linear between the knots (epoch, factor)."""

    net: str
    knots: tuple[tuple[int, float], ...]
    warmup: tuple[int, int] | None  # of the KL, in epochs
    batch_size: int = 100
    lr: float = 1e-3
    validation: int = 5000
    seed: int = 0
    max_drop: float = 0.002  # of validation accuracy, for the threshold
    fine_tune: int = 0  # epochs after shrinking
    start: str = ""  # the run whose small net this one goes on with
    shared: str = ""  # the layer whose weights share one alpha for each of its inputs
    noise_rate: float = 1.0  # the rate of noise parameters, in terms of the others'

    @property
    def epochs(self) -> int:
        """The last knot."""
        return self.knots[-1][0]

    def factor(self, epoch: int) -> float:
        """What the learning rates are multiplied by in an epoch."""
        for (a, start), (b, end) in zip(self.knots, self.knots[1:], strict=False):
            if a <= epoch < b:
                return start + (end - start) * (epoch - a) / (b - a)
        return self.knots[-1][1]


SETTINGS = {
    "lenet300": Setting("lenet300", ((0, 1.0), (100, 1.0), (125, 0.75), (145, 0.0)), (5, 20)),
    "lenet5": Setting("lenet5", ((0, 1.0), (4, 1.0), (10, 0.0)), (1, 4)),
    # Noise on single weights leaves nearly every channel something to do. One alpha for each input
    # channel of the second convolution takes whole channels out of the first.
    "lenet5_channels": Setting(
        "lenet5",
        ((0, 1.0), (6, 1.0), (10, 0.0)),
        None,
        start="lenet5",
        shared="3",
        noise_rate=10.0,
        max_drop=0.005,
        fine_tune=5,
    ),
}


@dataclasses.dataclass(frozen=True)
class Split:
    """MNIST minus its mean image; `validation` comes from the end of the training data."""

    train: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    mean: Tensor


def load_split(setting: Setting) -> Split:
    """The data of a run."""
    (x, y), (test_x, test_y) = load_images("mnist"), load_images("mnist", "test")
    n = len(x) - setting.validation
    mean = x[:n].mean(0)
    return Split((x[:n] - mean, y[:n]), (x[n:] - mean, y[n:]), (test_x - mean, test_y), mean)


def fresh(setting: Setting, directory: Path) -> nn.Module:
    """The noisy net before training: dense weights N(0, 0.01^2), biases 0, kernels as in torch."""
    if setting.start:
        saved = directory / setting.start / "net.safetensors"
        net = load(saved, into=NETS[setting.net]()).train()
        convert(net, Recipe(MultiplicativeGaussian(0.02, "input"), LogUniform()), setting.shared)
        return convert(net, sparse_vd(), exclude=setting.shared)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(setting.seed)
        net = NETS[setting.net]()
        for module in net.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.01)
                nn.init.zeros_(module.bias)
    return convert(net, sparse_vd())


def error(net: nn.Module, data: tuple[Tensor, Tensor]) -> float:
    """Share of wrong answers, in per cent."""
    net.eval()
    with torch.no_grad():
        wrong = sum(
            int((net(x).argmax(1) != y).sum())
            for x, y in zip(data[0].split(1000), data[1].split(1000), strict=True)
        )
    return 100.0 * wrong / len(data[1])


def masked_figures(net: nn.Module, data: tuple[Tensor, Tensor]) -> tuple[float, float]:
    """Validation error and |W| / |W != 0| of the net without the weights of log alpha >= 3."""
    weights: dict[str, Any] = {name: net.get_submodule(name).weight for name in log_alpha(net)}
    kept = {name: la < 3 for name, la in log_alpha(net).items()}
    before = {name: w.detach().clone() for name, w in weights.items()}
    with torch.no_grad():
        for name, w in weights.items():
            w.mul_(kept[name])
        wrong = error(net, data)
        for name, w in weights.items():
            w.copy_(before[name])
    left = sum(int(k.sum()) for k in kept.values())
    return wrong, sum(k.numel() for k in kept.values()) / max(left, 1)


def _train_epoch(
    setting: Setting, epoch: int, elbo: ELBO, optimizer: torch.optim.Optimizer, split: Split
) -> tuple[float, float]:
    """One epoch whose shuffling and noise follow from the seed and the epoch alone."""
    for group in optimizer.param_groups:
        group["lr"] = group["base"] * setting.factor(epoch)
    elbo.set_beta(linear_warmup(*setting.warmup)(epoch) if setting.warmup else 1.0)
    elbo.train()
    x, y = split.train
    nll = kl = torch.zeros(())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1000 * (setting.seed + 1) + epoch)
        batches = torch.randperm(len(x)).split(setting.batch_size)
        for batch in batches:
            out = elbo(x[batch], y[batch])
            optimizer.zero_grad(set_to_none=True)
            out.loss.backward()
            optimizer.step()
            nll, kl = nll + out.nll.detach(), kl + out.kl.detach()
    return float(nll) / len(batches), float(kl) / len(batches)


def fit(name: str, directory: Path, split: Split) -> tuple[nn.Module, list[dict[str, Any]]]:
    """Train, or go on from the last checkpoint of `name`; the net and its curve."""
    setting, checkpoint = SETTINGS[name], directory / name / "checkpoint.pt"
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    net = fresh(setting, directory)
    elbo = ELBO(net, Categorical(), num_data=len(split.train[0]))
    groups = parameter_groups(elbo, setting.lr, setting.lr * setting.noise_rate)
    optimizer = torch.optim.Adam(groups, fused=True)
    for group in optimizer.param_groups:
        group["base"] = group["lr"]
    curve: list[dict[str, Any]] = []
    if checkpoint.is_file():
        state = torch.load(checkpoint, weights_only=True)
        net.load_state_dict(state["net"])
        curve = json.loads(state["curve"])
        if len(curve) < setting.epochs:
            optimizer.load_state_dict(state["optimizer"])
    for epoch in range(len(curve), setting.epochs):
        start = time.perf_counter()
        nll, kl = _train_epoch(setting, epoch, elbo, optimizer, split)
        seconds = time.perf_counter() - start
        wrong, ratio = masked_figures(net, split.validation)
        curve.append(
            {"epoch": epoch, "nll": nll, "kl": kl, "beta": float(elbo.beta),
             "validation_error": wrong, "compression": ratio, "seconds": seconds}
        )  # fmt: skip
        print(json.dumps(curve[-1]), flush=True)
        _save(checkpoint, net, optimizer, curve)
    return net.eval(), curve


def _save(
    path: Path, net: nn.Module, optimizer: torch.optim.Optimizer, curve: list[dict[str, Any]]
) -> None:
    state = {
        "net": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "curve": json.dumps(curve),
    }
    torch.save(state, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)
