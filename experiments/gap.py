"""Intervals for a range of a feature that was never seen, on UCI tables.

The rows in the middle third of one random feature are held out as the gap. Some of the other rows
train, some choose, and some test within the range. Every method chooses from three settings by the
NLL of the same validation rows, which also scale its intervals (split-conformal, 90%). All
trainings have the same number of steps. Intervals are judged by the interval score (Gneiting &
Raftery 2007, eq. 43), which is lower for narrow intervals that cover.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from experiments import uci
from experiments.slim import Part, Seed
from experiments.trainings import Watch
from vardrop.conversion import convert
from vardrop.likelihoods import Gaussian
from vardrop.objective import ELBO, linear_warmup, parameter_groups
from vardrop.prediction import Ensemble, Prediction, conformal, predict
from vardrop.priors import Normal
from vardrop.recipes import BaseRecipe, bayes_by_backprop, mc_dropout
from vardrop.tuning import train

_LEVEL, _BATCH, _RATE = 0.9, 64, 5e-3
TABLES = ("boston", "concrete", "energy", "kin8nm", "wine-red", "yacht")
# Three settings per row: a weight decay, or a recipe.
_BAYES = tuple(
    bayes_by_backprop(p) for p in (Normal(0.3, learned=True), Normal(learned=True), Normal())
)
ROWS: dict[str, tuple[float | BaseRecipe, ...]] = {
    "weight decay": (1e-4, 1e-3, 1e-2),
    "MC dropout": tuple(mc_dropout(rate) for rate in (0.02, 0.05, 0.15)),
    "Bayes by Backprop": _BAYES,
}
ENSEMBLE = "five models, weight decay"


class Split(NamedTuple):
    """Standardized rows: to train, to choose, to test within the range, and in the gap."""

    train: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor]
    inside: tuple[Tensor, Tensor]
    gap: tuple[Tensor, Tensor]


def split_gap(name: str, seed: int, rows: int = 2500) -> Split:
    """A table without the middle third of a random feature, of at least a tenth of the rows.

    Args:
        name: of the table.
        seed: chooses the rows, the feature and the parts.
        rows: at most so many rows.
    """
    x, y, _ = uci.split_table(name)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(y), generator=generator)[:rows]
    x, y = x[order].double(), y[order].double().view(-1, 1)
    thirds = x.quantile(torch.tensor([1 / 3, 2 / 3], dtype=torch.double), 0)
    inside = (x > thirds[0]) & (x < thirds[1])
    # Features whose middle third holds examples: not zero for most of them, not a few steps.
    features = (inside.double().mean(0) >= 0.1).nonzero().flatten()
    in_gap = inside[:, features[torch.randint(len(features), (), generator=generator)]]
    seen = (~in_gap).nonzero().flatten()
    parts = seen.split([round(0.7 * len(seen)), round(0.15 * len(seen)),
                        len(seen) - round(0.7 * len(seen)) - round(0.15 * len(seen))])  # fmt: skip
    mean, std = x[parts[0]].mean(0), x[parts[0]].std(0).clamp(min=1e-9)
    centre, unit = y[parts[0]].mean(), y[parts[0]].std()
    x, y = ((x - mean) / std).float(), ((y - centre) / unit).float()
    return Split(*((x[part], y[part]) for part in (*parts, in_gap.nonzero().flatten())))


def score_gap(
    seed: int,
    tables: Sequence[str] = TABLES,
    steps: int = 3000,
    samples: int = 50,
    members: int = 5,
    watch: Watch | None = None,
) -> dict[str, Any]:
    """Interval scores and coverage, relative to tuned weight decay.

    Args:
        seed: of the rows, the features and the trainings.
        tables: names of tables.
        steps: of every training.
        samples: draws per prediction.
        members: of the ensemble.
        watch: keeps the results of the tables.
    """
    parts = Seed(seed, watch or Watch(), len(tables))
    scores = [
        parts.part(t, partial(_score_table, t, seed, steps, samples, members)) for t in tables
    ]
    figures: dict[str, float] = {}
    for row in (*ROWS, ENSEMBLE):
        for place in ("range", "gap"):
            logs = [math.log(s[f"score in {place}, {row}"] / s[f"score in {place}, weight decay"])
                    for s in scores]  # fmt: skip
            figures[f"score in {place}, {row}"] = math.exp(sum(logs) / len(logs))
            coverages = [s[f"coverage in {place}, {row}"] for s in scores]
            figures[f"coverage in {place}, {row}"] = sum(coverages) / len(coverages)
    return {"figures": figures}


def _score_table(name: str, seed: int, steps: int, samples: int, members: int) -> Part:
    split, figures = split_gap(name, seed), {}
    with torch.random.fork_rng(devices=[]):
        chosen: dict[str, Any] = {}
        for row, settings in ROWS.items():
            candidates = [(_fit(split, s, steps, seed), s) for s in settings]
            elbo, setting = min(candidates, key=lambda c: _nll(c[0], split.validation, samples))
            chosen[row] = partial(_predict, elbo, samples=samples)
            if row == "weight decay":
                others = [_fit(split, setting, steps, 1000 * k + seed) for k in range(1, members)]
                elbos = [elbo, *others]
        stds = [float(cast(Gaussian, e.likelihood).std) for e in elbos]
        noise = Gaussian(sum(stds) / len(stds))
        chosen[ENSEMBLE] = Ensemble([e.net for e in elbos], likelihood=noise)
        for row, predictor in chosen.items():
            rule = conformal(predictor(split.validation[0]), split.validation[1], _LEVEL)
            for place, (x, y) in (("range", split.inside), ("gap", split.gap)):
                lower, upper = rule.interval(predictor(x))
                figures[f"score in {place}, {row}"] = interval_score(lower, upper, y)
                figures[f"coverage in {place}, {row}"] = _coverage(lower, upper, y)
    return figures


def interval_score(lower: Tensor, upper: Tensor, y: Tensor) -> float:
    """The mean width, plus 2 / (1 - level) times the distance of targets outside."""
    missed = (lower - y).clamp(min=0) + (y - upper).clamp(min=0)
    return float((upper - lower + 2 / (1 - _LEVEL) * missed).mean())


def _coverage(lower: Tensor, upper: Tensor, y: Tensor) -> float:
    return 100 * float(((lower <= y) & (y <= upper)).double().mean())


def _fit(split: Split, setting: float | BaseRecipe, steps: int, seed: int) -> ELBO:
    torch.manual_seed(seed)
    x, y = split.train
    noisy = isinstance(setting, BaseRecipe)
    net = nn.Sequential(nn.Linear(x.shape[1], 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(),
                        nn.Linear(50, 1))  # fmt: skip
    if isinstance(setting, BaseRecipe):
        convert(net, setting)
    elbo = ELBO(net, Gaussian(learned=True), len(y), beta=1.0 if noisy else 0.0)
    decay = setting if isinstance(setting, float) else 0.0
    optimizer = torch.optim.Adam(parameter_groups(elbo, _RATE, weight_decay=decay))
    epochs = max(1, round(steps / math.ceil(len(y) / _BATCH)))
    warmup = linear_warmup(0, epochs / 2) if noisy else None
    for _ in train(elbo, optimizer, x, y, epochs, _BATCH, warmup, _cosine(epochs), seed):
        pass
    return elbo.eval()


def _cosine(epochs: int) -> Any:
    return lambda epoch: 0.5 * (1 + math.cos(math.pi * min(1.0, epoch / epochs)))


def _predict(elbo: ELBO, x: Tensor, samples: int) -> Prediction:
    return predict(elbo, x, samples, seed=0)


def _nll(elbo: ELBO, data: tuple[Tensor, Tensor], samples: int) -> float:
    return -float(_predict(elbo, data[0], samples).log_prob(data[1]).mean())
