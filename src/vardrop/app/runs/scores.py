"""Scores of predictions as people read them; what they cannot tell is said in words."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vardrop import metrics
from vardrop._core.errors import needed
from vardrop.functional.normal import LOG_2PI
from vardrop.metrics.checks import averaged

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
        confusion: rows by true class (down) and predicted class (across), each counted once.
        notes: sentences on what these rows cannot tell.
    """

    metrics: Scores
    by_class: list[dict[str, Any]] = dataclasses.field(default_factory=list)
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

    With two classes the average precision is that of the rarer one; with more, it and AUROC are of
    one class against the rest, averaged. A class without a row is left out of averages; where two
    classes leave but one, nothing compares them, and the scores that do are None.

    Args:
        probs: shape (N, K).
        log_probs: of the labels, shape (N,).
        y: class indices, shape (N,).
        classes: K names.
        frequencies: of the classes among the rows of the training, shape (K,).
        weight: for how many rows each stands, shape (N,); one where None.
    """
    notes = _absent(y, classes)
    rows = _by_class(probs, y, classes, weight)
    seen = [row for row in rows if row["rows"]]
    apart = [row for row in seen if row["auroc"] is not None]
    told = apart if len(classes) > 2 else [r for r in apart if r is rows[int(frequencies.argmin())]]
    if len(classes) == 2 and told:
        notes.append(f"The average precision is that of {told[0]['class']}, the rarer class.")
    precise = [row["average_precision"] for row in told]
    found: Scores = {
        "accuracy": float(metrics.accuracy(probs, y, weight)),
        "balanced_accuracy": _mean([row["recall"] for row in seen]) if apart else None,
        "auroc": _mean([row["auroc"] for row in apart]),
        "average_precision": _mean(precise),
        "f1": _mean([row["f1"] for row in rows if row["rows"] or row["predicted"]])
        if apart
        else None,
        "nll": -float(averaged(_bounded(log_probs, notes), weight)),
        "brier": float(metrics.brier(probs, y, weight)),
        "ece": float(metrics.ece(probs, y, weight=weight)),
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


def _by_class(
    probs: Tensor, y: Tensor, classes: Sequence[str], weight: Tensor | None
) -> list[dict[str, Any]]:
    sklearn = needed("sklearn.metrics")
    scores, truth, guess = (t.cpu().numpy() for t in (probs.double(), y, probs.argmax(1)))
    given: dict[str, Any] = {} if weight is None else {"sample_weight": weight.cpu().numpy()}
    kinds = sklearn.precision_recall_fscore_support(
        truth, guess, labels=range(len(classes)), zero_division=0, **given
    )
    found = []
    for k, (precision, recall, f1) in enumerate(zip(*kinds[:3], strict=True)):
        own = truth == k
        rows = int(own.sum())
        counted = own.astype(float) if weight is None else own * given["sample_weight"]
        both = 0 < counted.sum() < (len(truth) if weight is None else float(weight.sum()))
        found.append(
            {
                "class": classes[k],
                "rows": rows,
                "predicted": int((guess == k).sum()),
                "precision": float(precision),
                "recall": float(recall),
                "f1": float(f1),
                "auroc": float(sklearn.roc_auc_score(own, scores[:, k], **given)) if both else None,
                "average_precision": float(
                    sklearn.average_precision_score(own, scores[:, k], **given)
                )
                if both
                else None,
            }
        )
    return found


def number_scores(
    mean: Tensor,
    std: Tensor,
    log_probs: Tensor,
    y: Tensor,
    interval: tuple[Tensor, Tensor],
    weight: Tensor | None = None,
) -> Scored:
    """Scores of predicted numbers, in units of the target; all of shape (N, 1) or (N,)."""
    sklearn = needed("sklearn.metrics")
    truth, middle = y.flatten().double(), mean.flatten().double()
    share = None if weight is None else weight.to(y).reshape(y.shape)
    flat = None if weight is None else weight.double().flatten()
    notes = []
    explained = None
    if len(truth) > 1 and float(truth.std()) > 0:
        given = None if flat is None else flat.cpu().numpy()
        explained = float(
            sklearn.r2_score(truth.cpu().numpy(), middle.cpu().numpy(), sample_weight=given)
        )
    else:
        notes.append(
            "All targets of the test part are equal, so R\N{SUPERSCRIPT TWO} is undefined."
        )
    found: Scores = {
        "rmse": float(averaged((middle - truth).square(), flat).sqrt()),
        "mae": float(averaged((middle - truth).abs(), flat)),
        "r2": explained,
        "nll": -float(averaged(log_probs.double().flatten(), flat)),
        "crps": float(metrics.crps_gaussian(mean, std, y, share)),
        "coverage95": float(metrics.interval_coverage(*interval, y, share)),
        "width95": float(metrics.interval_width(*interval, share)),
    }
    return Scored(found, notes=notes)


def majority(
    counts: Tensor, y: Tensor, classes: Sequence[str], weight: Tensor | None = None
) -> Scores:
    """Scores of the frequencies of the training rows, the same for every row.

    Args:
        counts: how many of them are of each class, shape (K,).
        y: class indices, shape (N,).
        classes: K names.
        weight: for how many rows each stands, shape (N,).
    """
    counts = counts.double()
    shares = (counts + 1) / (counts.sum() + len(classes))
    probs = shares.expand(len(y), -1)
    logs = probs.log()[range(len(y)), y]
    return class_scores(probs, logs, y, classes, counts / counts.sum(), weight).metrics


def constant(mean: float, std: float, y: Tensor, weight: Tensor | None = None) -> Scores:
    """Scores of the mean and the deviation of the training rows, the same for every row."""
    y = y.double()
    means, stds = torch.full_like(y, mean), torch.full_like(y, max(std, 1e-12))
    z = (y - means) / stds
    wide = math.sqrt(2) * float(torch.erfinv(torch.tensor(LEVEL, dtype=torch.float64))) * stds
    logs = -0.5 * (z.square() + LOG_2PI) - stds.log()
    return number_scores(means, stds, logs, y, (means - wide, means + wide), weight).metrics
