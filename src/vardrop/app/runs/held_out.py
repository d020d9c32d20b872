"""What held-out rows decide: the KL weight, the scale of the noise, the width of intervals."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vardrop._core.checks import check_number
from vardrop.app.data import Part
from vardrop.app.data.preprocessing import Task
from vardrop.app.data.splits import fold_numbers
from vardrop._core.errors import VardropError
from vardrop._core.files import read_tensors, write_tensors
from vardrop.prediction import Prediction
from vardrop.app.runs.settings import FEW

CHOICE = "choice.safetensors"
Scores = dict[str, float]


class Held(NamedTuple):
    """A prediction of rows that did not train the net, their targets and weights."""

    prediction: Prediction
    y: Tensor
    weight: Tensor


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

    @property
    def advice(self) -> str:
        """What to say where something simpler is as good; empty where the net is better.

        The plain net has to be better by a standard error of the difference, because its epoch was
        chosen on these rows; no net must not be nearly as good.
        """
        told = []
        for name, (text, errors) in _SAID.items():
            if "net" in self.rows and name in self.rows:
                worse = self.rows["net"] - self.rows[name]
                error = float(worse.std(correction=0)) / math.sqrt(len(worse))
                if not float(worse.mean()) < errors * error:
                    told.append(text.format(*(self.held_out[n]["nll"] for n in ("net", name))))
        return " ".join(told)

    def to_json(self) -> dict[str, Any]:
        """What results.json has of it."""
        scale, chosen = math.exp(self.log_scale), {"beta": self.beta, "weights": self.weights}
        return {**chosen, "scale": scale, **self.held_out, "advice": self.advice}

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
        tensors, values = read_tensors(path, required=True)
        try:
            deviations = tensors.pop("deviations")
            rows = {k.removeprefix("rows."): v for k, v in tensors.items()}
            found = cls(**values, rows=rows, deviations=deviations)
            check_number("beta", found.beta, at_least=0)
            check_number("log_scale", found.log_scale)
        except (TypeError, KeyError, VardropError) as wrong:
            raise VardropError(
                f"Expected {path} to hold what held-out rows decided, but got: {wrong}. It is "
                "damaged."
            ) from wrong
        return found


_LITTLE = "The columns may say little about it; look at them, or try --method none."
# The sentence, and how many standard errors the net may be worse by.
_SAID = {
    "plain": (
        "On held-out rows the plain net is better: NLL {1:.3f}, and {0:.3f} with noise. Try "
        "--method none, another method, or more --epochs.",
        1.0,
    ),
    "mean": (
        "On held-out rows this net (NLL {0:.3f}) is hardly better than the mean of the target "
        f"({{1:.3f}}). {_LITTLE}",
        -1.0,
    ),
    "majority": (
        "On held-out rows this net (NLL {0:.3f}) is hardly better than the frequencies of the "
        f"classes ({{1:.3f}}). {_LITTLE}",
        -1.0,
    ),
}


class Judgement(NamedTuple):
    """Scores of held-out rows in the units of the target, their NLL and their deviations."""

    scores: Scores
    rows: Tensor
    deviations: Tensor


def weights_to_try(rows: int) -> tuple[float, ...]:
    """KL weights to choose among: noise per weight underfits many rows, few rows overfit.

    >>> weights_to_try(500), weights_to_try(50_000)
    ((1.0, 0.3, 0.1), (1.0, 0.1, 0.01))
    """
    return (1.0, 0.3, 0.1) if rows < FEW else (1.0, 0.1, 0.01)


def fold_pairs(rows: Part, folds: int, task: Task, seed: int) -> list[tuple[Part, Part]]:
    """Rows to train on and rows to judge on, every row judged once; see `fold_numbers`."""
    fold = fold_numbers(rows, folds, task, seed)
    return [(rows.take(fold != k), rows.take(fold == k)) for k in range(folds)]


def judged(held: Sequence[Held], log_scale: float, unit: float) -> Judgement:
    """What a net is worth on rows that did not train it; `unit` scales targets back."""
    scaled = [(p.rescaled(math.exp(log_scale)), y) for p, y, _ in held]
    share = _shares([one.weight for one in held])
    rows = -torch.cat([p.log_prob(y).double() for p, y in scaled])
    if held[0].prediction.classifies:
        right = torch.cat([p.probs.argmax(1) == y for p, y in scaled])
        missed = 1 - torch.cat([p.probs.gather(1, y[:, None]).flatten() for p, y in scaled])
        rows = rows * share
        scores = {"nll": float(rows.mean()), "accuracy": float((right * share).mean())}
        return Judgement(scores, rows, missed)
    rows = (rows + math.log(unit)) * share
    missed = torch.cat([(y - p.mean).double().flatten(1).square().mean(1) for p, y in scaled])
    rmse = unit * math.sqrt(float((missed * share).mean()))
    found = torch.cat([((y - p.mean).abs() / p.std).flatten(1).amax(1) for p, y in scaled])
    return Judgement({"nll": float(rows.mean()), "rmse": rmse}, rows, found)


def _shares(weights: Sequence[Tensor]) -> Tensor:
    """Weights of all rows, one on average."""
    found = torch.cat(list(weights))
    return found / found.mean()


def without_net(
    pairs: Sequence[tuple[Part, Part]], classes: int, unit: float
) -> tuple[str, Judgement]:
    """What the targets of the training rows alone say: their mean and deviation, or frequencies."""
    rows, missed = [], []
    for trained, held in pairs:
        weight = trained.weights
        if classes:
            counts = torch.bincount(trained.y, weight, classes) + 1.0
            rows.append(-(counts / counts.sum()).log()[held.y])
            missed.append((held.y != counts.argmax()).double())
        else:
            y = trained.y.double().flatten()
            mean = (weight * y).sum() / weight.sum()
            spread = (weight * (y - mean).square()).sum() / weight.sum()
            normal = torch.distributions.Normal(mean, spread.sqrt().clamp(min=1e-6))
            rows.append(math.log(unit) - normal.log_prob(held.y.double()).flatten())
            missed.append((held.y - mean).double().square().flatten())
    share = _shares([held.weights for _, held in pairs])
    nll, error = torch.cat(rows) * share, float((torch.cat(missed) * share).mean())
    scores = {"accuracy": 1 - error} if classes else {"rmse": unit * math.sqrt(error)}
    name = "majority" if classes else "mean"
    return name, Judgement({"nll": float(nll.mean()), **scores}, nll, torch.zeros(0))
