"""Trainings that serve to choose: by KL weight and fold, and of the plain net; then the run's own.

Every trial is kept in a directory of its own below the run, so that a run that is killed goes on
where it was; they go when the run has its net.
"""

from __future__ import annotations

import copy
import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from vardrop.app.runs.held_out import (
    Choice,
    Held,
    Judgement,
    Scores,
    fold_pairs,
    judged,
    weights_to_try,
    without_net,
)
from vardrop.app.runs.config import ABOUT_BEST, TRIALS, Config
from vardrop.app.runs.evaluate import validation_scores
from vardrop.app.runs.training import Training, side_by_side, trained
from vardrop.app.runs.run import predicted
from vardrop.conversion import convert
from vardrop.app.data import Dataset, Part
from vardrop._core.files import read_tensors, write_atomically, write_tensors
from vardrop.noisy import has_noise, kl
from vardrop.objective import ELBO
from vardrop.prediction import fit_log_scale
from vardrop.app.runs.checkpoint import load_module
from vardrop.app.runs.callbacks import Observer
from vardrop.tuning.processes import World, own_generators
from vardrop.app.runs.recorder import Validate
from vardrop.app.store import BEST, CHECKPOINT, HISTORY, STANDING
from vardrop.app.runs.settings import MANY

_INITIAL = "net.safetensors"
_SHORT = 4  # times shorter are trials of a brief order
_SAMPLES = 64  # draws of a prediction that decides
Pairs = Sequence[tuple[Part, Part]]


@dataclasses.dataclass(frozen=True, eq=False)
class Order:
    """A run to carry out: what it is, its rows, its net, and who is told and takes part."""

    config: Config
    path: Path
    data: Dataset
    net: nn.Module
    observer: Observer
    world: World
    resuming: bool

    @property
    def folded(self) -> bool:
        """Whether all rows are held out in turn, and then trained on together."""
        return (self.config.settings.folds or 1) > 1

    @property
    def brief(self) -> bool:
        """Whether trials of the KL weight are short, and the run's own training follows them."""
        sizes, settings = self.config.about.sizes, self.config.settings
        many = sizes["train"] + sizes["validation"] >= MANY
        return many and not self.folded and settings.patience is None

    @property
    def rows(self) -> Part:
        """The rows that the run's own net is trained on."""
        data = self.data
        return data.train.join(data.validation) if self.folded else data.train

    @property
    def unit(self) -> float:
        """The deviation of the target, by which it was scaled."""
        found = self.data.preprocessing
        return 1.0 if found is None else found.target_std

    def pairs(self) -> Pairs:
        """Rows to train on and rows to judge on."""
        settings = self.config.settings
        if self.folded and settings.folds is not None:
            return fold_pairs(self.rows, settings.folds, self.data.task, settings.seed)
        return [(self.data.train, self.data.validation)]

    def weights(self) -> tuple[float, ...]:
        """The KL weights among which to choose; one where it is given or plays no part."""
        if (given := self.config.settings.beta) is not None:
            return (given,)
        net = copy.deepcopy(self.net)
        with own_generators(self.world.device):
            if self.config.method is not None:
                convert(net, self.config.method, self.config.where, self.config.exclude)
            counts = has_noise(net) and float(kl(net).detach()) != 0
        return weights_to_try(len(self.rows.y)) if counts else (1.0,)


def carried_out(order: Order) -> ELBO:
    """Choose what is to be chosen, train, and keep both in the directory of the run."""
    config, path, world = order.config, order.path, order.world
    choice = Choice.read(path) if order.resuming else None
    _initial(order)
    measured = (path / "results.json").is_file()  # at its end, perhaps before there were choices
    if choice is None:
        choice = _chosen(order)
        if not measured:
            _write(choice, order)
    beta = choice.beta if config.settings.beta is None else config.settings.beta
    settled = bool(choice.weights) and not order.folded and not order.brief
    trial = path / TRIALS / _name(choice.beta, 0)
    if settled and world.first and trial.is_dir() and not (path / CHECKPOINT).is_file():
        _settle(trial, path)
    world.agree(True)  # the others wait for the files
    validate = None if order.folded else _validation(order, order.data.validation)
    training = Training(config, path, order.rows, validate, beta, config.keeps_best, ABOUT_BEST)
    elbo = trained(training, order.net, order.observer, world, order.resuming or settled)
    if not order.folded and not (path / "results.json").is_file():
        _write(_calibrated(dataclasses.replace(choice, beta=beta), elbo, order), order)
    if world.first:
        shutil.rmtree(path / TRIALS, ignore_errors=True)
    return elbo


def _write(choice: Choice, order: Order) -> None:
    if order.world.first:
        choice.write(order.path)


def _initial(order: Order) -> None:
    """Keep the weights that a net of the user's own begins with, or bring them back."""
    path = order.path / TRIALS / _INITIAL
    if not order.config.own_net:
        return
    if order.resuming and path.is_file():
        load_module(order.net, read_tensors(path, required=True)[0], path)
    elif order.world.first and not order.resuming:
        path.parent.mkdir(exist_ok=True)
        write_tensors(path, order.net.state_dict())


def _settle(trial: Path, path: Path) -> None:
    """Make a trial the run's own training; the checkpoint, which says that it is done, last."""
    for name in (HISTORY, BEST, STANDING, CHECKPOINT):
        write_atomically(path / name, (trial / name).read_bytes())


def _name(beta: float | None, fold: int) -> str:
    return f"{'plain' if beta is None else f'{beta:g}'}-{fold}"


def _chosen(order: Order) -> Choice:
    """What the trials say; the scale of a single holdout is fitted to the run's own net later."""
    pairs, weights = order.pairs(), order.weights()
    several = order.folded or len(weights) > 1
    tried = _tried(order, pairs, weights) if several else {}
    by_weight = {weight: t.judgement.scores["nll"] for weight, t in tried.items()}
    least = min(by_weight.values(), default=0.0)
    # All processes take the first weight that the first process found to be the best.
    best = next((w for w, nll in by_weight.items() if order.world.agree(nll == least)), weights[0])
    name, none = without_net(pairs, len(order.data.classes), order.unit)
    found = {name: none} | _plain(order, pairs)
    log_scale, deviations = 0.0, torch.zeros(0)
    if several and not order.brief:
        log_scale, net = tried[best]
        found, deviations = {"net": net} | found, net.deviations
    scores = {k: judgement.scores for k, judgement in found.items()}
    rows = {k: judgement.rows for k, judgement in found.items()}
    shown = {f"{weight:g}": nll for weight, nll in by_weight.items()}
    return Choice(best, log_scale, shown, scores, rows, deviations)


class _Tried(NamedTuple):
    log_scale: float
    judgement: Judgement


def _tried(order: Order, pairs: Pairs, weights: Sequence[float]) -> dict[float, _Tried]:
    """What the nets of each KL weight say of the held-out rows.

    One after the other, the middle one of three weights goes first, then the largest; the smallest
    only if the largest is worse, because the NLL falls and then rises as the weight falls.
    """
    _announce(order, weights)
    found: dict[float, _Tried] = {}
    together = _together(order, pairs, weights, "folds") if order.folded else {}
    for weight in sorted(weights, key=lambda w: (w != weights[len(weights) // 2], -w)):
        if not together and len(found) == 2 and not order.world.agree(_falls(found)):
            break
        held = together.get(weight) or [
            _trial(order, pair, weight, fold) for fold, pair in enumerate(pairs)
        ]
        log_scale = fit_log_scale(held)
        found[weight] = _Tried(log_scale, judged(held, log_scale, order.unit))
        if len(weights) > 1:
            told = _shown(found[weight].judgement.scores)
            order.observer.note(f"KL weight {weight:g}: {told} on held-out rows")
    return found


def _falls(found: dict[float, _Tried]) -> bool:
    """Whether the NLL falls from the larger KL weight to the smaller one."""
    larger, smaller = (found[weight].judgement.scores["nll"] for weight in sorted(found)[::-1])
    return smaller <= larger


def _announce(order: Order, weights: Sequence[float]) -> None:
    folds, count = order.config.settings.folds, len(order.rows.y)
    held = len(order.data.validation.y)
    rows = f"{folds} folds of {count} rows, held out in turn," if order.folded else f"{held} rows"
    among = f"the KL weight among {', '.join(f'{w:g}' for w in weights)} and "
    wanted = f"{among if len(weights) > 1 else ''}the scale of the noise"
    order.observer.note(f"{rows} choose {wanted}")


def _together(
    order: Order, pairs: Pairs, weights: Sequence[float | None], label: str
) -> dict[float | None, list[Held]]:
    """What nets that were trained side by side say, by KL weight; nothing where they cannot be."""
    if order.config.keeps_best:  # each stops at an epoch of its own
        return {}
    asked = [(weight, fold) for weight in weights for fold in range(len(pairs))]
    trainings = [_training(order, pairs[fold], weight, fold) for weight, fold in asked]
    elbos = side_by_side(trainings, order.net, order.observer.trial(label), order.world)
    found: dict[float | None, list[Held]] = {}
    for (weight, fold), elbo in zip(asked, elbos or [], strict=elbos is not None):
        held = pairs[fold][1]
        found.setdefault(weight, []).append(_held(elbo, held, order))
    return found


def _training(order: Order, pair: tuple[Part, Part], beta: float | None, fold: int) -> Training:
    """A training on the first part of a pair; of the plain net where there is no KL weight."""
    config, (train, held) = order.config, pair
    if beta is None:
        settings = dataclasses.replace(config.settings, pretrain=0)
        config = dataclasses.replace(config, method=None, settings=settings)
    elif order.brief:
        config = dataclasses.replace(config, settings=config.settings.shortened(_SHORT))
    directory = order.path / TRIALS / _name(beta, fold)
    best = beta is None or config.keeps_best
    validate = _validation(order, held) if best or not order.folded else None
    return Training(config, directory, train, validate, beta or 0.0, best)


def _trial(order: Order, pair: tuple[Part, Part], beta: float | None, fold: int) -> Held:
    """What a net that was trained on the first part of a pair says of the second."""
    training, held = _training(order, pair, beta, fold), pair[1]
    if order.world.first:
        training.directory.mkdir(parents=True, exist_ok=True)
    what = "plain net" if beta is None else f"KL weight {beta:g}"
    observer = order.observer.trial(f"{what}, fold {fold + 1}" if order.folded else what)
    elbo = trained(training, copy.deepcopy(order.net), observer, order.world, order.resuming)
    return _held(elbo, held, order)


def _validation(order: Order, part: Part) -> Validate:
    return lambda elbo: validation_scores(elbo, part, order.config)


def _held(elbo: ELBO, part: Part, order: Order) -> Held:
    found = predicted(elbo, part.x, _SAMPLES, order.config.settings.seed)
    return Held(found, part.y, part.weights)


def _plain(order: Order, pairs: Pairs) -> dict[str, Judgement]:
    """The scores of the plain net, at its best epoch, on the same rows."""
    if not order.config.settings.compare or order.config.method is None:
        return {}
    order.observer.note("the plain net on the same rows, to compare with")
    together = _together(order, pairs, [None], "plain net") if order.folded else {}
    held = together.get(None) or [_trial(order, pair, None, k) for k, pair in enumerate(pairs)]
    found = judged(held, fit_log_scale(held), order.unit)
    order.observer.note(f"plain net: {_shown(found.scores)} on held-out rows")
    return {"plain": found}


def _calibrated(choice: Choice, elbo: ELBO, order: Order) -> Choice:
    """The scale and the deviations that the validation rows give the run's own net."""
    part = order.data.validation
    held = [_held(elbo, part, order)]
    log_scale = fit_log_scale(held)
    scores, rows, deviations = judged(held, log_scale, order.unit)
    return dataclasses.replace(
        choice,
        log_scale=log_scale,
        held_out={**choice.held_out, "net": scores},
        rows={**choice.rows, "net": rows},
        deviations=deviations,
    )


def _shown(scores: Scores) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in scores.items())
