"""What held-out rows decide: the KL weight, the scale of the noise, the width of intervals."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vardrop._core.checks import check_integer, check_number
from vardrop._core.errors import VardropError
from vardrop._core.files import read_tensors, write_tensors
from vardrop.app.data import Part
from vardrop.app.data.preprocessing import Task
from vardrop.app.runs.settings import FEW
from vardrop.app.score_texts import judge_difference
from vardrop.metrics.intervals import Estimate
from vardrop.prediction import Prediction

CHOICE = "choice.safetensors"
Scores = dict[str, float]
Pairs = Sequence[tuple[Part, Part]]  # rows to train on, rows that are held out


class HeldOutPrediction(NamedTuple):
    """A prediction of rows that did not train the net, their targets and weights."""

    prediction: Prediction
    y: Tensor
    weight: Tensor


class HeldOutScores(NamedTuple):
    """Scores of held-out rows in the units of the target, their NLL and their deviations."""

    scores: Scores
    rows: Tensor
    deviations: Tensor


@dataclasses.dataclass(frozen=True)
class Choice:
    """What was chosen, and why.

    Args:
        beta: the KL weight.
        log_scale: c; the noise of a regression is e^c times as wide as the net learned it, the
            temperature of classes e^c.
        weights: the NLL of held-out rows by KL weight, where there was a choice.
        held_out: their scores by who predicts them: "net", "plain" (the plain net), and "mean" or
            "majority" (no net).
        rows: their NLL row by row, by who predicts them.
        deviations: conformal scores of the held-out rows: |y - mean| / std, or of classes 1 - p(y).
    """

    beta: float
    log_scale: float
    weights: dict[str, float]
    held_out: dict[str, Scores]
    rows: dict[str, Tensor]
    deviations: Tensor

    def judge(self, others: dict[str, HeldOutScores], log_scale: float = 0.0) -> Choice:
        """With the scores of more nets; those of "net" also give the deviations."""
        held_out = {**self.held_out, **{name: held.scores for name, held in others.items()}}
        rows = {**self.rows, **{name: held.rows for name, held in others.items()}}
        deviations = others["net"].deviations if "net" in others else self.deviations
        return Choice(self.beta, log_scale, self.weights, held_out, rows, deviations)

    def against(self) -> dict[str, dict[str, float]]:
        """By how much the NLL is above that of the others, with its standard error."""
        others = [name for name in self.rows if "net" in self.rows and name != "net"]
        worse = {name: self.rows["net"] - self.rows[name] for name in others}
        error = {name: float(w.std(correction=0)) / math.sqrt(len(w)) for name, w in worse.items()}
        return {name: {"nll": float(w.mean()), "error": error[name]} for name, w in worse.items()}

    @property
    def advice(self) -> str:
        """What to say if something simpler is as good; empty if the model is better.

        The plain model is named if it is better by two standard errors of the difference, no model
        unless this one is better by as much.
        """
        sentences = []
        for name, worse in self.against().items():
            text, unless = (_BETTER, ("better", "")) if name == "plain" else (_HARDLY, ("better",))
            if judge_difference("nll", Estimate(worse["nll"], worse["error"])) not in unless:
                net, other = (self.held_out[n]["nll"] for n in ("net", name))
                sentences.append(text.format(net, other, _BASELINES.get(name)))
        return " ".join(sentences)

    def to_json(self) -> dict[str, Any]:
        """What results.json has of it."""
        chosen = {"beta": self.beta, "weights": self.weights, "scale": math.exp(self.log_scale)}
        return {**chosen, **self.held_out, "advice": self.advice}

    def write(self, directory: Path) -> None:
        """Keep it with the run."""
        tensors = {**{f"rows.{k}": v for k, v in self.rows.items()}, "deviations": self.deviations}
        values = {k: v for k, v in vars(self).items() if k not in ("rows", "deviations")}
        write_tensors(directory / CHOICE, tensors, values)

    @classmethod
    def read(cls, directory: Path) -> Choice | None:
        """That of a run; None where nothing was chosen yet."""
        path = directory / CHOICE
        if not path.is_file():
            return None
        tensors, values = read_tensors(path)
        try:
            deviations = tensors.pop("deviations")
            rows = {k.removeprefix("rows."): v for k, v in tensors.items()}
            choice = cls(**values, rows=rows, deviations=deviations)
            check_number("beta", choice.beta, at_least=0)
            check_number("log_scale", choice.log_scale)
        except (TypeError, KeyError, VardropError) as wrong:
            raise VardropError(
                f"Expected {path} to hold what held-out rows decided, but got: {wrong}. It is "
                "damaged."
            ) from wrong
        return choice


_BASELINES = {"mean": "the mean of the target", "majority": "the frequencies of the classes"}
_HARDLY = (
    "On held-out rows this net (NLL {0:.3f}) is hardly better than {2} ({1:.3f}). The columns may "
    "say little about it; look at them, or try --method none."
)
_BETTER = (
    "On held-out rows the plain net is better: NLL {1:.3f}, and {0:.3f} with noise. Try --method "
    "none, another method, or more --epochs."
)


def weights_to_try(rows: int) -> tuple[float, ...]:
    """KL weights to choose among: noise per weight underfits many rows, few rows overfit.

    >>> weights_to_try(500), weights_to_try(50_000)
    ((1.0, 0.3, 0.1), (1.0, 0.1, 0.01))
    """
    return (1.0, 0.3, 0.1) if rows < FEW else (1.0, 0.1, 0.01)


def fold_pairs(rows: Part, folds: int, task: Task, seed: int) -> Pairs:
    """Rows to train on and rows to judge on, every row judged once, classes spread evenly."""
    check_integer("folds", folds, 2)
    count = len(rows.y)
    if folds > count:
        raise VardropError(f"Expected `folds` to be at most {count}, the rows, but got {folds}.")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    if task == "classification":
        order = order[rows.y[order].argsort(stable=True)]
    fold = torch.empty(count, dtype=torch.long)
    fold[order] = torch.arange(count) % folds
    return [(rows.take(fold != k), rows.take(fold == k)) for k in range(folds)]


def score_held_out(
    held: Sequence[HeldOutPrediction], log_scale: float, unit: float
) -> HeldOutScores:
    """What a net is worth on rows that did not train it; `unit` scales targets back."""
    scaled = [(p.rescaled(math.exp(log_scale)), y) for p, y, _ in held]
    share = _relative_weights([weight for _, _, weight in held])
    rows = -torch.cat([p.log_prob(y).double() for p, y in scaled])
    if held[0].prediction.classifies:
        right = torch.cat([p.probs.argmax(1) == y for p, y in scaled])
        deviations = 1 - torch.cat([p.probs.gather(1, y[:, None]).flatten() for p, y in scaled])
        rows = rows * share
        scores = {"nll": float(rows.mean()), "accuracy": float((right * share).mean())}
        return HeldOutScores(scores, rows, deviations)
    rows = (rows + math.log(unit)) * share
    square = torch.cat([(y - p.mean).double().flatten(1).square().mean(1) for p, y in scaled])
    rmse = unit * math.sqrt(float((square * share).mean()))
    deviations = torch.cat([((y - p.mean).abs() / p.std).flatten(1).amax(1) for p, y in scaled])
    return HeldOutScores({"nll": float(rows.mean()), "rmse": rmse}, rows, deviations)


def _relative_weights(weights: Sequence[Tensor]) -> Tensor:
    """Weights of all rows, one on average."""
    joined = torch.cat(list(weights))
    return joined / joined.mean()


def baseline_scores(pairs: Pairs, classes: int, unit: float) -> HeldOutScores:
    """What the targets of the training rows alone say: their mean and deviation, or frequencies."""
    rows, errors = [], []
    for train, held in pairs:
        weight = train.weights
        if classes:
            counts = torch.bincount(train.y, weight, classes) + 1.0
            rows.append(-(counts / counts.sum()).log()[held.y])
            errors.append((held.y != counts.argmax()).double())
        else:
            y = train.y.double().flatten()
            mean = (weight * y).sum() / weight.sum()
            spread = (weight * (y - mean).square()).sum() / weight.sum()
            normal = torch.distributions.Normal(mean, spread.sqrt().clamp(min=1e-6))
            rows.append(math.log(unit) - normal.log_prob(held.y.double()).flatten())
            errors.append((held.y - mean).double().square().flatten())
    share = _relative_weights([held.weights for _, held in pairs])
    nll, error = torch.cat(rows) * share, float((torch.cat(errors) * share).mean())
    scores = {"accuracy": 1 - error} if classes else {"rmse": unit * math.sqrt(error)}
    return HeldOutScores({"nll": float(nll.mean()), **scores}, nll, torch.zeros(0))
