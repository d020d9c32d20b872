"""The comparison of `vardrop demo` on test sets that were not used to design it."""

from __future__ import annotations

from typing import Any

import torch

from experiments.slim import Part, Seed
from experiments.trainings import Watch
from vardrop.app.demo import score_rows


def compare_demo(seed: int, watch: Watch | None = None) -> dict[str, Any]:
    """The scores of all rows.

    Args:
        seed: of the test set and of the trainings.
        watch: keeps the scores.
    """

    def score() -> Part:
        with torch.random.fork_rng(devices=[]):
            return {f"{k}, {name}": v for name, row in score_rows(seed) for k, v in row.items()}

    return {"figures": Seed(seed, watch or Watch(), 1).part("rows", score)}
