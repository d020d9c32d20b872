"""Scores of predictions as people read them; what they cannot tell is said in words."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vardrop import metrics
from vardrop.errors import needed
from vardrop.functional.normal import LOG_2PI

Scores = dict[str, float | None]
LEVEL = 0.95
_UNEVEN = 1.5  # times its even part of the rows: a class so frequent makes accuracy easy
_LEAST = math.log(torch.finfo(torch.float32).tiny)


@dataclasses.dataclass(frozen=True)
class Scored:
    """Scores, those to be read first at the beginning.

    Args:
        metrics: by name; None where the rows do not define it, as `notes` says.
        by_class: rows, precision, recall, F1, AUROC and average precision of each class.
        confusion: rows by true class (down) and predicted class (across).
        notes: sentences on what these rows cannot tell.
    """

    metrics: Scores
    by_class: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    confusion: list[list[int]] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)


def class_scores(
    probs: Tensor, log_probs: Tensor, y: Tensor, classes: Sequence[str], frequencies: Tensor
) -> Scored:
    """Scores of class probabilities.

    With two classes the average precision is that of the rarer one; with more, it and AUROC are of
    one class against the rest, averaged. A class without a row is left out of averages; where two
    classes leave but one, nothing compares them, and the scores that do are None.

    Args:
        probs: shape (N, K).
        log_probs: of the labels, shape (N,).
        y: class indices, shape (N,).
        classes: K names.
        frequencies: of the classes among the rows of the training, shape (K,).
    """
    notes = _absent(y, classes)
    rows = _by_class(probs, y, classes)
    seen = [row for row in rows if row["rows"]]
    apart = [row for row in seen if row["auroc"] is not None]
    told = apart if len(classes) > 2 else [r for r in apart if r is rows[int(frequencies.argmin())]]
    if len(classes) == 2 and told:
        notes.append(f"The average precision is that of {told[0]['class']}, the rarer class.")
    precise = [row["average_precision"] for row in told]
    found: Scores = {
        "accuracy": float(metrics.accuracy(probs, y)),
        "balanced_accuracy": _mean([row["recall"] for row in seen]) if apart else None,
        "auroc": _mean([row["auroc"] for row in apart]),
        "average_precision": _mean(precise),
        "f1": _mean([row["f1"] for row in rows if row["rows"] or row["predicted"]])
        if apart
        else None,
        "nll": -float(_bounded(log_probs, notes).mean()),
        "brier": float(metrics.brier(probs, y)),
        "ece": float(metrics.ece(probs, y)),
    }
    if float(frequencies.max()) * len(classes) >= _UNEVEN:
        found = {name: found[name] for name in ("balanced_accuracy", "auroc")} | found
        notes.append(
            f"{float(frequencies.max()):.1%} of the training rows are of one class, so accuracy "
            "is easy: read balanced accuracy and AUROC, and accuracy beside that class alone."
        )
    counts = torch.bincount(len(classes) * y + probs.argmax(1), minlength=len(classes) ** 2)
    return Scored(found, rows, counts.reshape(len(classes), -1).tolist(), notes)


def _absent(y: Tensor, classes: Sequence[str]) -> list[str]:
    """What a class without a row in the test part leaves open."""
    counts = torch.bincount(y, minlength=len(classes)).tolist()
    absent = [name for name, count in zip(classes, counts, strict=True) if count == 0]
    if not absent:
        return []
    shown = ", ".join(absent[:5]) + (f" and {len(absent) - 5} more" if len(absent) > 5 else "")
    told = (
        "averages over classes leave it out"
        if len(classes) - len(absent) > 1
        else "balanced accuracy, AUROC, average precision and F1 are undefined"
    )
    return [f"The test part has no row of class {shown}: {told}."]


def _bounded(log_probs: Tensor, notes: list[str]) -> Tensor:
    """Log-probabilities with the smallest normal number in the place of zero."""
    zero = int((log_probs == -math.inf).sum())
    if zero:
        notes.append(
            f"{zero} rows were given probability 0 of what happened; the NLL counts them as "
            f"{math.exp(_LEAST):.1e}."
        )
    return log_probs.double().clamp(min=_LEAST) if zero else log_probs.double()


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _by_class(probs: Tensor, y: Tensor, classes: Sequence[str]) -> list[dict[str, Any]]:
    sklearn = needed("sklearn.metrics")
    scores, truth, guess = (t.cpu().numpy() for t in (probs.double(), y, probs.argmax(1)))
    labels = range(len(classes))
    kinds = sklearn.precision_recall_fscore_support(truth, guess, labels=labels, zero_division=0)
    found = []
    for k, (precision, recall, f1, rows) in enumerate(zip(*kinds, strict=True)):
        both = 0 < rows < len(truth)
        found.append(
            {
                "class": classes[k],
                "rows": int(rows),
                "predicted": int((guess == k).sum()),
                "precision": float(precision),
                "recall": float(recall),
                "f1": float(f1),
                "auroc": _area(sklearn.roc_auc_score, truth == k, scores[:, k], both),
                "average_precision": _area(
                    sklearn.average_precision_score, truth == k, scores[:, k], both
                ),
            }
        )
    return found


def _area(score: Any, truth: Any, given: Any, both: bool) -> float | None:
    return float(score(truth, given)) if both else None


def number_scores(
    mean: Tensor, std: Tensor, log_probs: Tensor, y: Tensor, interval: tuple[Tensor, Tensor]
) -> Scored:
    """Scores of predicted numbers, in units of the target; all of shape (N, 1) or (N,)."""
    sklearn = needed("sklearn.metrics")
    truth, middle = y.flatten().double(), mean.flatten().double()
    notes = []
    explained = None
    if len(truth) > 1 and float(truth.std()) > 0:
        explained = float(sklearn.r2_score(truth.cpu().numpy(), middle.cpu().numpy()))
    else:
        notes.append(
            "All targets of the test part are equal, so R\N{SUPERSCRIPT TWO} is undefined."
        )
    found: Scores = {
        "rmse": float((middle - truth).square().mean().sqrt()),
        "mae": float((middle - truth).abs().mean()),
        "r2": explained,
        "nll": -float(log_probs.double().mean()),
        "crps": float(metrics.crps_gaussian(mean, std, y)),
        "coverage95": float(metrics.interval_coverage(*interval, y)),
        "width95": float(metrics.interval_width(*interval)),
    }
    return Scored(found, notes=notes)


def frequencies(y: Tensor, classes: int) -> Tensor:
    """How frequent each class is among targets, shape (K,)."""
    return torch.bincount(y, minlength=classes).double() / len(y)


def majority(known: Tensor, y: Tensor, classes: Sequence[str]) -> Scores:
    """Scores of the frequencies of the training rows, the same for every row."""
    shares = (torch.bincount(known, minlength=len(classes)) + 1.0) / (len(known) + len(classes))
    probs = shares.double().expand(len(y), -1)
    return class_scores(
        probs, probs.log()[range(len(y)), y], y, classes, frequencies(known, len(classes))
    ).metrics


def constant(known: Tensor, y: Tensor) -> Scores:
    """Scores of the mean and the deviation of the training rows, the same for every row."""
    mean = known.double().mean().expand(y.shape)
    std = known.double().std(correction=0).clamp(min=1e-12).expand(y.shape)
    z = (y.double() - mean) / std
    wide = math.sqrt(2) * float(torch.erfinv(torch.tensor(LEVEL, dtype=torch.float64))) * std
    log_probs = -0.5 * (z.square() + LOG_2PI) - std.log()
    return number_scores(mean, std, log_probs, y.double(), (mean - wide, mean + wide)).metrics
