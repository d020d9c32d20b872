"""Verdicts on the papers' results: computed from `judged.toml`, which states items and rules."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vardrop._core.errors import VardropError

Row = Mapping[str, Any]
Verdict = Literal["better", "reached", "trade-off", "behind", "not run"]
VERDICTS: tuple[Verdict, ...] = ("better", "reached", "trade-off", "behind", "not run")
DIRECTIONS = ("lower", "higher", "same")
_ROUNDING_ERROR = 1e-12  # of an identity in double precision
RULES = """The items and the rules are in `experiments/judged.toml`, committed before the runs. An
item is one operating point, such as error and compression together. It is *better* if no value is
behind the paper's by more than two standard errors plus rounding and one is ahead by more than
that, *reached* if none is behind, and a *trade-off* if one is ahead and one behind. A trade-off
does not count as reached. The rules were written after the first results were known. With those
results they give 23 of 64 items reached or better. The rules before them gave 41 of 110 values,
23 of which were counted twice.

"""


@dataclass(frozen=True)
class Item:
    """One operating point of a paper: values that are compared together."""

    name: str
    row: Row  # of the experiment: its description and its result
    directions: Mapping[str, str]  # which direction is better, by the name of the value
    claim: str  # what the paper says, for the headline table; empty for most items

    @property
    def verdict(self) -> Verdict:
        """How our values compare with the paper's."""
        if self.row["result"] is None:
            return "not run"
        leads = [self._lead(figure) for figure in self.directions]
        if min(leads) < 0:
            return "trade-off" if max(leads) > 0 else "behind"
        return "better" if max(leads) > 0 else "reached"

    def label(self, figure: str) -> str:
        """The name of a value in a picture."""
        return self.name if len(self.directions) == 1 else f"{self.name}: {figure}"

    def _lead(self, figure: str) -> int:
        """1 if a value is ahead of the paper's by more than its slack, -1 if behind, else 0."""
        ours = self.row["result"]["figures"][figure]["mean"]
        return lead(
            self.directions[figure], self.row["expected"][figure], ours, self._error(figure)
        )

    def _error(self, figure: str) -> float:
        """The standard error, with the variance pooled over the paper's values of one kind."""
        errors = [
            result["standard_error"] or 0.0
            for name, result in self.row["result"]["figures"].items()
            if name in self.row["expected"] and _kind(name) == _kind(figure)
        ]
        return math.sqrt(math.fsum(error**2 for error in errors) / len(errors))


def _kind(figure: str) -> str:
    """What a value measures: "100 units" of any method, "error, %" of any variant."""
    parts = figure.split(", ")
    return parts[-1] if any(map(str.isdigit, parts[-1])) else f"{parts[0]}, {parts[-1]}"


def lead(direction: str, paper: float, ours: float, error: float) -> int:
    """1 if a value is ahead of the paper's by more than its slack, -1 if behind, else 0.

    The slack is two standard errors plus half a unit of the last digit that the paper prints, at
    most a fiftieth of the value.

    >>> lead("lower", 1.92, 1.75, 0.04), lead("higher", 68, 50.5, 0.7), lead("same", 11.3, 11.35, 0)
    (1, -1, 0)
    """
    slack = 2 * error + _half_unit(paper)
    if direction == "same":
        slack = max(slack, 0.1 * abs(paper), _ROUNDING_ERROR)
        return -(abs(ours - paper) > slack)
    ahead = ours - paper if direction == "higher" else paper - ours
    return (ahead > slack) - (ahead < -slack)


def _half_unit(value: float) -> float:
    """Half a unit of the last digit that is printed."""
    digits = f"{value:.12g}"
    decimals = len(digits.partition(".")[2]) if "e" not in digits else 0
    return min(0.5 * math.pow(10, -decimals), 0.02 * abs(value))


def load_items(path: Path, table: Sequence[Row]) -> list[Item]:
    """The judged items of a file, with the results of a table; none if there is no file.

    Args:
        path: a TOML file of `[[item]]`, each with `name`, `experiment` and `figures`. A file
            `claims.toml` in the same folder maps names of items to claims.
        table: what `experiments.page.rows` returns.
    """
    if not path.is_file():
        return []
    rows = {row["name"]: row for row in table}
    claims = tomllib.loads(path.with_name("claims.toml").read_text(encoding="utf-8"))
    items = []
    for data in tomllib.loads(path.read_text(encoding="utf-8"))["item"]:
        name, directions, row = data["name"], data["figures"], rows.get(data["experiment"])
        if row is None or not set(directions) <= set(row["expected"]):
            raise VardropError(
                f"Expected {path} to name an experiment and its expected figures in '{name}', but "
                f"got '{data['experiment']}' with {sorted(directions)}."
            )
        if not set(directions.values()) <= set(DIRECTIONS):
            raise VardropError(
                f"Expected the figures of '{name}' in {path} to be one of {DIRECTIONS}, but got "
                f"{sorted(directions.values())}."
            )
        items.append(Item(name, row, directions, claims.get(name, "")))
    if unknown := sorted(set(claims) - {item.name for item in items}):
        raise VardropError(f"Expected claims.toml to name judged items, but got {unknown}.")
    return items


def count_verdicts(items: Sequence[Item]) -> dict[Verdict, int]:
    """How many items have each verdict."""
    return {verdict: sum(item.verdict == verdict for item in items) for verdict in VERDICTS}
