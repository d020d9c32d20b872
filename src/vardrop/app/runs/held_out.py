"""Choices on held-out examples: the KL weight, the scale of the noise, the width of intervals."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from vardrop._core.checks import check_number, check_type
from vardrop._core.files import read_tensors
from vardrop.app.data.preprocessing import Task
from vardrop.app.data.splits import Part, fold_numbers
from vardrop.app.runs.recorder import join_parts
from vardrop.app.runs.scores import baseline_prediction, summarize_targets
from vardrop.app.score_texts import judge_difference
from vardrop.app.store import Record, reading, select_prefix
from vardrop.metrics.intervals import Estimate
from vardrop.prediction import Conformal, Prediction
from vardrop.prediction.conformal import conformal_rule

CHOICE = "choice.safetensors"
_FARTHEST = 700.0  # largest log of a scale; exp overflows beyond it
Scores = dict[str, float]
Pairs = Sequence[tuple[Part, Part]]  # rows to train on, rows that are held out


class HeldOutScores(NamedTuple):
    """Scores of held-out rows in the units of the target, their NLL, deviations and shares."""

    scores: Scores
    rows: Tensor
    deviations: Tensor = torch.zeros(0)
    shares: Tensor = torch.zeros(0)


@dataclasses.dataclass(frozen=True)
class Choice:
    """The choices of held-out rows, and the scores behind them.

    Args:
        beta: the KL weight.
        log_scale: c. The noise of a regression is scaled by e^c, and e^c is the temperature of
            classes.
        weights: the NLL of held-out rows by KL weight, if several were tried.
        held_out: scores of held-out rows by model: "net", "plain" (the plain model), and "mean" or
            "majority" (no model).
        rows: the NLL of each held-out row, by model.
        deviations: conformal scores of the held-out rows: |y - mean| / std, or of classes 1 - p(y).
        shares: the weight of each row in its group, 1 / size. Ones if there are no groups.
    """

    beta: float
    log_scale: float
    weights: dict[str, float]
    held_out: dict[str, Scores]
    rows: dict[str, Tensor]
    deviations: Tensor
    shares: Tensor

    def conformal(self, level: float) -> Conformal:
        """The rule that covers a new row with probability `level`, infinite with too few rows.

        Groups are exchangeable, rows of one group are not. Each of K groups has the weight
        1 / (K + 1), spread evenly over its rows, and the rest is at infinity. The guarantee is for
        a random row of a new group, on average over groups. Without groups every row is a group.

        Args:
            level: the coverage, above 0 and below 1.

        Lee, Barber & Willett 2023, "Distribution-free inference with hierarchical data", eq. 6.
        """
        return conformal_rule(self.deviations, level, self.shares)

    def judge(self, others: dict[str, HeldOutScores], log_scale: float = 0.0) -> Choice:
        """Add the scores of other models. "net" also sets the deviations."""
        net = others.get("net", self)
        return dataclasses.replace(
            self,
            log_scale=log_scale,
            held_out=self.held_out | {name: held.scores for name, held in others.items()},
            rows=self.rows | {name: held.rows for name, held in others.items()},
            deviations=net.deviations,
            shares=net.shares,
        )

    def against(self) -> dict[str, dict[str, float]]:
        """The NLL minus the NLL of each baseline, with its standard error."""
        others = [name for name in self.rows if "net" in self.rows and name != "net"]
        worse = {name: self.rows["net"] - self.rows[name] for name in others}
        error = {name: float(w.std(correction=0)) / math.sqrt(len(w)) for name, w in worse.items()}
        return {name: {"nll": float(w.mean()), "error": error[name]} for name, w in worse.items()}

    def verdicts(self) -> dict[str, str]:
        """Whether the model is "better" or "worse" than each baseline; empty if not clear."""
        gaps = self.against().items()
        return {k: judge_difference("nll", Estimate(gap["nll"], gap["error"])) for k, gap in gaps}

    @property
    def advice(self) -> str:
        """A sentence if something simpler is as good; empty if the model is better.

        The plain model is recommended if it is better by two standard errors of the difference.
        The baseline is reported unless the model is better by two standard errors, and the
        learning rate if it is worse by as much.
        """
        sentences = []
        for name, verdict in self.verdicts().items():
            texts = {"worse": _BETTER} if name == "plain" else {"worse": _WORSE, "": _HARDLY}
            if verdict in texts:
                net, other = (self.held_out[n]["nll"] for n in ("net", name))
                sentences.append(texts[verdict].format(net, other, _BASELINES.get(name)))
        return " ".join(sentences)

    def to_json(self) -> Record:
        """The entry in results.json."""
        chosen = {"beta": self.beta, "weights": self.weights, "scale": math.exp(self.log_scale)}
        return {**chosen, **self.held_out, "advice": self.advice}

    def state(self) -> tuple[dict[str, Tensor], Record]:
        """The tensors and the other fields, for `from_state`."""
        tensors = {"deviations": self.deviations, "shares": self.shares}
        names = ("beta", "log_scale", "weights", "held_out")
        return tensors | join_parts({"rows": self.rows}), {k: getattr(self, k) for k in names}

    @classmethod
    def read(cls, directory: Path) -> Choice | None:
        """Read the choice of a run; None if it is not there yet."""
        path = directory / CHOICE
        return cls.from_state(*read_tensors(path), str(path)) if path.is_file() else None

    @classmethod
    def from_state(cls, tensors: dict[str, Tensor], fields: Record, source: str) -> Choice:
        """The choice that `state` described. Parts that do not fit raise an error."""
        with reading(source, "the choices of held-out rows"):
            deviations, shares = tensors["deviations"], tensors["shares"]
            rows = select_prefix("rows.", tensors)
            choice = cls(**fields, rows=rows, deviations=deviations, shares=shares)
            check_number("beta", choice.beta, at_least=0)
            check_number("log_scale", choice.log_scale, at_least=-_FARTHEST, below=_FARTHEST)
            for name, scores in (("weights", choice.weights), *choice.held_out.items()):
                for title, score in scores.items():
                    check_type(f"{name} {title}", score, float, "a number")
            vectors = (deviations, shares, *rows.values())
            if any(t.dim() != 1 or not t.is_floating_point() for t in vectors):
                raise ValueError("a tensor that is not a list of numbers")
            if not rows.keys() <= choice.held_out.keys():
                raise ValueError("rows of models without scores")
            if len(shares) != len(deviations) or len({len(t) for t in rows.values()}) > 1:
                raise ValueError("lists of different lengths")
            if unknown := sorted(tensors.keys() - choice.state()[0].keys()):
                raise ValueError(f"the unknown tensor {unknown[0]!r}")
        return choice


_BASELINES = {"mean": "the mean of the target", "majority": "the frequencies of the classes"}
_HARDLY = (
    "On held-out rows this model (NLL {0:.3f}) is hardly better than {2} ({1:.3f}). The columns "
    "may have little information on the target. Check them, or try --recipe none."
)
_WORSE = (
    "On held-out rows this model (NLL {0:.3f}) is worse than {2} ({1:.3f}): the training did not "
    "converge, or it overfits. Try a lower learning rate (--lr), or fewer --epochs."
)
_BETTER = (
    "On held-out rows the plain model is better: NLL {1:.3f}, and {0:.3f} with noise. Try --recipe "
    "none, another method, or more --epochs."
)


def fold_pairs(rows: Part, folds: int, task: Task, seed: int) -> Pairs:
    """Pairs of rows to train on and rows to score, with every row scored once."""
    fold = fold_numbers(rows, folds, task, seed)
    return [(rows.take(fold != k), rows.take(fold == k)) for k in range(folds)]


def score_held_out(
    held: Sequence[tuple[Prediction, Part]], log_scale: float, unit: float
) -> HeldOutScores:
    """Scores on held-out rows.

    Args:
        held: predictions of held-out rows, and these rows.
        log_scale: log of the scale of the noise, or of the temperature.
        unit: the standard deviation of the target, 1 for classes.
    """
    scaled = [(p.rescale(math.exp(log_scale)), part.y) for p, part in held]
    share = torch.cat([part.weights for _, part in held])
    share = share / share.mean()
    shares = torch.cat([part.shares for _, part in held])
    logs = torch.cat([p.log_prob(y).double() for p, y in scaled])
    rows = (math.log(unit) - logs) * share
    if held[0][0].classifies:
        right = torch.cat([p.probs.argmax(1) == y for p, y in scaled])
        deviations = 1 - torch.cat([p.probs.gather(1, y[:, None]).flatten() for p, y in scaled])
        score = {"accuracy": float((right * share).mean())}
    else:
        square = torch.cat([(y - p.mean).double().flatten(1).square().mean(1) for p, y in scaled])
        deviations = torch.cat([((y - p.mean).abs() / p.std).flatten(1).amax(1) for p, y in scaled])
        score = {"rmse": unit * math.sqrt(float((square * share).mean()))}
    return HeldOutScores({"nll": float(rows.mean()), **score}, rows, deviations, shares)


def baseline_scores(pairs: Pairs, classes: int, unit: float) -> HeldOutScores:
    """Scores of a model without inputs: mean and standard deviation, or class frequencies."""
    targets = [summarize_targets(train.y, train.weights, classes) for train, _ in pairs]
    predicted = [
        (baseline_prediction(target, len(held.y)), held)
        for target, (_, held) in zip(targets, pairs, strict=True)
    ]
    return score_held_out(predicted, 0.0, unit)
