"""What a run must show: the row that answers, and its bound. Ratios are at most the bound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from measuring import Row

SMALL, LARGE, LENET = "MLP 784-300-100-10 b100", "MLP 784-1000-1000-10 b128", "LeNet-5-Caffe b128"
ENCODER, RECURRENT = "nn.TransformerEncoder, 4 layers b32", "nn.LSTM 2 x 256, 64 steps b32"
TRAIN, PREDICT, LATENCY = "train step", "prediction, 32 draws", "latency of a pruned net"
KL = "kl(net) and gradient"
LRT, DRAWS = "sparse_vd, KL value every 10", "weight_sample, KL value every 10"
COMPILED = ", vd.compile"
COMPILED_LRT = ("sparse_vd" + COMPILED, LRT + COMPILED)
ZERO_MEAN = ("variance_layer", "variance_layer" + COMPILED)
TYPE_A = ("variational_dropout A", "variational_dropout A" + COMPILED)
LAST, FUSED = ", channels-last", ", fused Adam"
VALUES = ("exact value and gradient", "exact value and gradient, torch.compile")
SMALLER = ("shrunken",)
OURS = "vardrop"  # our candidate in the processes of other libraries


@dataclass(frozen=True)
class Goal:
    """Rows of (case, candidates) of which the best is to be at most `bound`, then at most `then`.

    With `over`, the ratio is taken over the best of those candidates of the same process.
    """

    text: str
    group: str
    case: str
    candidates: tuple[str, ...]
    bound: float
    then: float | None = None
    over: tuple[str, ...] = ()
    environment: str = ""
    unit: str = "ratio"

    def _best(self, rows: list[Row], names: tuple[str, ...]) -> Row | None:
        found = [
            row for row in rows
            if (row["group"], row["case"]) == (self.group, self.case)
            and row["candidate"] in names and row.get("threads", 1) == 1
            and row.get("environment", "") == self.environment
            and row.get(self.unit) is not None
        ]  # fmt: skip
        return min(found, key=lambda row: float(row[self.unit]), default=None)

    def answer(self, rows: list[Row]) -> tuple[float, Row] | None:
        """The figure that counts and the row it is from, where it was measured."""
        best = self._best(rows, self.candidates)
        other = self._best(rows, self.over) if self.over else {self.unit: 1.0}
        if best is None or other is None:
            return None
        return best[self.unit] / other[self.unit], best

    def verdict(self, value: float) -> str:
        if value > self.bound:
            return "no"
        if self.then is None:
            return "yes"
        return "yes, both" if value <= self.then else "the first"


def _fused(name: str, *compiled: str) -> tuple[str, ...]:
    return name, name + FUSED, *(form + FUSED for form in compiled)


def _like_for_like(case: str, layouts: tuple[str, ...], bound: float) -> Goal:
    ours = tuple(f"{OURS}, LRT{where}" for where in (*layouts, COMPILED))
    theirs = tuple(f"cplxmodule VD{where}" for where in layouts)
    text = "as cplxmodule VD: same optimizer, KL value at every step, over its time"
    return Goal(text, TRAIN, case, ours, bound, over=theirs, environment="cplxmodule")


GOALS = [
    Goal("LRT train step, exact KL", TRAIN, SMALL, _fused(LRT, *COMPILED_LRT), 1.9, 1.6),
    Goal("LRT train step, exact KL", TRAIN, LARGE, _fused(LRT, *COMPILED_LRT), 1.95, 1.7),
    Goal("LRT train step, exact KL, channels-last", TRAIN, LENET, _fused(LRT + LAST), 1.45, 1.2),
    Goal("one draw a batch", TRAIN, LARGE, _fused(DRAWS, DRAWS + COMPILED), 1.7),
    Goal("one draw a batch, channels-last", TRAIN, LENET, _fused(DRAWS + LAST), 0.75),
    _like_for_like(SMALL, ("",), 0.7),
    _like_for_like(LARGE, ("",), 0.8),
    _like_for_like(LENET, ("", LAST), 0.6),
    Goal("variance layer", TRAIN, SMALL, _fused(*ZERO_MEAN), 1.1),
    Goal("variance layer", TRAIN, LARGE, _fused(*ZERO_MEAN), 1.1),
    Goal("learned type A", TRAIN, LARGE, _fused(*TYPE_A), 1.15),
    Goal("one draw a batch", TRAIN, RECURRENT, _fused(DRAWS), 1.5),
    Goal("one draw a batch", TRAIN, ENCODER, _fused(DRAWS), 1.2),
    Goal("LRT train step, exact KL", TRAIN, ENCODER, _fused(LRT), 2.2),
    Goal("predict, in forward passes", PREDICT, "MLP 784-300-100-10 b256", ("predict",), 20),
    Goal("predict, in forward passes", PREDICT, "MLP 784-300-100-10 b1", ("predict",), 9),
    # Local noise on every position; whole functions, on request, cost half.
    Goal("predict, in forward passes", PREDICT, "LeNet-5 b256", ("predict",), 30),
    Goal("predict, in forward passes", PREDICT, "LeNet-5 b1", ("predict",), 15),
    Goal("exact KL, gradient alone", KL, "1 M weights", ("exact gradient without value",), 0.25),
    Goal("exact KL, value and gradient", KL, "1 M weights", VALUES, 0.25),
    Goal("shrunken", LATENCY, "LeNet-300-100 b256", SMALLER, 0.25),
    Goal("shrunken", LATENCY, "LeNet-300-100 b1", SMALLER, 0.6),
    Goal("shrunken", LATENCY, "LeNet-5 b256", SMALLER, 0.3),
    Goal("shrunken, compiled", LATENCY, "LeNet-5 b256", ("shrunken, torch.compile",), 0.13),
    Goal("shrunken, onnxruntime", LATENCY, "LeNet-5 b256", ("shrunken, onnxruntime",), 0.1),
    *(
        Goal("peak memory", "peak memory of a train step", case, (LRT,), 2.2)
        for case in (SMALL, LARGE, LENET)
    ),
    Goal(
        "import beyond torch, ms", "import", "import vardrop, beyond torch", (OURS,), 150,
        unit="ms",
    ),
]  # fmt: skip


def asked(group: str, case: str, candidate: str) -> bool:
    """Whether a goal rests on this row."""
    return any(
        (goal.group, goal.case) == (group, case) and candidate in goal.candidates for goal in GOALS
    )
