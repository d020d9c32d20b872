"""Named methods with their papers, named networks, the defaults, and the model of a run."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vardrop._core.checks import suggest
from vardrop._core.errors import VardropError, report_errors
from vardrop._core.rng import preserve_rng
from vardrop.app.data.splits import Kind
from vardrop.app.runs.config import Config
from vardrop.app.runs.recorder import load_module
from vardrop.conversion import convert
from vardrop.likelihoods import Categorical, Gaussian, HeteroscedasticGaussian, Likelihood
from vardrop.noisy import has_noise
from vardrop.objective import ELBO
from vardrop.priors import Normal
from vardrop.recipes import METHODS, BaseRecipe, bayes_by_backprop, sparse_vd

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


def method_named(
    name: str, options: Mapping[str, Any] | None = None, kind: Kind | None = None
) -> BaseRecipe | None:
    """The recipe of a named method with its options; None for the plain model.

    With the kind of the data, "auto" is the default method. For tables the scale of its prior is
    learned, so that the KL does not push all weights to zero. For images it selects weights to
    remove.

    >>> method_named("auto", kind="table").prior
    Normal(mean=0.0, std=1.0, learned=True)
    """
    if name == PLAIN:
        return None
    if name == "auto" and kind is not None:
        return sparse_vd() if kind == "image" else bayes_by_backprop(prior=Normal(learned=True))
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
    pairs = pairwise((prod(shape), *widths))
    layers = [layer for n, m in pairs for layer in (nn.Linear(n, m), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *layers[:-1])


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


NETS: dict[str, Callable[[Shape, int], nn.Sequential]] = {
    "mlp50": lambda shape, outputs: _dense(shape, (50, 50, outputs)),
    "mlp": lambda shape, outputs: _dense(shape, (100, 100, outputs)),
    "lenet300": lambda shape, outputs: _dense(shape, (300, 100, outputs)),
    "lenet5": _lenet5,
}


class Embedded(nn.Module):
    """Rows (N, features) with the numbers of categories replaced by embeddings, at the end.

    Args:
        counts: the number of categories by place of the column.
        features: the number of columns.
    """

    def __init__(self, counts: Mapping[int, int], features: int) -> None:
        super().__init__()
        self.places, self.counts = tuple(counts), tuple(counts.values())
        self.others = tuple(i for i in range(features) if i not in counts)
        sizes = [min(_WIDEST, round(1.6 * count**0.56)) for count in counts.values()]
        self.tables = nn.ModuleList(map(nn.Embedding, counts.values(), sizes))
        self.features = len(self.others) + sum(sizes)

    def forward(self, x: Tensor) -> Tensor:
        """Replace category numbers by embeddings. Numbers out of range count as the nearest one."""
        parts = zip(self.places, self.counts, self.tables, strict=True)
        columns = [table(x[:, i].long().clamp(0, count - 1)) for i, count, table in parts]
        return torch.cat([x[:, list(self.others)], *columns], 1)


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
    return NETS[name](shape, outputs)


def check_net_name(name: str) -> None:
    """Raise an error for an unknown name of a network."""
    if name not in NETS and not re.fullmatch(r"dense(-[1-9]\d*)+", name):
        text = f"Unknown model {name!r}.{suggest(name, NETS)} Available: {', '.join(NETS)}"
        raise VardropError(f"{text}, or hidden widths such as dense-64-32.")


def fresh_net(config: Config, net: nn.Module | None = None) -> nn.Module:
    """The network before training: a custom one, or a named one with its seed."""
    if not config.own_net:
        about, columns = config.about, config.about.preprocessing
        outputs = about.outputs * (2 if config.settings.heteroscedastic else 1)
        embeddings = {} if columns is None else columns.embeddings
        with preserve_rng(seed=config.settings.seed):
            return build_net(config.net, about.shape, outputs, embeddings)
    if net is None:
        raise VardropError(f"The run has a custom model ({config.net}). Pass a fresh one as `net`.")
    return net


def likelihood_for(config: Config) -> Likelihood:
    """A categorical likelihood, or a Gaussian with one learned width or one for each row."""
    if config.about.task == "classification":
        return Categorical()
    return HeteroscedasticGaussian() if config.settings.heteroscedastic else Gaussian(learned=True)


def build_elbo(
    config: Config, tensors: dict[str, Tensor], source: Path, net: nn.Module | None = None
) -> ELBO:
    """The trained model of a configuration, with tensors that were read from `source`.

    A named model is built only if it is not larger than the tensors.
    """
    if not config.own_net:
        stored = sum(t.numel() for t in tensors.values())
        # Errors are for sizes beyond any memory.
        text = f"Expected {source} to hold a model, but got"
        with report_errors(lambda e: f"{text}: {e}."), torch.device("meta"):
            wanted = sum(p.numel() for p in fresh_net(config).parameters())
        if wanted > stored:
            numbers = f"the {wanted} numbers of the model {config.net}, but got {stored}"
            raise VardropError(f"Expected {source} to hold {numbers}. It is damaged.")
    model = fresh_net(config, net)
    with preserve_rng():  # the initial weights are replaced by the trained ones
        if config.method is not None:
            convert(model, config.method, config.include, config.exclude)
        rows = config.about.sizes["train"]
        elbo = ELBO(model, likelihood_for(config), rows, float(has_noise(model)))
    load_module(elbo, tensors, source)
    return elbo
