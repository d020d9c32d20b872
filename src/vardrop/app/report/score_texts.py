"""What scores are called, mean and should be, for reports and tables that people read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from vardrop._core.checks import nearest
from vardrop._core.errors import VardropError


class Meaning(NamedTuple):
    """The name of a score, half a sentence on it, and which values are better."""

    title: str
    text: str
    better: str

    @property
    def sentence(self) -> str:
        """What it means and where it should go."""
        return f"{self.text}; {self.better} is better"


_UP, _DOWN = "higher", "lower"
MEANINGS = {
    "accuracy": Meaning("accuracy", "fraction of rows whose most probable class is right", _UP),
    "balanced_accuracy": Meaning(
        "balanced accuracy", "fraction that is found of each class, averaged over the classes", _UP
    ),
    "auroc": Meaning(
        "AUROC",
        "chance that a row of a class is given more probability of it than a row of another; "
        "0.5 is guessing",
        _UP,
    ),
    "average_precision": Meaning(
        "average precision",
        "how pure the list of a class stays as more rows are taken for it; guessing gives the "
        "fraction of its rows",
        _UP,
    ),
    "f1": Meaning("F1", "harmonic mean of precision and recall, averaged over the classes", _UP),
    "nll": Meaning(
        "NLL (log loss)", "surprise at what happened: minus the log of its probability", _DOWN
    ),
    "brier": Meaning(
        "Brier score", "squared distance of the probabilities from what happened, 0 to 2", _DOWN
    ),
    "ece": Meaning("calibration error (ECE)", "gap between confidence and accuracy, 0 to 1", _DOWN),
    "rmse": Meaning("RMSE", "typical error, in units of the target; large ones weigh more", _DOWN),
    "mae": Meaning("MAE", "mean absolute error, in units of the target", _DOWN),
    "r2": Meaning(
        "R\N{SUPERSCRIPT TWO}", "fraction of the variance that is explained; the mean has 0", _UP
    ),
    "crps": Meaning(
        "CRPS", "distance of the predicted distribution from the value, in units of it", _DOWN
    ),
    "coverage95": Meaning(
        "coverage of the 95 % interval", "fraction of rows inside it", "near 0.95"
    ),
    "width95": Meaning(
        "width of the 95 % interval",
        "mean width, in units of the target, to be compared at equal coverage",
        _DOWN,
    ),
    "auroc_entropy": Meaning(
        "AUROC of the entropy", "chance that a foreign case is less certain than one of ours", _UP
    ),
    "auroc_epistemic": Meaning(
        "AUROC of the epistemic part", "the same by what the draws disagree about", _UP
    ),
}
_FRACTIONS = ("accuracy", "balanced_accuracy", "auroc", "average_precision", "f1", "ece")
_POSITIVE = ("brier", "rmse", "mae", "crps", "width95")
# The least and the largest value of a score, where it has bounds.
BOUNDS = {
    **dict.fromkeys((*_FRACTIONS, "coverage95"), (0.0, 1.0)),
    **dict.fromkeys(_POSITIVE, (0.0, math.inf)),
    "r2": (-math.inf, 1.0),
}
BASELINES = {
    "net": "this net",
    "plain": "plain net",
    "majority": "most frequent class",
    "mean": "mean of the target",
}


def title(name: str) -> str:
    """The name of a score for people.

    >>> title("coverage95"), title("my_own_score")
    ('coverage of the 95 % interval', 'my own score')
    """
    return MEANINGS[name].title if name in MEANINGS else name.replace("_", " ")


def number(value: Any) -> str:
    """A score in a table: four decimals where it is small, fewer where it is large.

    >>> number(0.98765), number(57.757), number(12345.6), number(0.0000123), number(None)
    ('0.9877', '57.76', '12,346', '1.23e-05', 'undefined')
    """
    if not isinstance(value, int | float) or not math.isfinite(value):
        return "undefined" if value is None else str(value)
    size = abs(value)
    if size >= 10:
        return f"{value:,.2f}" if size < 1e4 else f"{value:,.0f}"
    return f"{value:.4f}" if size >= 1e-3 or size == 0 else f"{value:.3g}"


def check_scores(scores: Sequence[str], known: Iterable[str] = MEANINGS) -> None:
    """Refuse names that no score has."""
    names = list(known)
    for name in scores:
        if name not in names:
            raise VardropError(
                f"Expected scores among {', '.join(names)}, but got {name!r}.{nearest(name, names)}"
            )
