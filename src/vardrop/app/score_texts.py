"""Names, meanings and formats of scores, and the rule for clear differences."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from vardrop._core.checks import suggest
from vardrop._core.errors import VardropError
from vardrop.metrics.intervals import Estimate


class Score(NamedTuple):
    """The title of a score, its meaning in half a sentence, and which values are better."""

    title: str
    text: str
    better: str


_UP, _DOWN = "higher", "lower"
SCORES = {
    "accuracy": Score("accuracy", "fraction of examples whose most probable class is right", _UP),
    "balanced_accuracy": Score("balanced accuracy", "recall, averaged over the classes", _UP),
    "auroc": Score("AUROC", "how well the classes are separated; 0.5 is chance", _UP),
    "average_precision": Score("average precision", "area under the precision-recall curve", _UP),
    "f1": Score("F1", "harmonic mean of precision and recall, averaged over the classes", _UP),
    "nll": Score("NLL (log loss)", "minus the log-probability of what was observed", _DOWN),
    "brier": Score("Brier score", "squared error of the probabilities, 0 to 2", _DOWN),
    "ece": Score("calibration error (ECE)", "gap between confidence and accuracy, 0 to 1", _DOWN),
    "rmse": Score("RMSE", "root mean squared error, in units of the target", _DOWN),
    "mae": Score("MAE", "mean absolute error, in units of the target", _DOWN),
    "r2": Score("R\N{SUPERSCRIPT TWO}", "fraction of the variance explained; the mean has 0", _UP),
    "crps": Score("CRPS", "distance of the predicted distribution from the value", _DOWN),
    "coverage95": Score("coverage of the 95% interval", "examples inside it", "near 0.95"),
    "width95": Score("width of the 95% interval", "mean width, in units of the target", _DOWN),
    "nll_held_out": Score("NLL on held-out examples", "of the training data, in turn", _DOWN),
    "auroc_entropy": Score("AUROC of the entropy", "out-of-distribution detection", _UP),
    "auroc_epistemic": Score("AUROC of the epistemic part", "out-of-distribution detection", _UP),
}
_FRACTIONS = ("accuracy", "balanced_accuracy", "auroc", "average_precision", "f1", "ece")
# The least and the largest value of a score, if it has bounds.
BOUNDS = {
    **dict.fromkeys((*_FRACTIONS, "coverage95"), (0.0, 1.0)),
    **dict.fromkeys(("brier", "rmse", "mae", "crps", "width95"), (0.0, math.inf)),
    "r2": (-math.inf, 1.0),
}
MODEL = "this model"
_LABELS = {
    "net": MODEL,
    "plain": "plain model",
    "majority": "most frequent class",
    "mean": "mean of the target",
}


def title(name: str) -> str:
    """The title of a score.

    >>> title("coverage95"), title("my_own_score")
    ('coverage of the 95% interval', 'my own score')
    """
    return SCORES[name].title if name in SCORES else name.replace("_", " ")


def number(score: float | None) -> str:
    """A score in a table: four decimals if it is small, fewer if it is large.

    >>> number(0.98765), number(57.757), number(12345.6), number(0.0000123), number(None)
    ('0.9877', '57.76', '12,346', '1.23e-05', 'undefined')
    """
    if not isinstance(score, int | float) or not math.isfinite(score):
        return "undefined" if score is None else str(score)
    size = abs(score)
    if size >= 10:
        return f"{score:,.2f}" if size < 1e4 else f"{score:,.0f}"
    return f"{score:.4f}" if size >= 1e-3 or size == 0 else f"{score:.3g}"


def estimate_text(estimate: Estimate | None) -> str:
    """A score with its 95% interval, if it has one.

    >>> estimate_text(Estimate(0.9, 0.01, 0.88, 0.92))
    '0.9000 [0.8800, 0.9200]'
    """
    if estimate is None or estimate.low is None:
        return number(None if estimate is None else estimate.value)
    return f"{number(estimate.value)} [{number(estimate.low)}, {number(estimate.high)}]"


def judge_difference(score: str, difference: Estimate) -> str:
    """Whether a model is "better" or "worse" than another; empty if that is not clear.

    A difference is clear if its 95% interval does not contain zero. Without an interval it is two
    standard errors on both sides.

    Args:
        score: the name of the score.
        difference: the score of the model minus the score of the other one.

    >>> judge_difference("nll", Estimate(-0.3, 0.1)), judge_difference("nll", Estimate(-0.1, 0.1))
    ('better', '')
    """
    gap, error, low, _ = difference
    if low is None and error is not None:
        difference = Estimate(gap, error, gap - 2 * error, gap + 2 * error)
    wanted = {_UP: 1, _DOWN: -1}.get(SCORES[score].better if score in SCORES else "")
    if wanted is None or difference.sign == 0 or math.isnan(gap):
        return ""
    return "better" if difference.sign == wanted else "worse"


def score_columns(results: Mapping[str, Any]) -> dict[str, dict[str, float | None]]:
    """Scores of a run and of its baselines by label: on test data, else on held-out examples.

    The plain model is scored on held-out examples only.

    >>> score_columns({"metrics": {"rmse": 1.5}, "baseline": {"name": "mean", "rmse": 2.0}})
    {'this model': {'rmse': 1.5}, 'mean of the target': {'rmse': 2.0}}
    """
    by_name = results.get("held_out") or {}
    if results.get("metrics"):
        baseline = dict(results.get("baseline") or {})
        tested = {"net": results["metrics"], baseline.pop("name", None): baseline}
        held = {n: {"nll_held_out": by_name[n]["nll"]} for n in _LABELS if by_name.get(n)}
        by_name = {name: {**tested.get(name, {}), **held.get(name, {})} for name in _LABELS}
    return {label: by_name[name] for name, label in _LABELS.items() if by_name.get(name)}


def check_scores(scores: Sequence[str], defined: Iterable[str] = SCORES) -> None:
    """Raise an error for a name that is not a score."""
    names = list(defined)
    for name in scores:
        if name not in names:
            hint = suggest(name, names)
            raise VardropError(f"Unknown score {name!r}.{hint} Available: {', '.join(names)}.")
