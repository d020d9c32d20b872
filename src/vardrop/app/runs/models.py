"""Named methods with their papers, named networks, and the defaults."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vardrop._core.checks import suggest
from vardrop._core.errors import VardropError
from vardrop.app.data.splits import Kind
from vardrop.app.runs.settings import FEW
from vardrop.priors import Normal
from vardrop.recipes import METHODS, BaseRecipe, Recipe, bayes_by_backprop, sparse_vd

PLAIN = "none"
_WIDEST = 32  # of an embedding
Shape = tuple[int, ...]


# The methods to try first, with their purpose. The evidence is in docs/choose.md.
RECOMMENDED = {
    "bayes_by_backprop": "uncertainty, shifted or out-of-distribution inputs. Default for tables",
    "sparse_vd": "fewer bytes: most weights can be removed. Default for images",
    "mc_dropout": "uncertainty of a model that has dropout layers, without training",
    "l0": "fewer units, channels and attention heads",
    "dropmax": "few labels of many classes",
}


class Method(NamedTuple):
    """A named method with a summary in one line, its paper, and its use if it is recommended."""

    name: str
    summary: str
    paper: str
    use: str


def methods() -> list[Method]:
    """All named methods, described by their docstrings.

    >>> [m.paper for m in methods() if m.name == "ard"]
    ['Kharitonov, Molchanov & Vetrov 2018, "Variational dropout via empirical Bayes", eq. 12.']
    """
    described = []
    for name, function in METHODS.items():
        paragraphs = [" ".join(p.split()) for p in (inspect.getdoc(function) or "").split("\n\n")]
        paper = paragraphs[-1] if paragraphs[1:] else ""
        described.append(Method(name, paragraphs[0], paper, RECOMMENDED.get(name, "")))
    return described


def usual_method(kind: Kind) -> Recipe:
    """The default method.

    For tables the scale of the prior is learned, so that the KL does not push all weights to zero.
    For images the method also selects weights to remove.

    >>> usual_method("table").prior
    Normal(mean=0.0, std=1.0, learned=True)
    """
    return sparse_vd() if kind == "image" else bayes_by_backprop(prior=Normal(learned=True))


def method_named(name: str, options: Mapping[str, Any] | None = None) -> BaseRecipe | None:
    """The recipe of a named method with its options; None for the plain model."""
    if name == PLAIN:
        return None
    if name not in METHODS:
        hint = suggest(name, [*METHODS, PLAIN])
        raise VardropError(f"Unknown method {name!r}.{hint} See `vardrop methods`.")
    try:
        return METHODS[name](**(options or {}))
    except TypeError as misfit:
        fields = inspect.signature(METHODS[name]).parameters
        meant = "".join(suggest(key, fields) for key in options or () if key not in fields)
        text = f"Expected options of {name} among {', '.join(fields) or 'none'}"
        raise VardropError(f"{text}, but got: {misfit}.{meant}") from misfit


def _dense(shape: Shape, widths: tuple[int, ...]) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Flatten()]
    for n, m in pairwise((prod(shape), *widths)):
        layers += [nn.Linear(n, m), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _lenet5(shape: Shape, outputs: int) -> nn.Sequential:
    """LeNet-5-Caffe. Images below 20 pixels are padded, so that two poolings are possible."""
    if len(shape) != 3 or min(shape[1:]) < 4:
        text = f"lenet5 needs images of at least 4 x 4, but got inputs of shape {shape}."
        raise VardropError(f"{text} Use the model mlp.")
    padding = 0 if min(shape[1:]) >= 20 else 2
    layers: list[nn.Module] = []
    for channels, filters in ((shape[0], 20), (20, 50)):
        layers += [nn.Conv2d(channels, filters, 5, padding=padding), nn.ReLU(), nn.MaxPool2d(2)]
    features = nn.Sequential(*layers, nn.Flatten())
    with torch.no_grad():
        width = features(torch.zeros(1, *shape)).shape[1]
    return nn.Sequential(*features, nn.Linear(width, 500), nn.ReLU(), nn.Linear(500, outputs))


NETS: dict[str, tuple[str, Callable[[Shape, int], nn.Sequential]]] = {
    "mlp50": ("dense, two hidden layers of 50", lambda s, n: _dense(s, (50, 50, n))),
    "mlp": ("dense, two hidden layers of 100", lambda s, n: _dense(s, (100, 100, n))),
    "lenet300": ("dense, hidden layers of 300 and 100", lambda s, n: _dense(s, (300, 100, n))),
    "lenet5": ("two convolutions and a hidden layer of 500; for images", _lenet5),
}


def usual_net(kind: Kind, rows: int) -> str:
    """The default network: smaller for a table of few rows."""
    return "mlp50" if kind == "table" and rows < FEW else "mlp"


class Embedded(nn.Module):
    """Rows (N, features) with the numbers of categories replaced by embeddings, at the end.

    Args:
        counts: the number of categories by place of the column.
        features: the number of columns.
    """

    def __init__(self, counts: Mapping[int, int], features: int) -> None:
        super().__init__()
        self.places = tuple(counts)
        self.others = tuple(i for i in range(features) if i not in counts)
        sizes = [min(_WIDEST, round(1.6 * count**0.56)) for count in counts.values()]
        self.tables = nn.ModuleList(map(nn.Embedding, counts.values(), sizes))
        self.features = len(self.others) + sum(sizes)

    def forward(self, x: Tensor) -> Tensor:
        """Replace category numbers by embeddings. Numbers out of range count as the nearest one."""
        columns = [x[:, list(self.others)]]
        for place, table in zip(self.places, self.tables, strict=True):
            assert isinstance(table, nn.Embedding)
            columns.append(table(x[:, place].long().clamp(0, table.num_embeddings - 1)))
        return torch.cat(columns, 1)


def build_net(
    name: str, shape: Shape, outputs: int, embeddings: Mapping[int, int] | None = None
) -> nn.Sequential:
    """A fresh plain network by name, with embeddings for the columns at these places.

    >>> build_net("lenet5", (1, 8, 8), 10)(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    >>> build_net("dense-64-32", (3,), 1)[1]
    Linear(in_features=3, out_features=64, bias=True)
    """
    check_net_name(name)
    if embeddings:
        first = Embedded(embeddings, prod(shape))
        return nn.Sequential(first, *build_net(name, (first.features,), outputs))
    if name not in NETS:
        return _dense(shape, (*map(int, name.split("-")[1:]), outputs))
    return NETS[name][1](shape, outputs)


def check_net_name(name: str) -> None:
    """Raise an error for an unknown name of a network."""
    if name not in NETS and not re.fullmatch(r"dense(-[1-9]\d*)+", name):
        text = f"Unknown model {name!r}.{suggest(name, NETS)} Available: {', '.join(NETS)}"
        raise VardropError(f"{text}, or hidden widths such as dense-64-32.")
