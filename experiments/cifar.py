"""CIFAR-10 on narrow nets: the papers' methods from one trained net, and attacks on two of them.

A VGG-like net of a quarter of the paper's width (13 convolutions and two dense layers, BatchNorm)
and ResNet-20, without augmentation. One dense net per seed; from it, for as many epochs each: the
same net trained on, sparse VD (Molchanov et al. 2017), Beta-Bernoulli gates (Lee et al. 2018), a
variance layer (Neklyudov et al. 2019), dropout at its place, and a DropMax head (Lee et al. 2018).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn

from experiments.diagnostics import accuracies
from experiments.lee_bb import prune
from experiments.neklyudov_uses import attack_curve
from experiments.trainings import Watch, batches, error, images
from vardrop.app.data import Images
from vardrop.conversion import convert
from vardrop.noisy import relevance
from vardrop.objective import ELBO, Categorical, linear_warmup, parameter_groups
from vardrop.recipes import beta_bernoulli, binary_dropout, dropmax, sparse_vd, variance_layer
from vardrop.tuning import Loop

_VGG = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))  # channels, convolutions
_BATCH = 100


class Vgg(nn.Module):
    """The VGG-like net of the papers at a fraction `k` of its width; inputs are standardised."""

    def __init__(self, channels: int = 3, k: float = 0.25) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.BatchNorm2d(channels, affine=False)]
        for wide, count in _VGG:
            for _ in range(count):
                conv = nn.Conv2d(channels, channels := int(k * wide), 3, padding=1, bias=False)
                layers += [conv, nn.BatchNorm2d(channels), nn.ReLU()]
            layers.append(nn.MaxPool2d(2, ceil_mode=True))
        self.features = nn.Sequential(*layers, nn.Flatten())
        self.hidden = nn.Linear(channels, channels, bias=False)
        self.norm = nn.BatchNorm1d(channels)
        self.last = nn.Linear(channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.hidden(self.features(x))).relu())


class _Block(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        stride = 1 if inputs == outputs else 2
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride == 2:
            projection = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(self.conv1(x)).relu()
        return (self.norm2(self.conv2(y)) + self.shortcut(x)).relu()


class ResNet20(nn.Module):
    """Nine residual blocks of 16, 32 and 64 channels, and a hidden dense layer for the noise."""

    def __init__(self, channels: int = 3) -> None:
        super().__init__()
        self.before = nn.BatchNorm2d(channels, affine=False)
        self.stem, self.stem_norm = nn.Conv2d(channels, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        widths = (16, 16, 16, 16, 32, 32, 32, 64, 64, 64)
        pairs = pairwise(widths)
        self.blocks = nn.Sequential(*(_Block(n, m) for n, m in pairs))
        self.hidden, self.norm = nn.Linear(64, 64, bias=False), nn.BatchNorm1d(64)
        self.last = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.stem_norm(self.stem(self.before(x))).relu()).mean((2, 3))
        return self.last(self.norm(self.hidden(x)).relu())


NETS: dict[str, Callable[[int], nn.Module]] = {"vgg": Vgg, "resnet20": ResNet20}


@dataclass(frozen=True)
class Method:
    """A recipe, where it goes, the learning rate of its noise, and what it removes."""

    recipe: Any
    where: str | None = None
    noise_lr: float | None = None
    removes: Literal["weights", "units", ""] = ""

    @property
    def drawn(self) -> bool:
        """Whether a prediction is that of an ensemble of draws."""
        return self.where == "hidden"


METHODS: dict[str, Method] = {
    "trained on": Method(None),
    "sparse VD": Method(sparse_vd(log_sigma2=-15.0), removes="weights"),
    "Beta-Bernoulli": Method(beta_bernoulli(a=2.127), noise_lr=1e-2, removes="units"),
    "variance layer": Method(variance_layer(), "hidden"),
    "dropout": Method(binary_dropout(0.5), "hidden"),
    "DropMax": Method(dropmax(), "last"),
}


def narrow_cifar(
    seed: int,
    net: str = "vgg",
    dense_epochs: int = 15,
    epochs: int = 15,
    methods: Sequence[str] = tuple(METHODS),
    epsilons: Sequence[float] = (),
    samples: int = 10,
    examples: int = 50_000,
    tests: int = 10_000,
    watch: Watch | None = None,
) -> dict[str, Any]:
    """Error in per cent of every method, what is left of its weights or units, and under attack.

    Args:
        seed: of everything that is drawn.
        net: "vgg" or "resnet20".
        dense_epochs: of the net that all start from.
        epochs: of every method after that.
        methods: keys of `METHODS`.
        epsilons: strengths of the fast gradient sign method, on the first 1000 test images, for
            the nets with noise on the hidden layer.
        samples: draws of an ensemble.
        examples, tests: images of each set.
        watch: keeps the trainings.
    """
    data, test = images("cifar10", count=examples), images("cifar10", "test", tests)
    watch = watch or Watch()
    part = 1 / (1 + 2 * len(methods))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        start = NETS[net](data.x.shape[1]).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        _train(watch, "dense", start, data, dense_epochs, seed, part)
    figures = {"error of the dense net, %": error(start, *test)}
    curve: list[dict[str, Any]] = []
    for name in methods:
        method, model = METHODS[name], copy.deepcopy(start)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed + 1)
            if method.recipe is not None:
                convert(model, method.recipe, method.where)
            _train(watch, name, model, data, epochs, seed + 1, 2 * part, method)
            figures |= _measured(model, name, test, samples)
            if method.drawn:
                some = Images(test.x[:1000], test.y[:1000])
                rights = attack_curve(model, some, tuple(epsilons), samples)
                curve += [
                    {"net": name, "epsilon": epsilon, "accuracy, %": 100 * right}
                    for epsilon, right in zip(epsilons, rights, strict=True)
                ]
    if {"trained on", "sparse VD"} <= set(methods):
        more = figures["error of sparse VD, %"] - figures["error of trained on, %"]
        figures["error, sparse VD less trained on, %"] = more
    attacked = {f"{r['net']}, epsilon {r['epsilon']:g}, %": r["accuracy, %"] for r in curve}
    return {"figures": figures | attacked, "curve": curve}


def _train(
    watch: Watch,
    name: str,
    net: nn.Module,
    data: Images,
    epochs: int,
    seed: int,
    fraction: float,
    method: Method | None = None,
) -> None:
    """Adam at 1e-3 falling linearly to 0; the KL grows over the first half of the epochs."""
    noisy = method is not None and method.recipe is not None
    elbo = ELBO(net, Categorical(), len(data.x), beta=1.0 if noisy else 0.0, kl_value_every=10)
    groups = parameter_groups(elbo, lr=1e-3, noise_lr=method.noise_lr if method else None)
    loop = Loop(
        elbo,
        torch.optim.Adam(groups, fused=True),
        *data,
        epochs,
        _BATCH,
        beta=linear_warmup(0, max(1, epochs // 2)) if noisy else None,
        rate=lambda epoch: 1 - epoch / epochs,
        seed=seed,
    )
    watch.fit(name, loop, fraction=fraction)


def _measured(net: nn.Module, name: str, test: Images, samples: int) -> dict[str, float]:
    """Errors, and what the method's own rule leaves of weights or units."""
    found, method = {}, METHODS[name]
    if method.removes:
        kept = relevance(net)
        total = sum(r.kept.numel() for r in kept.values())
        left = sum(int(r.kept.sum()) for r in kept.values())
        if method.removes == "units":
            found[f"units left by {name}, %"] = 100 * left / total
        else:
            prune(net)
            found[f"compression by {name}"] = total / max(left, 1)
    found[f"error of {name}, %"] = error(net, *test)
    if method.drawn:
        right = accuracies(net, batches(test), samples).ensemble
        found[f"error of {name}, ensemble, %"] = 100 - 100 * right
    return found
