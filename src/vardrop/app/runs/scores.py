"""Scores of predictions, with notes on their limits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vardrop import metrics
from vardrop._core.errors import import_optional
from vardrop.likelihoods import Categorical, HeteroscedasticGaussian, Likelihood
from vardrop.metrics.validate import weighted_mean
from vardrop.prediction import Prediction
from vardrop.prediction.prediction import Summary

Scores = dict[str, float | None]
LEVEL = 0.95
_UNEVEN = 1.5  # accuracy is easy if the most frequent class exceeds its even share so many times
_EQUAL_TARGETS = "All targets of the test part are equal, so R\N{SUPERSCRIPT TWO} is undefined."
_LEAST = math.log(torch.finfo(torch.float32).tiny)


@dataclasses.dataclass(frozen=True)
class Scored:
    """Scores, the most important ones first.

    Args:
        metrics: scores by name. An undefined one is None, with the reason in `notes`.
        confusion: counts by true class (down) and predicted class (across).
        notes: limits of these rows, in sentences.
    """

    metrics: Scores
    confusion: list[list[int]] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)


def class_scores(
    probs: Tensor,
    log_probs: Tensor,
    y: Tensor,
    classes: Sequence[str],
    frequencies: Tensor,
    weight: Tensor | None = None,
) -> Scored:
    """Scores of class probabilities.

    With two classes the average precision is of the rarer one. With more, it and AUROC are averages
    over one class against the rest. A class without examples is left out of averages. If only one
    of two classes is left, the scores that compare classes are None.

    Args:
        probs: shape (N, K).
        log_probs: log-probabilities of the labels, shape (N,).
        y: class indices, shape (N,).
        classes: K names.
        frequencies: frequencies of the classes in the training data, shape (K,).
        weight: weight of each example, shape (N,); 1 if None. Examples of weight 0 are left out.
    """
    if weight is not None and bool((weight > 0).any()):
        counts = weight > 0
        probs, log_probs, y, weight = probs[counts], log_probs[counts], y[counts], weight[counts]
    notes, sklearn = [*_note_missing_classes(y, classes)], import_optional("sklearn.metrics")
    truth, guess = y.cpu().numpy(), probs.argmax(1).cpu().numpy()
    share = {"sample_weight": None if weight is None else weight.cpu().numpy()}
    present = y.unique().tolist()
    compared = present if len(present) > 1 else []
    precise = [k for k in compared if len(classes) > 2 or k == int(frequencies.argmin())]
    if len(classes) == 2 and precise:
        notes.append(f"The average precision is for {classes[precise[0]]}, the rarer class.")

    def average(score: str, which: Sequence[int]) -> float | None:
        """The mean over classes, each against the rest."""
        of = getattr(sklearn, score)
        each = [of(truth == k, probs[:, k].double().cpu().numpy(), **share) for k in which]
        return float(sum(each)) / len(each) if each else None

    def macro(score: str, labels: Sequence[int]) -> float | None:
        options = {"labels": labels, "average": "macro", "zero_division": 0, **share}
        return float(getattr(sklearn, score)(truth, guess, **options)) if compared else None

    scores: Scores = {
        "accuracy": float(metrics.accuracy(probs, y, weight)),
        "balanced_accuracy": macro("recall_score", present),
        "auroc": average("roc_auc_score", compared),
        "average_precision": average("average_precision_score", precise),
        "f1": macro("f1_score", sorted({*present, *guess.tolist()})),
        "nll": -float(weighted_mean(_clamp(log_probs, notes), weight)),
        "brier": float(metrics.brier(probs, y, weight)),
        "ece": float(metrics.ece(probs, y, weight=weight)),
    }
    if float(frequencies.max()) * len(classes) >= _UNEVEN:
        scores = {name: scores[name] for name in ("balanced_accuracy", "auroc")} | scores
        notes.append(
            f"{float(frequencies.max()):.1%} of the training rows are of one class. Use balanced "
            "accuracy and AUROC, and compare accuracy with the most frequent class."
        )
    pairs = torch.bincount(len(classes) * y + probs.argmax(1), minlength=len(classes) ** 2)
    return Scored(scores, pairs.reshape(len(classes), -1).tolist(), notes)


def _note_missing_classes(y: Tensor, classes: Sequence[str]) -> Iterator[str]:
    """A note on classes without test examples, if there are any."""
    if absent := [name for k, name in enumerate(classes) if not bool((y == k).any())]:
        shown = ", ".join(absent[:5]) + (f" and {len(absent) - 5} more" if len(absent) > 5 else "")
        effect = "balanced accuracy, AUROC, average precision and F1 are undefined"
        if len(classes) - len(absent) > 1:
            effect = "averages over classes leave it out"
        yield f"The test part has no row of class {shown}: {effect}."


def _clamp(log_probs: Tensor, notes: list[str]) -> Tensor:
    """Log-probabilities with the smallest normal number instead of zero."""
    if not (zero := int((log_probs == -math.inf).sum())):
        return log_probs.double()
    text = f"The labels of {zero} rows have probability 0, which counts as"
    notes.append(f"{text} {math.exp(_LEAST):.1e} in the NLL.")
    return log_probs.double().clamp(min=_LEAST)


def number_scores(
    mean: Tensor,
    std: Tensor,
    log_probs: Tensor,
    y: Tensor,
    interval: tuple[Tensor, Tensor],
    weight: Tensor | None = None,
) -> Scored:
    """Scores of predicted numbers, in units of the target; all of shape (N, 1) or (N,)."""
    truth, middle = y.flatten().double(), mean.flatten().double()
    share = None if weight is None else weight.to(y).reshape(y.shape)
    flat = None if weight is None else weight.double().flatten()
    square = weighted_mean((middle - truth).square(), flat)
    spread = float(weighted_mean((truth - weighted_mean(truth, flat)).square(), flat))
    scores: Scores = {
        "rmse": float(square.sqrt()),
        "mae": float(weighted_mean((middle - truth).abs(), flat)),
        "r2": 1 - float(square) / spread if spread else None,
        "nll": -float(weighted_mean(log_probs.double().flatten(), flat)),
        "crps": float(metrics.crps_gaussian(mean, std, y, share)),
        "coverage95": float(metrics.interval_coverage(*interval, y, share)),
        "width95": float(metrics.interval_width(*interval, share)),
    }
    return Scored(scores, notes=[] if spread else [_EQUAL_TARGETS])


def summarize_targets(y: Tensor, weight: Tensor | None, classes: int) -> dict[str, Any]:
    """Class counts, or mean and standard deviation, of targets in double precision.

    Args:
        y: class indices or numbers.
        weight: weight of each example, shape (N,).
        classes: the number of classes, 0 for a regression.
    """
    if classes:
        return {"counts": torch.bincount(y, weight, classes).tolist()}
    y = y.double().flatten()
    mean = weighted_mean(y, weight)
    return {"mean": float(mean), "std": float(weighted_mean((y - mean).square(), weight).sqrt())}


def baseline_prediction(targets: Mapping[str, Any], rows: int) -> Prediction:
    """The prediction of a model without inputs: class frequencies, or one normal distribution.

    Args:
        targets: of the training rows, see `summarize_targets`. Every class counts once more.
        rows: the number of examples to predict.
    """
    likelihood: Likelihood = Categorical() if "counts" in targets else HeteroscedasticGaussian()
    if "counts" in targets:
        output = [math.log(count + 1) for count in targets["counts"]]
    else:
        output = [targets["mean"], 2 * math.log(max(targets["std"], 1e-12))]
    summary = Summary(likelihood, 1)
    summary.add(torch.tensor(output, dtype=torch.float64).expand(1, rows, -1))
    return summary.prediction()
