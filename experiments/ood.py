"""Strangers: does the epistemic uncertainty of a digit net rise on letters and on clothes?

One table: a dense net trained on MNIST by five methods, and for each the area under the ROC curve
for telling MNIST test images from those of another set. The score is the mutual information of the
prediction and the weights; for the deterministic net, which has none, the entropy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from experiments.nets import mlp
from vardrop.conversion import convert
from vardrop.data import Images, load_images
from vardrop.metrics import accuracy, auroc
from vardrop.objective import ELBO, Categorical, linear_warmup
from vardrop.prediction import Prediction, predict
from vardrop.recipes import binary_dropout, sparse_vd, variance_layer, variational_dropout
from vardrop.training import train

_WIDTHS = (784, 300, 100, 10)
_BATCH = 1000


def _deterministic() -> nn.Module:
    return mlp(*_WIDTHS)


def _dropout() -> nn.Module:
    return convert(mlp(*_WIDTHS), binary_dropout(0.5), exclude="1")


def _variational_dropout() -> nn.Module:
    return convert(mlp(*_WIDTHS), variational_dropout("B"), exclude="1")


def _sparse_vd() -> nn.Module:
    return convert(mlp(*_WIDTHS), sparse_vd())


def _variance() -> nn.Module:
    inputs, first, second, classes = _WIDTHS
    net = nn.Sequential(
        nn.Flatten(),
        nn.Linear(inputs, first, bias=False), nn.BatchNorm1d(first), nn.ReLU(),
        nn.Linear(first, second, bias=False), nn.BatchNorm1d(second), nn.ReLU(),
        nn.Linear(second, classes),
    )  # fmt: skip
    return convert(net, variance_layer(), where="4")


METHODS: dict[str, Callable[[], nn.Module]] = {
    "deterministic": _deterministic,
    "dropout": _dropout,
    "variational dropout": _variational_dropout,
    "sparse VD": _sparse_vd,
    "variance net": _variance,
}

OTHERS = {"notmnist": "notMNIST", "fashion-mnist": "Fashion-MNIST"}


@dataclass(frozen=True)
class Stranger:
    """One row of the table: what a method's net says of its own data and of others."""

    method: str
    accuracy: float
    auroc: dict[str, float]


def strangers(
    data: Images,
    test: Images,
    others: Mapping[str, Images],
    epochs: int = 5,
    samples: int = 32,
    seed: int = 0,
) -> list[Stranger]:
    """Train every method on `data`, and tell `test` from each of the other sets."""
    return [_row(name, data, test, others, epochs, samples, seed) for name in METHODS]


def _row(
    name: str,
    data: Images,
    test: Images,
    others: Mapping[str, Images],
    epochs: int,
    samples: int,
    seed: int,
) -> Stranger:
    net = _trained(name, data, epochs, seed)
    known = _predicted(net, name, test.x, samples, seed)
    found = {
        other: float(auroc(_score(known), _score(_predicted(net, name, images.x, samples, seed))))
        for other, images in others.items()
    }
    return Stranger(name, float(accuracy(known.probs, test.y)), found)


def _trained(name: str, data: Images, epochs: int, seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = METHODS[name]()
        elbo = ELBO(net, Categorical(), len(data.x), beta=0.0 if name == "deterministic" else 1.0)
        parameters = [p for p in net.parameters() if p.requires_grad]
        # A full KL from the start would prune before there is anything to keep.
        beta = None if name == "deterministic" else linear_warmup(0, epochs)
        optimizer = torch.optim.Adam(parameters, lr=1e-3)
        for _ in train(elbo, optimizer, *data, epochs, beta=beta, seed=seed):
            pass
    return net.eval()


def _predicted(net: nn.Module, name: str, x: Tensor, samples: int, seed: int) -> Prediction:
    if name == "deterministic":
        return predict(net, x.split(_BATCH), mode="mean")
    return predict(net, x.split(_BATCH), samples, seed=seed, keep=0)


def _score(p: Prediction) -> Tensor:
    return p.entropy if int(p.samples.max()) == 1 else p.epistemic


def out_of_domain(
    seed: int, epochs: int = 10, samples: int = 32, examples: int = 60_000
) -> dict[str, Any]:
    """MNIST against notMNIST and Fashion-MNIST: accuracy and AUROC of every method."""
    data = Images(*(t[:examples] for t in load_images("mnist")))
    others = {title: load_images(name, "test") for name, title in OTHERS.items()}
    rows = strangers(data, load_images("mnist", "test"), others, epochs, samples, seed)
    figures = {}
    for row in rows:
        figures[f"accuracy, {row.method}"] = row.accuracy
        figures |= {f"AUROC {title}, {row.method}": area for title, area in row.auroc.items()}
    return {"figures": figures}


def table(figures: Mapping[str, Mapping[str, Any]]) -> str:
    """The figures of a result file as a Markdown table, a line a method: mean and its error."""
    columns = ["accuracy", *(f"AUROC {title}" for title in OTHERS.values())]
    lines = ["| method | " + " | ".join(columns) + " |", "|---|" + "---:|" * len(columns)]
    for method in METHODS:
        cells = (_cell(figures[f"{column}, {method}"]) for column in columns)
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(figure: Mapping[str, Any]) -> str:
    error = figure["standard_error"]
    return f"{figure['mean']:.4f}" + ("" if error is None else f" ± {error:.4f}")
