"""A fit: trials for each KL weight and fold and for the plain model, then the final training.

Trials are as long as the final training, because a KL weight that suits a short training overfits
in a long one. Without folds the best trial is the final training.

Every trial is stored in a separate directory below the run, so that a killed run can be resumed.
The directories are removed when the run has its model.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import os
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import nn

from vardrop._core.files import read_tensors, write_tensors
from vardrop._core.processes import World
from vardrop._core.rng import preserve_rng
from vardrop.app.data import Dataset, Part
from vardrop.app.runs import held_out
from vardrop.app.runs.config import ABOUT_BEST, TRIALS, Config
from vardrop.app.runs.held_out import Choice, HeldOutScores, Pairs, Scores
from vardrop.app.runs.recorder import load_module
from vardrop.app.runs.run import predict_tensor
from vardrop.app.runs.run_callbacks import RunCallback
from vardrop.app.runs.settings import FEW
from vardrop.app.runs.training import Training, time_step, train_net, train_stacked
from vardrop.app.store import BEST, CHECKPOINT, HISTORY, PROGRESS
from vardrop.conversion import convert
from vardrop.functional.normal import LOG_2PI
from vardrop.layers import Variational
from vardrop.likelihoods import Gaussian
from vardrop.noisy import has_noise, kl
from vardrop.objective import ELBO
from vardrop.prediction import fit_log_scale

_SAMPLES = 64  # draws of a prediction that decides
_VALIDATION_SAMPLES = 8


@dataclasses.dataclass(frozen=True, eq=False)
class FitJob:
    """The arguments of a fit: configuration, data, network, callback and processes."""

    config: Config
    path: Path
    data: Dataset
    net: nn.Module
    world: World
    resuming: bool = False
    callback: RunCallback = dataclasses.field(default_factory=RunCallback)

    @property
    def folded(self) -> bool:
        """Whether all rows are held out in turn, and then trained on together."""
        return (self.config.settings.folds or 1) > 1

    @property
    def rows(self) -> Part:
        """The rows of the final training."""
        return self.data.train.join(self.data.validation) if self.folded else self.data.train

    def pairs(self) -> Pairs:
        """Pairs of rows to train on and rows to score."""
        settings = self.config.settings
        if self.folded and settings.folds is not None:
            return held_out.fold_pairs(self.rows, settings.folds, self.data.task, settings.seed)
        return [(self.data.train, self.data.validation)]

    def kl_weights(self) -> tuple[float, ...]:
        """The KL weights to choose from. There is one if it was passed or has no effect."""
        if self.config.settings.beta is not None:
            return (self.config.settings.beta,)
        net = copy.deepcopy(self.net)
        with preserve_rng(self.world.device):
            if self.config.method is not None:
                convert(net, self.config.method, self.config.include, self.config.exclude)
            if not has_noise(net) or float(kl(net).detach()) == 0:
                return (1.0,)
        # Large weights underfit many rows, small ones overfit few rows.
        return (1.0, 0.3, 0.1) if len(self.rows.y) < FEW else (1.0, 0.1, 0.01)

    def score(self, held: Sequence[tuple[ELBO, Part]]) -> tuple[float, HeldOutScores]:
        """The scale of the noise that suits the held-out rows of models, and the scores with it."""
        seed, unit = self.config.settings.seed, self.config.units[1]
        predicted = [(predict_tensor(elbo, part.x, _SAMPLES, seed), part) for elbo, part in held]
        log_scale = fit_log_scale([(p, part.y, part.weights) for p, part in predicted])
        return log_scale, held_out.score_held_out(predicted, log_scale, unit)


def estimate_seconds(job: FitJob) -> float:
    """The seconds of all trainings of a job, estimated from the time of one step.

    A step of a plain model takes about half of the time, and so do steps of stacked models.
    """
    settings, count, folds = job.config.settings, len(job.kl_weights()), len(job.pairs())
    trainings: float = 1 + (folds - 1) * count / 2 if job.folded else count
    if settings.compare and job.config.method is not None:
        trainings += folds / 2
    steps = (settings.epochs or 0) * math.ceil(len(job.rows.y) / (settings.batch_size or 1))
    training = Training(job.config, job.world, job.path, job.rows, None, 1.0)
    return trainings * steps * time_step(training, job.net)


def run_fit_job(job: FitJob) -> ELBO:
    """Choose on held-out rows, train, and store both in the directory of the run."""
    config, path, world = job.config, job.path, job.world
    choice = Choice.read(path) if job.resuming else None
    initial = path / TRIALS / "net.safetensors"  # of a custom network
    if config.own_net and job.resuming and initial.is_file():
        load_module(job.net, read_tensors(initial)[0], initial)
    elif config.own_net and world.first and not job.resuming:
        initial.parent.mkdir(exist_ok=True)
        write_tensors(initial, job.net.state_dict())
    if choice is None:
        choice = choose(job)
        if world.first:
            write_tensors(path / held_out.CHOICE, *choice.state())
    beta = choice.beta if config.settings.beta is None else config.settings.beta
    held = job.data.validation
    validate = None if job.folded else partial(validation_scores, part=held, config=config)
    best = config.settings.patience is not None
    training = Training(config, world, path, job.rows, validate, beta, best, ABOUT_BEST)
    adopted = world.broadcast_decision(world.first and not job.folded and _adopt_trial(path, beta))
    elbo = train_net(training, job.net, job.callback, job.resuming or adopted)
    if not job.folded and not (path / "results.json").is_file():
        log_scale, net = job.score([(elbo, held)])
        choice = dataclasses.replace(choice, beta=beta).judge({"net": net}, log_scale)
        if world.first:
            write_tensors(path / held_out.CHOICE, *choice.state())
    if world.first:
        shutil.rmtree(path / TRIALS, ignore_errors=True)
    return elbo


def _adopt_trial(path: Path, beta: float) -> bool:
    """Use the trial of a KL weight on the validation part as the final training, if there is one.

    The checkpoint is moved last, so that the adoption is repeated after a crash.
    """
    trial = _trial(path, beta, 0)
    if not (trial / CHECKPOINT).is_file() or (path / CHECKPOINT).is_file():
        return False
    for name in (HISTORY, BEST, PROGRESS, CHECKPOINT):
        if (trial / name).is_file():
            os.replace(trial / name, path / name)
    return True


def validation_scores(elbo: ELBO, part: Part, config: Config) -> Scores:
    """NLL and accuracy, or NLL and RMSE in the units of the target, during a training.

    They use the means of the weights, or draws if the means are zero by construction. The noise of
    a plain model follows its training error and would stop it far too early, so its NLL uses the
    width that fits these rows best.
    """
    empty_means = any(
        isinstance(m, Variational) and m.posterior is not None and m.posterior.zero_mean
        for m in elbo.net.modules()
    )
    p = predict_tensor(elbo, part.x, _VALIDATION_SAMPLES if empty_means else 0, seed=0)
    unit = config.units[1]
    scores = held_out.score_held_out([(p, part)], 0.0, unit).scores
    if isinstance(p.likelihood, Gaussian) and not has_noise(elbo.net):
        scores["nll"] = math.log(max(scores["rmse"], 1e-6 * unit)) + 0.5 * (LOG_2PI + 1)
    return scores


def choose(job: FitJob) -> Choice:
    """The choices of the trials. On a validation part only the KL weight is chosen."""
    pairs, weights, note = job.pairs(), job.kl_weights(), job.callback.note
    tried: dict[float | None, tuple[float, HeldOutScores]] = {}
    nll: dict[float | None, float] = {}
    if job.folded or len(weights) > 1:
        parts = f"{len(pairs)} folds in turn" if job.folded else "the validation rows"
        note(f"{parts} choose the KL weight among {', '.join(f'{w:g}' for w in weights)}")
        # On the validation part weights are tried in turn, until a smaller one is worse.
        for some in [weights] if job.folded else [[weight] for weight in weights]:
            tried |= _try(job, pairs, some, "folds")
            nll = {weight: held.scores["nll"] for weight, (_, held) in tried.items()}
            if job.world.broadcast_decision(nll[some[-1]] > min(nll.values())):
                break
    least = min(nll.values(), default=0.0)
    # All processes take the first weight that the first process found to be the best.
    same = (w for w in weights if w in nll and job.world.broadcast_decision(nll[w] == least))
    best, classes = next(same, weights[0]), len(job.data.classes)
    baseline = held_out.baseline_scores(pairs, classes, job.config.units[1])
    others = {"majority" if classes else "mean": baseline}
    if job.config.settings.compare and job.config.method is not None:
        note("training the plain model on the same rows for comparison")
        others["plain"] = _try(job, pairs, [None], "plain model")[None][1]
    none, by_weight = torch.zeros(0), {f"{weight:g}": loss for weight, loss in nll.items()}
    choice = Choice(best, 0.0, by_weight, {}, {}, none, none).judge(others)
    return choice.judge({"net": tried[best][1]}, tried[best][0]) if job.folded else choice


def _try(
    job: FitJob, pairs: Pairs, weights: Sequence[float | None], label: str
) -> dict[float | None, tuple[float, HeldOutScores]]:
    """Scale and scores on held-out rows by KL weight, None for the plain model.

    Folds are trained together if possible.
    """
    trainings = []
    for weight in weights:
        config, settings = job.config, job.config.settings
        if weight is None:
            settings = dataclasses.replace(settings, pretrain=0)
            config = dataclasses.replace(config, method=None, settings=settings)
        best = weight is None or settings.patience is not None
        for fold, (train, held) in enumerate(pairs):
            score = partial(validation_scores, part=held, config=config)
            validate = score if best or not job.folded else None
            path = _trial(job.path, weight, fold)
            trainings.append(
                Training(config, job.world, path, train, validate, weight or 0.0, best)
            )
    watch = job.callback.trial
    elbos = train_stacked(trainings, job.net, watch(label)) if job.folded else None
    if elbos is None:
        elbos = [
            train_net(t, copy.deepcopy(job.net), watch(f"trial {t.directory.name}"), job.resuming)
            for t in trainings
        ]
    models = iter(elbos)
    tried = {w: job.score([(next(models), held) for _, held in pairs]) for w in weights}
    for weight, (_, scores) in tried.items():
        name = "plain model" if weight is None else f"KL weight {weight:g}"
        text = ", ".join(f"{title} {score:.4g}" for title, score in scores.scores.items())
        job.callback.note(f"{name}: {text} on held-out rows")
    return tried


def _trial(path: Path, beta: float | None, fold: int) -> Path:
    return path / TRIALS / f"{'plain' if beta is None else f'{beta:g}'}-{fold}"
