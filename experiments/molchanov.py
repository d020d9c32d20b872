"""Molchanov, Ashukha & Vetrov 2017: sparse variational dropout on MNIST, and on random labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from experiments.trainings import NETS, Watch, error, images, mlp, small_weights
from vardrop.conversion import convert
from vardrop.noisy import log_alpha
from vardrop.objective import ELBO, Categorical, constant, linear_warmup, parameter_groups
from vardrop.recipes import Recipe, ard, binary_dropout, sparse_vd
from vardrop.tuning import Epoch, Loop

_ALLOWED = 0.1  # points of error on held-out images, for a lower threshold

_RECIPES: dict[str, Recipe] = {
    "exact": sparse_vd(),
    "sigmoid": sparse_vd(form="sigmoid"),
    "ard": ard(),
    "clipped": sparse_vd(train_clip=3.0),
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
    held_out: int = 0,
    watch: Watch | None = None,
) -> dict[str, Any]:
    """The authors' schedule: Adam 1e-3, from `decay_from` linearly to 0; threshold 3.

    `lower` are thresholds below 3, in falling order, to prune the same net by as well. Of
    `examples`, the last `held_out` are not trained on: they choose among these thresholds.
    """
    (x, y), (test_x, test_y) = images("mnist", count=examples), images("mnist", "test")
    x, held_x, y, held_y = (t for both in (x, y) for t in both.tensor_split([len(x) - held_out]))
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
    held = (held_x - mean, held_y) if held_out else None
    return {"figures": _pruned(model, lower, (test_x - mean, test_y), held), "curve": curve}


def _pruned(
    net: nn.Module,
    lower: Sequence[float],
    test: tuple[Tensor, Tensor],
    held: tuple[Tensor, Tensor] | None,
) -> dict[str, float]:
    """Error and compression by threshold, and by the one that held-out images choose.

    It is the lowest whose error on them is at most 0.1 points over that of threshold 3.
    """
    figures = _prune(net, 3.0)
    figures["error, %"] = error(net, *test)
    if held is not None:
        allowed = error(net, *held) + _ALLOWED
        chosen = {"threshold": 3.0, "compression": figures["compression"]}
        chosen["error"] = figures["error, %"]
    for threshold in lower:
        compression, wrong = _prune(net, threshold)["compression"], error(net, *test)
        figures[f"compression, threshold {threshold}"] = compression
        figures[f"error, threshold {threshold}, %"] = wrong
        if held is not None and error(net, *held) <= allowed:
            chosen = {"threshold": float(threshold), "compression": compression, "error": wrong}
    if held is not None:
        figures["chosen threshold"] = chosen["threshold"]
        figures["error, chosen threshold, %"] = chosen["error"]
        figures["compression, chosen threshold"] = chosen["compression"]
    return figures


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
