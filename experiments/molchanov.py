"""Molchanov, Ashukha & Vetrov 2017: sparse variational dropout on MNIST, and on random labels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from experiments.nets import lenet5, mlp
from experiments.watch import Watch
from vardrop.conversion import convert
from vardrop.data import load_images
from vardrop.noisy import log_alpha
from vardrop.objective import ELBO, Categorical, constant, linear_warmup, parameter_groups
from vardrop.recipes import Recipe, ard, binary_dropout, sparse_vd
from vardrop.training import Epoch, Loop

_NETS = {"lenet300": lambda: mlp(784, 300, 100, 10), "lenet5": lenet5}
_RECIPES: dict[str, Recipe] = {
    "exact": sparse_vd(),
    "sigmoid": sparse_vd(form="sigmoid"),
    "ard": ard(),
}


def _accuracy(net: nn.Module, x: Tensor, y: Tensor) -> float:
    net.eval()
    with torch.no_grad():
        guess = torch.cat([net(part).argmax(1) for part in x.split(2000)])
    return float((guess == y).float().mean())


def _prune(net: nn.Module, threshold: float) -> dict[str, float]:
    """Zero the weights over the threshold; the share that went, by layer, and the compression."""
    left = total = 0
    figures: dict[str, float] = {}
    for name, la in log_alpha(net).items():
        keep = la < threshold
        with torch.no_grad():
            net.get_submodule(name).weight.mul_(keep)  # type: ignore[operator, union-attr]
        figures[f"sparsity of layer {len(figures) + 1}, %"] = 100 * (1 - float(keep.float().mean()))
        left, total = left + int(keep.sum()), total + keep.numel()
    return figures | {"compression": total / max(left, 1)}


def _initialised(net: nn.Module) -> nn.Module:
    for module in net.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.01)
            nn.init.zeros_(module.bias)
    return net


def sparse_mnist(
    seed: int, net: str = "lenet300", kl: str = "exact", epochs: int = 200, decay_from: int = 100,
    warmup: tuple[int, int] | None = (5, 20), pretrain: int = 0, examples: int = 60_000,
    lower: tuple[float, ...] = (), watch: Watch | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The authors' schedule: Adam 1e-3, from `decay_from` linearly to 0; threshold 3.

    `lower` are thresholds below 3, in falling order, to prune the same net by as well.
    """
    x, y = (t[:examples] for t in load_images("mnist"))
    test_x, test_y = load_images("mnist", "test")
    mean, watch = x.mean(0), watch or Watch()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _initialised(_NETS[net]())
        if pretrain:
            elbo = ELBO(model, Categorical(), len(x), beta=0.0)
            optimizer = torch.optim.Adam(elbo.parameters(), lr=1e-3, fused=True)
            loop = Loop(elbo, optimizer, x - mean, y, pretrain, seed=seed)
            watch.fit("plain", loop, share=0.03)
        convert(model, _RECIPES[kl])
        elbo = ELBO(model, Categorical(), len(x), kl_value_every=10)
        optimizer = torch.optim.Adam(parameter_groups(elbo, lr=1e-3), fused=True)
        loop = Loop(
            elbo, optimizer, x - mean, y, epochs, seed=seed + 1,
            beta=linear_warmup(*warmup) if warmup else constant(),
            rate=lambda e: min(1.0, (epochs - e) / (epochs - decay_from)),
        )  # fmt: skip

        def measure(epoch: Epoch) -> dict[str, float]:
            left = sum(int((la < 3).sum()) for la in log_alpha(model).values())
            return {"nll": epoch.nll, "kl": epoch.kl, "weights": left}

        curve = watch.fit("sparse VD", loop, measure)
    figures = _prune(model, 3.0)
    figures["error, %"] = 100 * (1 - _accuracy(model, test_x - mean, test_y))
    for threshold in lower:
        figures[f"compression, threshold {threshold}"] = _prune(model, threshold)["compression"]
        error = 100 * (1 - _accuracy(model, test_x - mean, test_y))
        figures[f"error, threshold {threshold}, %"] = error
    return {"figures": figures, "curve": curve}


def random_labels(
    seed: int, epochs: int = 30, dropout_epochs: int = 60, examples: int = 60_000,
    width: int = 300, watch: Watch | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Labels without meaning: sparse VD removes every weight, binary dropout memorises."""
    x = load_images("mnist").x[:examples]
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(10, (len(x),), generator=generator)
    figures, watch = {}, watch or Watch()
    for name, recipe, count in (
        ("sparse VD", sparse_vd(), epochs),
        ("binary dropout", binary_dropout(0.2), dropout_epochs),
    ):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            net = convert(_initialised(mlp(784, width, 100, 10)), recipe)
            elbo = ELBO(net, Categorical(), len(x), kl_value_every=10)
            optimizer = torch.optim.Adam(parameter_groups(elbo, lr=1e-3), fused=True)
            beta = linear_warmup(1, 6) if name == "sparse VD" else None
            watch.fit(name, Loop(elbo, optimizer, x, y, count, beta=beta, seed=seed), share=0.5)
        if name == "sparse VD":
            left = sum(int((la < 3).sum()) for la in log_alpha(net).values())
            figures["weights left, sparse VD"] = float(left)
            _prune(net, 3.0)
        figures[f"train accuracy, {name}, %"] = 100 * _accuracy(net, x, y)
    return {"figures": figures}
