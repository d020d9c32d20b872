"""UCI regression on the standard splits: eight methods on one net of one hidden layer.

Rows are split as by Hernandez-Lobato & Adams 2015; inputs and targets are standardised by the
training rows. Every method chooses, for every split on its own, how long to train and whether the
noise of the targets is one number or an output of the net: all are trained on nine tenths of the
training rows, and the lowest NLL on the other tenth wins. It is then trained on all training rows.
Test rows take no part in any choice. All splits of a table are trained side by side.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from experiments.trainings import Watch, learned
from vardrop import metrics
from vardrop._core.errors import NotFiniteError, VardropError, import_optional
from vardrop._core.files import read_tensors, write_tensors
from vardrop.app.data import data_directory
from vardrop.app.store import CHECKPOINT
from vardrop.conversion import convert
from vardrop.likelihoods import Gaussian, HeteroscedasticGaussian, Likelihood
from vardrop.objective import ELBO
from vardrop.prediction import predict
from vardrop.priors import LogUniform, Normal
from vardrop.recipes import (
    bayes_by_backprop,
    concrete_dropout,
    mc_dropout,
    sparse_vd,
    variance_layer,
    variational_dropout,
)
from vardrop.tuning.stacked import StackedTraining

_RATE, _WARMUP, _SHORT, _HELD_OUT, _LEVEL = 1e-2, 0.25, 0.2, 0.1, 0.95
_ROWS = 2000  # of a prediction at a time

# The recipe of a method and the layers it is for; several where one is chosen on held-out rows.
METHODS: dict[str, tuple[tuple[Any, str | None], ...]] = {
    "sparse VD": ((sparse_vd(), None),),
    "Bayes by Backprop": ((bayes_by_backprop(Normal(learned=True)), None),),
    "variational dropout": ((variational_dropout(prior=LogUniform("cubic")), None),),
    "concrete dropout": ((concrete_dropout(), None),),
    "MC dropout": tuple((mc_dropout(p, length_scale=1e-2), None) for p in (0.01, 0.05, 0.005)),
    "variance layer": ((variance_layer(), "0"),),
    "plain": ((None, None),),
    "ensemble": ((None, None),),
}


@dataclass(frozen=True)
class Part:
    """Standardised rows of one split: to train on, and to predict."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor
    unit: float  # the deviation of the targets


@dataclass(frozen=True)
class Choice:
    """What is chosen on held-out rows."""

    recipe: int
    by_row: bool
    steps: int

    @property
    def name(self) -> str:
        return f"{self.recipe} {'by row' if self.by_row else 'one'} {self.steps}"


@dataclass(frozen=True)
class Method:
    """One method with what all of them share."""

    name: str
    hidden: int
    batch: int
    samples: int
    members: int

    def choices(self, steps: int) -> list[Choice]:
        """Everything that competes: recipes, both kinds of noise, a short and a long training."""
        lengths = (round(_SHORT * steps), steps)
        kinds = product(range(len(METHODS[self.name])), (False, True), lengths)
        return [Choice(*kind) for kind in kinds]

    def objective(self, choice: Choice, part: Part) -> ELBO:
        """A fresh net and its objective."""
        outputs = 2 if choice.by_row else 1
        net = nn.Sequential(
            nn.Linear(part.x.shape[1], self.hidden), nn.ReLU(), nn.Linear(self.hidden, outputs)
        )
        recipe, where = METHODS[self.name][choice.recipe]
        if recipe is not None:
            convert(net, recipe, where)
        noise: Likelihood = HeteroscedasticGaussian() if choice.by_row else Gaussian(learned=True)
        return ELBO(net, noise, len(part.x), beta=0.0 if recipe is None else 1.0)

    @property
    def noisy(self) -> bool:
        return METHODS[self.name][0][0] is not None

    def train(self, choice: Choice, parts: Sequence[Part], seed: int) -> list[list[ELBO]]:
        """The trained objectives of every split: one, or the members of an ensemble."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            elbos = [[self.objective(choice, p) for _ in range(self.members)] for p in parts]
            loop = self._loop(choice, parts, [e for group in elbos for e in group], seed)
            loop.run()
        states = iter(loop.states())
        for elbo in (e for group in elbos for e in group):
            elbo.load_state_dict(next(states))
            elbo.eval()
        return elbos

    def _loop(
        self, choice: Choice, parts: Sequence[Part], elbos: list[ELBO], seed: int
    ) -> StackedTraining:
        rows = [(p.x, p.y, None) for p in parts for _ in range(self.members)]
        epochs = max(1, round(choice.steps / math.ceil(len(parts[0].x) / self.batch)))

        def warmup(epoch: float) -> float:
            return min(1.0, epoch / (_WARMUP * epochs)) if self.noisy else 0.0

        return StackedTraining(
            elbos,
            rows,
            lambda elbo: [{"params": learned(elbo), "lr": _RATE}],
            epochs,
            self.batch,
            [warmup] * len(elbos),
            lambda epoch: 0.5 * (1 + math.cos(math.pi * epoch / epochs)),
            seed,
        )

    def scores(self, elbos: Sequence[ELBO], part: Part) -> dict[str, float]:
        """Of the test rows of a split: RMSE, NLL and CRPS in units of the target, coverage."""
        means, stds = self._draws(elbos, part.test_x, self.samples)
        y = part.test_y.flatten().double()
        below = torch.special.ndtr((y - means) / stds).mean(0)
        mean = means.mean(0)
        std = (stds.square().mean(0) + means.var(0, correction=0)).sqrt()
        return {
            "RMSE": part.unit * float((mean - y).square().mean().sqrt()),
            "NLL": _nll(means, stds, y) + math.log(part.unit),
            "CRPS": part.unit * float(metrics.crps_gaussian(mean, std, y)),
            "coverage": float(((below - 0.5).abs() <= _LEVEL / 2).double().mean()),
        }

    def held_out_nll(self, elbos: Sequence[ELBO], part: Part) -> float:
        """The NLL of held-out rows, by a quarter of the draws."""
        means, stds = self._draws(elbos, part.test_x, max(1, self.samples // 4))
        return _nll(means, stds, part.test_y.flatten().double())

    def _draws(self, elbos: Sequence[ELBO], x: Tensor, samples: int) -> tuple[Tensor, Tensor]:
        """Means and deviations of the target under every draw or member, (S, N)."""
        found = []
        for elbo in elbos:
            if self.noisy:
                p = predict(elbo, x.split(_ROWS), samples, seed=0)
            else:
                p = predict(elbo, x.split(_ROWS), 1, mode="mean")
            meant = p.likelihood.parts(p.draws.double())
            found.append((meant.location.flatten(1), meant.aleatoric.sqrt().flatten(1)))
        means, stds = zip(*found, strict=True)
        return torch.cat(means), torch.cat(stds)


def _nll(means: Tensor, stds: Tensor, y: Tensor) -> float:
    """Of the equal mixture of normals along axis 0."""
    logs = -0.5 * ((y - means) / stds).square() - stds.log() - 0.5 * math.log(2 * math.pi)
    return math.log(len(logs)) - float(torch.logsumexp(logs, 0).mean())


def standard_splits(
    seeds: Sequence[int],
    table: str,
    steps: int = 2500,
    batch: int = 64,
    hidden: int = 50,
    samples: int = 200,
    members: int = 5,
    methods: Sequence[str] = tuple(METHODS),
    watch: Watch | None = None,
) -> list[dict[str, Any]]:
    """RMSE, NLL, CRPS and coverage on the test rows of splits, by method.

    Args:
        seeds: numbers of the splits.
        table: a file in `uci` of the data directory, without its ending.
        steps: of the longer training; the shorter has a fifth of them.
        batch: rows per step.
        hidden: units of the one hidden layer.
        samples: draws of a prediction.
        members: of the ensemble.
        methods: keys of `METHODS`.
        watch: keeps the trained nets.
    """
    x, y, tests = split_table(table)
    parts = [_outer(x, y, tests[split]) for split in seeds]
    inner = [_inner(part, split) for part, split in zip(parts, seeds, strict=True)]
    figures: list[dict[str, float]] = [{} for _ in seeds]
    for index, name in enumerate(methods):
        method = Method(name, hidden, batch, samples, members if name == "ensemble" else 1)
        kept = _Kept(method, watch or Watch(), index / len(methods))
        chosen = _chosen(kept, method.choices(steps), inner)
        found = _scored(kept, chosen, parts)
        for own, choice, scores in zip(figures, chosen, found, strict=True):
            own |= {f"{key}, {name}": value for key, value in scores.items()}
            own |= {f"noise by row, {name}": float(choice.by_row)}
            own |= {f"long training, {name}": float(choice.steps == steps)}
    return [{"figures": own} for own in figures]


def split_table(name: str) -> tuple[Tensor, Tensor, list[list[int]]]:
    """Inputs (N, D) without constant columns, targets (N, 1), and the test rows of every split."""
    root = (data_directory() or Path()) / "uci"
    found = [path for path in (root / f"{name}.csv", root / f"{name}.csv.gz") if path.is_file()]
    if not found:
        raise VardropError(
            f"Expected the file {root / f'{name}.csv'}, but it is not there. Set VARDROP_DATA to "
            f"the directory that holds uci/{name}.csv."
        )
    rows = torch.from_numpy(import_optional("numpy").loadtxt(found[0], delimiter=",", skiprows=1))
    tests = json.loads(gzip.decompress((root / f"{name}.test-rows.json.gz").read_bytes()))
    x, y = rows[:, :-1], rows[:, -1:]
    return x[:, x.std(0) > 0], y, tests


def _outer(x: Tensor, y: Tensor, tested: list[int]) -> Part:
    held = torch.zeros(len(x), dtype=torch.bool)
    held[tested] = True
    return _standardised(x[~held], y[~held], x[held], y[held], 1.0)


def _inner(part: Part, split: int) -> Part:
    """Nine tenths of the training rows to train on, one to choose by."""
    order = torch.randperm(len(part.x), generator=torch.Generator().manual_seed(split))
    count = round(_HELD_OUT * len(order))
    held, rest = order[:count], order[count:]
    return _standardised(part.x[rest], part.y[rest], part.x[held], part.y[held], part.unit)


def _standardised(x: Tensor, y: Tensor, test_x: Tensor, test_y: Tensor, unit: float) -> Part:
    middle, width = x.mean(0), x.std(0).where(x.std(0) > 0, 1.0)
    shift, scale = y.mean(0), y.std(0)
    inputs = [((part - middle) / width).float() for part in (x, test_x)]
    targets = [((part - shift) / scale).float() for part in (y, test_y)]
    return Part(inputs[0], targets[0], inputs[1], targets[1], unit * float(scale))


class _Kept:
    """Trains the nets of a method, or reads those that a run that was cut off has kept."""

    def __init__(self, method: Method, watch: Watch, done: float) -> None:
        self.method, self.watch, self.done = method, watch, done

    def nets(self, stage: str, choice: Choice, parts: Sequence[Part]) -> list[list[ELBO]]:
        """The trained objectives of every split."""
        name, folder = f"{self.method.name} {stage} {choice.name}", self.watch.directory
        path = None if folder is None else folder / name / CHECKPOINT
        if path is not None and path.is_file():
            return self._read(choice, parts, path)
        found = self.method.train(choice, parts, len(parts))
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_tensors(path, _tensors(found))
        if self.watch.tell is not None:
            self.watch.tell(self.done, name)
        return found

    def _read(self, choice: Choice, parts: Sequence[Part], path: Path) -> list[list[ELBO]]:
        method, (tensors, _) = self.method, read_tensors(path)
        found = [[method.objective(choice, p) for _ in range(method.members)] for p in parts]
        for name, elbo in _named(found):
            own = {k.removeprefix(name): v for k, v in tensors.items() if k.startswith(name)}
            elbo.load_state_dict(own)
            elbo.eval()
        return found


def _named(elbos: Sequence[Sequence[ELBO]]) -> list[tuple[str, ELBO]]:
    pairs = [(k, m, elbo) for k, group in enumerate(elbos) for m, elbo in enumerate(group)]
    return [(f"{k}-{m}.", elbo) for k, m, elbo in pairs]


def _tensors(elbos: Sequence[Sequence[ELBO]]) -> dict[str, Tensor]:
    return {p + n: t for p, elbo in _named(elbos) for n, t in elbo.state_dict().items()}


def _chosen(kept: _Kept, choices: Sequence[Choice], inner: Sequence[Part]) -> list[Choice]:
    """For every split the choice with the lowest NLL on its held-out rows."""
    table = []
    for choice in choices:
        try:
            found = kept.nets("on nine tenths", choice, inner)
        except NotFiniteError:  # with one net of them: none of this kind is taken
            table.append([math.inf] * len(inner))
            continue
        pairs = zip(found, inner, strict=True)
        table.append([kept.method.held_out_nll(elbos, part) for elbos, part in pairs])
    best = torch.tensor(table).nan_to_num(math.inf).argmin(0).tolist()
    return [choices[k] for k in best]


def _scored(kept: _Kept, chosen: Sequence[Choice], parts: Sequence[Part]) -> list[dict[str, float]]:
    """The scores of every split, after a training on all of its training rows."""
    found: dict[int, dict[str, float]] = {}
    for choice in sorted(set(chosen), key=str):
        own = [k for k, c in enumerate(chosen) if c == choice]
        for k, elbos in zip(own, kept.nets("on all", choice, [parts[k] for k in own]), strict=True):
            found[k] = kept.method.scores(elbos, parts[k])
    return [found[k] for k in range(len(parts))]
