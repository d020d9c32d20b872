"""DropMax and its baselines on MNIST-1K, -5K and -55K: the first images of each class.

Lee et al. 2018, "DropMax: adaptive variational softmax" (on the authors' poster, with another base
net: softmax 7.09 %, DropMax 5.32 %). The recipe is that of the authors' code: LeNet 20-50-500, Adam
at 1e-3, 1e-4 and 1e-5 by thirds of 200 epochs, batches of 100, weight decay 1e-4 except on the
head's branches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from experiments.slim import Seed, train
from experiments.trainings import Watch, images, lenet5
from vardrop.app.data import Images
from vardrop.conversion import convert
from vardrop.metrics import ece
from vardrop.objective import ELBO, Categorical, parameter_groups
from vardrop.recipes import (
    HeadRecipe,
    class_dropout,
    deterministic_attention,
    dropmax,
    sampled_softmax,
    softmax,
    sparsemax,
)
from vardrop.tuning import Loop

METHODS: dict[str, Callable[[], HeadRecipe]] = {
    "softmax": softmax,
    "dropmax": dropmax,
    "sampled_softmax": sampled_softmax,
    "class_dropout": class_dropout,
    "deterministic_attention": deterministic_attention,
    "dropmax_prior": lambda: dropmax(inference="p"),
    "sparsemax": sparsemax,
}


def first_of_each_class(data: Images, count: int) -> Images:
    """The first `count` images of every class, in file order."""
    rows = [torch.nonzero(data.y == k).flatten()[:count] for k in data.y.unique()]
    index = torch.cat(rows).sort().values
    return Images(data.x[index], data.y[index])


def scores(log_probs: Tensor, y: Tensor) -> dict[str, float]:
    """Error in per cent, NLL in nats, expected calibration error in per cent."""
    wrong = (log_probs.argmax(1) != y).float().mean()
    nll = torch.nn.functional.nll_loss(log_probs, y)
    return {
        "error": 100 * wrong.item(),
        "NLL": nll.item(),
        "ECE": 100 * ece(log_probs.exp(), y).item(),
    }


def class_heads(
    seed: int,
    per_class: int = 100,
    epochs: int = 200,
    methods: tuple[str, ...] = tuple(METHODS),
    watch: Watch | None = None,
) -> dict[str, Any]:
    """Every head on the same images; measured on the test set once, after the last epoch."""
    data = first_of_each_class(images("mnist"), per_class)
    test, watch = images("mnist", "test"), watch or Watch()
    figures: dict[str, float] = {}
    for method in methods:
        found = run(method, seed, data, test, epochs, watch, 1 / len(methods))
        if method == "sparsemax":  # its probabilities may be zero
            found = {score: v for score, v in found.items() if "NLL" not in score}
        figures |= {f"{score} of {method}{_UNITS[score]}": v for score, v in found.items()}
    if {"softmax", "dropmax"} <= set(methods):
        gain = figures["error of softmax, %"] - figures["error of dropmax, %"]
        figures["error, softmax less dropmax, %"] = gain
    return {"figures": figures}


_UNITS = {"error": ", %", "ECE": ", %", "NLL": ", nats", "train NLL": ", nats"}


def gain_by_count(
    seed: int,
    counts: tuple[int, ...] = (100, 500, 2000, 5000),
    steps: int = 6000,
    held_out: int = 5000,
    watch: Watch | None = None,
) -> dict[str, Any]:
    """Softmax and DropMax by the number of images of a class, in as many steps each.

    Beside error and ECE: by how much the mean confidence is above the accuracy, and the ECE after a
    temperature that the last `held_out` images of the training set choose, which nothing is trained
    on. Where a temperature takes the ECE away, it is the level of the confidence that was wrong.
    """
    everything, test = images("mnist"), images("mnist", "test")
    x, held_x, y, held_y = (t for part in everything for t in part.split(len(part) - held_out))
    figures: dict[str, float] = {}
    curve, watch = [], watch or Watch()
    for count in counts:
        data = first_of_each_class(Images(x, y), count)
        epochs = max(3, round(steps / (len(data.x) / 100)))
        for method in ("softmax", "dropmax"):
            part = 1 / (2 * len(counts))
            net = trained(method, seed, data, epochs, watch, part, f"{method} {count}")
            found = _calibrated(_log_probs(net, test.x), test.y, _log_probs(net, held_x), held_y)
            figures |= {f"{k} of {method}, {count} a class": v for k, v in found.items()}
            curve.append({"method": method, "images of a class": count, **found})
    return {"figures": figures, "curve": curve}


class Setting(NamedTuple):
    """How a model of `tuned_heads` is regularized."""

    weight_decay: float = 1e-4
    dropout: float = 0.0
    smoothing: float = 0.0
    dropmax: bool = False


# Three settings for each row, which validation images choose from.
GRIDS: dict[str, tuple[Setting, ...]] = {
    "softmax": (Setting(),),
    "weight decay": (Setting(1e-3), Setting(3e-3), Setting(1e-2)),
    "dropout": (Setting(dropout=0.2), Setting(dropout=0.3), Setting(dropout=0.5)),
    "label smoothing": (Setting(smoothing=0.05), Setting(smoothing=0.1), Setting(smoothing=0.2)),
    "label smoothing and dropout": tuple(
        Setting(dropout=rate, smoothing=0.1) for rate in (0.2, 0.3, 0.5)
    ),
    "DropMax": tuple(Setting(decay, dropmax=True) for decay in (1e-4, 1e-3, 3e-3)),
    "DropMax and dropout": tuple(Setting(dropout=r, dropmax=True) for r in (0.2, 0.3, 0.5)),
}


def tuned_heads(
    seed: int,
    per_class: int = 100,
    validated: int = 500,
    epochs: int = 80,
    rows: Sequence[str] = tuple(GRIDS),
    watch: Watch | None = None,
) -> dict[str, Any]:
    """Error and NLL of DropMax and tuned baselines, each with and without a temperature.

    Validation images are the last of the training set. They choose the setting of a row by the
    error, and then by the NLL, and fit the temperature.
    """
    everything, test = images("mnist"), images("mnist", "test")
    data = first_of_each_class(everything, per_class)
    validation = Images(everything.x[-validated:], everything.y[-validated:])
    parts = Seed(seed, watch or Watch(), len(rows))
    figures: dict[str, float] = {}
    for row in rows:
        best = partial(_best_setting, GRIDS[row], data, validation, test, epochs, seed)
        result = parts.part(row, best)
        figures |= {f"{key}, {row}": value for key, value in result.items()}
    return {"figures": figures}


def _best_setting(
    grid: tuple[Setting, ...],
    data: Images,
    validation: Images,
    test: Images,
    epochs: int,
    seed: int,
) -> dict[str, float]:
    results = []
    for setting in grid:
        net = _train_setting(setting, data, epochs, seed)
        held = _log_probs(net, validation.x).log_softmax(1)
        validated = scores(held, validation.y)
        log_probs = _log_probs(net, test.x).log_softmax(1)
        raw = scores(log_probs, test.y)
        temperature = _best_temperature(held, validation.y)
        cooled = scores((log_probs / temperature).log_softmax(1), test.y)
        result = {"error": raw["error"], "NLL": raw["NLL"], "NLL with temperature": cooled["NLL"]}
        results.append((validated["error"], validated["NLL"], result))
    return min(results, key=lambda entry: entry[:2])[2]


def _train_setting(setting: Setting, data: Images, epochs: int, seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        *layers, last = lenet5()
        net = nn.Sequential(*layers, nn.Dropout(setting.dropout), last)
        smooth = nn.CrossEntropyLoss(label_smoothing=setting.smoothing)

        def loss(x: Tensor, y: Tensor) -> Tensor:
            return smooth(net(x), y)

        if setting.dropmax:
            convert(net, dropmax(), include="10")
            elbo = ELBO(net, Categorical(), num_data=len(data.x))
            return train(
                net, *data, epochs, 2e-3, seed, setting.weight_decay, lambda x, y: elbo(x, y).loss
            )
        return train(net, *data, epochs, 2e-3, seed, setting.weight_decay, loss)


def _best_temperature(log_probs: Tensor, y: Tensor) -> float:
    """The temperature of the lowest NLL, of a grid from 1/4 to 4."""
    grid = torch.logspace(-1, 1, 201, base=4.0).tolist()
    nll = torch.nn.functional.nll_loss
    return min(grid, key=lambda t: float(nll((log_probs / t).log_softmax(1), y)))


def _calibrated(log_probs: Tensor, y: Tensor, held: Tensor, held_y: Tensor) -> dict[str, float]:
    """Scores in per cent, before and after the temperature of the least NLL on held-out images."""
    best = _best_temperature(held, held_y)
    after = (log_probs / best).log_softmax(1).exp()
    confidence = log_probs.exp().amax(1).mean()
    error = 100 * float((log_probs.argmax(1) != y).float().mean())
    return {
        "error": error,
        "ECE": 100 * float(ece(log_probs.exp(), y)),
        "confidence less accuracy": 100 * float(confidence) - (100 - error),
        "temperature": best,
        "ECE after the temperature": 100 * float(ece(after, y)),
    }


def run(
    method: str, seed: int, data: Images, test: Images, epochs: int, watch: Watch, fraction: float
) -> dict[str, float]:
    """Train one head and score it."""
    net = trained(method, seed, data, epochs, watch, fraction, method)
    fitted = _log_probs(net, data.x)
    return {
        "train NLL": float(Categorical()(fitted, data.y)),
        **scores(_log_probs(net, test.x), test.y),
    }


def trained(
    method: str, seed: int, data: Images, epochs: int, watch: Watch, fraction: float, name: str
) -> nn.Module:
    """A net with a head, in evaluation mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = lenet5()
        convert(net, METHODS[method](), include="9")
        elbo = ELBO(net, Categorical(), num_data=len(data.x))
        optimizer = torch.optim.Adam(parameter_groups(elbo, lr=1e-3, weight_decay=1e-4), fused=True)
        loop = Loop(
            elbo, optimizer, *data, epochs, rate=lambda e: 0.1 ** int(3 * e / epochs), seed=seed
        )
        watch.fit(name, loop, fraction=fraction)
    return net.eval()


@torch.no_grad()
def _log_probs(net: nn.Module, x: Tensor) -> Tensor:
    return torch.cat([net(part) for part in x.split(1000)])
