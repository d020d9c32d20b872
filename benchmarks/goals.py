"""What a run must show: the row that answers, and its bound. Ratios are at most the bound."""

from __future__ import annotations

from dataclasses import dataclass

from measuring import Row

SMALL, LARGE, LENET = "MLP 784-300-100-10 b100", "MLP 784-1000-1000-10 b128", "LeNet-5-Caffe b128"
TRAIN, PREDICT, LATENCY = "train step", "prediction, 32 draws", "latency of a pruned net"
LRT, DRAWS = "sparse_vd, KL value every 10", "weight_sample, KL value every 10"
LAST, FUSED = ", channels-last", ", fused Adam"


@dataclass(frozen=True)
class Goal:
    """Rows of (case, candidates) whose best ratio is to be at most `bound`.

    With `over`, the ratio is taken over that candidate's, through the plain net both ran beside.
    """

    text: str
    group: str
    case: str
    candidates: tuple[str, ...]
    bound: float
    over: str = ""
    unit: str = "ratio"

    def measured(self, rows: list[Row]) -> float | None:
        def values(names: tuple[str, ...]) -> list[float]:
            return [
                row[self.unit]
                for row in rows
                if (row["group"], row["case"]) == (self.group, self.case)
                and row["candidate"] in names and row.get("threads", 1) == 1
                and row.get(self.unit) is not None
            ]  # fmt: skip

        found, other = values(self.candidates), values((self.over,)) if self.over else [1.0]
        return min(found) / other[0] if found and other else None


def _like_for_like(case: str, layouts: tuple[str, ...], bound: float) -> Goal:
    names = tuple(f"sparse_vd (LRT, sigmoid KL){where}" for where in layouts)
    text = f"same optimizer and KL as cplxmodule VD, {case}, over its time"
    return Goal(text, TRAIN, case, names, bound, over="cplxmodule VD")


GOALS = [
    Goal("LRT train step, exact KL", TRAIN, SMALL, (LRT, LRT + FUSED), 1.9),
    Goal("LRT train step, exact KL", TRAIN, LARGE, (LRT, LRT + FUSED), 1.95),
    Goal("LRT train step, channels-last", TRAIN, LENET, (LRT + LAST, LRT + LAST + FUSED), 1.45),
    Goal("one draw a batch", TRAIN, LARGE, (DRAWS, DRAWS + FUSED), 1.7),
    Goal("one draw a batch", TRAIN, LENET, (DRAWS + LAST, DRAWS + LAST + FUSED), 0.75),
    _like_for_like(SMALL, ("",), 0.7),
    _like_for_like(LARGE, ("",), 0.8),
    _like_for_like(LENET, ("", LAST), 0.6),
    Goal("variance layer", TRAIN, SMALL, ("variance_layer", "variance_layer" + FUSED), 1.1),
    Goal("variance layer", TRAIN, LARGE, ("variance_layer", "variance_layer" + FUSED), 1.1),
    Goal(
        "learned type A", TRAIN, LARGE,
        ("variational_dropout A", "variational_dropout A" + FUSED), 1.15,
    ),
    Goal("predict", PREDICT, "MLP 784-300-100-10 b256", ("predict",), 20),
    Goal("predict", PREDICT, "MLP 784-300-100-10 b1", ("predict",), 9),
    Goal("predict", PREDICT, "LeNet-5 b256", ("predict",), 20),
    Goal("predict", PREDICT, "LeNet-5 b1", ("predict",), 15),
    Goal(
        "exact KL gradient", "kl(net) and gradient", "1 M weights",
        ("exact gradient without value",), 0.25,
    ),
    Goal("shrunken or CSR", LATENCY, "LeNet-300-100 b256", ("shrunken", "CSR"), 0.25),
    Goal("shrunken or CSR", LATENCY, "LeNet-300-100 b1", ("shrunken", "CSR"), 0.6),
    Goal("shrunken", LATENCY, "LeNet-5 b256", ("shrunken",), 0.3),
    Goal("shrunken, compiled", LATENCY, "LeNet-5 b256", ("shrunken, torch.compile",), 0.13),
    Goal("shrunken, onnxruntime", LATENCY, "LeNet-5 b256", ("shrunken, onnxruntime",), 0.1),
    *(
        Goal("peak memory", "peak memory of a train step", case, (LRT,), 2.2)
        for case in (SMALL, LARGE, LENET)
    ),
    Goal(
        "import beyond torch, ms", "import", "import vardrop, beyond torch", ("vardrop",), 150,
        unit="ms",
    ),
]  # fmt: skip
