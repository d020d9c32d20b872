"""Out of distribution: does the epistemic uncertainty of a digit net rise on letters and clothes?

One table: dense nets 784-300-100-10 trained on MNIST by five methods, and for each the area under
the ROC curve for telling MNIST test images from those of another set. The score is the mutual
information of the prediction and the weights; for the deterministic net, which has none, the
entropy. The variance net has BatchNorm and no biases in its hidden layers, the others are one plain
net, so its line compares another net as well as another method.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from experiments.trainings import Watch, images, learned, mlp
from vardrop.conversion import convert
from vardrop.data import Images
from vardrop.metrics import accuracy, auroc
from vardrop.objective import ELBO, Categorical, linear_warmup
from vardrop.prediction import Prediction, predict
from vardrop.recipes import binary_dropout, sparse_vd, variance_layer, variational_dropout
from vardrop.training import Loop

_WIDTHS = (784, 300, 100, 10)
_BATCH = 1000


def _with_batchnorm() -> nn.Module:
    inputs, first, second, classes = _WIDTHS
    return nn.Sequential(
        nn.Flatten(),
        *(nn.Linear(inputs, first, bias=False), nn.BatchNorm1d(first), nn.ReLU()),
        *(nn.Linear(first, second, bias=False), nn.BatchNorm1d(second), nn.ReLU()),
        nn.Linear(second, classes),
    )


METHODS: dict[str, Callable[[], nn.Module]] = {
    "deterministic": lambda: mlp(*_WIDTHS),
    "dropout": lambda: convert(mlp(*_WIDTHS), binary_dropout(0.5), exclude="1"),
    "variational dropout": lambda: convert(mlp(*_WIDTHS), variational_dropout("B"), exclude="1"),
    "sparse VD": lambda: convert(mlp(*_WIDTHS), sparse_vd()),
    "variance net": lambda: convert(_with_batchnorm(), variance_layer(), where="4"),
}

OTHERS = {"notmnist": "notMNIST", "fashion-mnist": "Fashion-MNIST"}


@dataclass(frozen=True)
class Line:
    """One line of the table: what a method's net says of its own data and of others."""

    method: str
    accuracy: float
    auroc: dict[str, float]


def lines(
    data: Images,
    test: Images,
    others: Mapping[str, Images],
    epochs: int = 5,
    samples: int = 32,
    seed: int = 0,
    watch: Watch | None = None,
) -> list[Line]:
    """Train every method on `data`, and tell `test` from each of the other sets."""
    watch, found = watch or Watch(), []
    for name in METHODS:
        net = trained(name, data, epochs, seed, watch)
        scores, right = _scored(net, name, test, samples, seed)
        areas = {
            title: float(auroc(scores, _scored(net, name, other, samples, seed)[0]))
            for title, other in others.items()
        }
        found.append(Line(name, right, areas))
    return found


def trained(name: str, data: Images, epochs: int, seed: int, watch: Watch) -> nn.Module:
    """A net of a method, in evaluation mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net, plain = METHODS[name](), name == "deterministic"
        elbo = ELBO(net, Categorical(), len(data.x), beta=0.0 if plain else 1.0)
        optimizer = torch.optim.Adam(learned(net), lr=1e-3)
        # A full KL from the start would prune before there is anything to keep.
        beta = None if plain else linear_warmup(0, epochs)
        loop = Loop(elbo, optimizer, *data, epochs, beta=beta, seed=seed)
        watch.fit(name, loop, fraction=1 / len(METHODS))
    return net.eval()


def _scored(
    net: nn.Module, name: str, data: Images, samples: int, seed: int
) -> tuple[Tensor, float]:
    """The score of each image, and the accuracy."""
    parts = data.x.split(_BATCH)
    if name == "deterministic":
        found: Prediction = predict(net, parts, mode="mean")
        score = found.entropy
    else:
        found = predict(net, parts, samples, seed=seed, keep=0)
        score = found.epistemic
    return score, float(accuracy(found.probs, data.y))


def five_methods(
    seed: int,
    epochs: int = 10,
    samples: int = 32,
    examples: int = 60_000,
    watch: Watch | None = None,
) -> dict[str, Any]:
    """MNIST against notMNIST and Fashion-MNIST: accuracy and AUROC of every method."""
    data, test = images("mnist", count=examples), images("mnist", "test")
    others = {title: images(name, "test") for name, title in OTHERS.items()}
    figures = {}
    for line in lines(data, test, others, epochs, samples, seed, watch):
        figures[f"accuracy, {line.method}"] = line.accuracy
        figures |= {f"AUROC {title}, {line.method}": area for title, area in line.auroc.items()}
    return {"figures": figures}
