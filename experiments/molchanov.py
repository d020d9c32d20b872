"""Molchanov, Ashukha & Vetrov 2017: sparse variational dropout on MNIST, and on random labels."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from experiments.trainings import NETS, Watch, error, images, mlp, small_weights
from vardrop.conversion import convert
from vardrop.noisy import log_alpha
from vardrop.objective import ELBO, Categorical, constant, linear_warmup, parameter_groups
from vardrop.recipes import Recipe, ard, binary_dropout, sparse_vd
from vardrop.training import Epoch, Loop

_RECIPES: dict[str, Recipe] = {
    "exact": sparse_vd(),
    "sigmoid": sparse_vd(form="sigmoid"),
    "ard": ard(),
}


def _prune(net: nn.Module, threshold: float) -> dict[str, float]:
    """Zero the weights over the threshold; the part that went, by layer, and the compression."""
    left = total = 0
    figures: dict[str, float] = {}
    for name, la in log_alpha(net).items():
        keep = la < threshold
        with torch.no_grad():
            net.get_parameter(f"{name}.weight").mul_(keep)
        figures[f"sparsity of layer {len(figures) + 1}, %"] = 100 * (1 - float(keep.float().mean()))
        left, total = left + int(keep.sum()), total + keep.numel()
    return figures | {"compression": total / max(left, 1)}


def sparse_mnist(
    seed: int,
    net: str = "lenet300",
    kl: str = "exact",
    epochs: int = 200,
    decay_from: int = 100,
    warmup: tuple[int, int] | None = (5, 20),
    pretrain: int = 0,
    examples: int = 60_000,
    lower: tuple[float, ...] = (),
    watch: Watch | None = None,
) -> dict[str, Any]:
    """The authors' schedule: Adam 1e-3, from `decay_from` linearly to 0; threshold 3.

    `lower` are thresholds below 3, in falling order, to prune the same net by as well.
    """
    (x, y), (test_x, test_y) = images("mnist", count=examples), images("mnist", "test")
    mean, watch = x.mean(0), watch or Watch()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = small_weights(NETS[net]())
        if pretrain:
            elbo = ELBO(model, Categorical(), len(x), beta=0.0)
            optimizer = torch.optim.Adam(elbo.parameters(), lr=1e-3, fused=True)
            loop = Loop(elbo, optimizer, x - mean, y, pretrain, seed=seed)
            watch.fit("plain", loop, fraction=0.03)
        convert(model, _RECIPES[kl])
        elbo = ELBO(model, Categorical(), len(x), kl_value_every=10)
        optimizer = torch.optim.Adam(parameter_groups(elbo, lr=1e-3), fused=True)
        loop = Loop(
            elbo,
            optimizer,
            x - mean,
            y,
            epochs,
            seed=seed + 1,
            beta=linear_warmup(*warmup) if warmup else constant(),
            rate=lambda e: min(1.0, (epochs - e) / (epochs - decay_from)),
        )

        def measure(epoch: Epoch) -> dict[str, float]:
            left = sum(int((la < 3).sum()) for la in log_alpha(model).values())
            return {"nll": epoch.nll, "kl": epoch.kl, "weights": left}

        curve = watch.fit("sparse VD", loop, measure)
    figures = _prune(model, 3.0)
    figures["error, %"] = error(model, test_x - mean, test_y)
    for threshold in lower:
        figures[f"compression, threshold {threshold}"] = _prune(model, threshold)["compression"]
        figures[f"error, threshold {threshold}, %"] = error(model, test_x - mean, test_y)
    return {"figures": figures, "curve": curve}


def random_labels(
    seed: int,
    epochs: int = 30,
    dropout_epochs: int = 60,
    examples: int = 60_000,
    width: int = 300,
    watch: Watch | None = None,
) -> dict[str, Any]:
    """Labels without meaning: sparse VD removes every weight, binary dropout memorises."""
    x = images("mnist", count=examples).x
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(10, (len(x),), generator=generator)
    figures, watch = {}, watch or Watch()
    for name, recipe, count in (
        ("sparse VD", sparse_vd(), epochs),
        ("binary dropout", binary_dropout(0.2), dropout_epochs),
    ):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            net = convert(small_weights(mlp(784, width, 100, 10)), recipe)
            elbo = ELBO(net, Categorical(), len(x), kl_value_every=10)
            optimizer = torch.optim.Adam(parameter_groups(elbo, lr=1e-3), fused=True)
            beta = linear_warmup(1, 6) if name == "sparse VD" else None
            watch.fit(name, Loop(elbo, optimizer, x, y, count, beta=beta, seed=seed), fraction=0.5)
        if name == "sparse VD":
            left = sum(int((la < 3).sum()) for la in log_alpha(net).values())
            figures["weights left, sparse VD"] = float(left)
            _prune(net, 3.0)
        figures[f"train accuracy, {name}, %"] = 100 - error(net, x, y)
    return {"figures": figures}
