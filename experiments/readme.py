"""Tables of the README and of pages, written between markers from the files in `results/`.

A page marks a table with `<!-- table NAME -->` and `<!-- end -->`. `readme.toml` has its columns
and rows. In a cell, `{experiment: figure}` stands for the mean and standard error of a figure.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.page import format_mean
from vardrop._core.errors import VardropError
from vardrop._core.files import write_atomically

_TABLE = re.compile(r"(<!-- table ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_FIGURE = re.compile(r"\{([\w/-]+): ([^}]+)\}")
_LEAST_SEEDS = 3
PAGES = (
    "README.md",
    "docs/index.md",
    "docs/calibrate.md",
    "docs/choose.md",
    "docs/predict.md",
    "docs/slim.md",
)


def write_tables(root: Path, table: Sequence[Mapping[str, Any]]) -> None:
    """Write the tables of all pages.

    Args:
        root: of the repository.
        table: the experiments and their results.
    """
    for page in PAGES:
        text = (root / page).read_text()
        filled = fill_tables(text, root / "experiments" / "readme.toml", table)
        if filled != text:
            write_atomically(root / page, filled.encode())


def fill_tables(text: str, descriptions: Path, table: Sequence[Mapping[str, Any]]) -> str:
    """A page with new tables.

    Args:
        text: the page.
        descriptions: the file with the columns and rows of all tables.
        table: the experiments and their results.
    """
    described = tomllib.loads(descriptions.read_text())
    results = {row["name"]: row["result"] for row in table}

    def figure(match: re.Match[str]) -> str:
        name, key = match.groups()
        runs = len(results[name]["runs"])
        if runs < _LEAST_SEEDS:
            raise VardropError(f"Expected {name} to have {_LEAST_SEEDS} seeds, but got {runs}.")
        return format_mean(results[name]["figures"][key])

    def fill(match: re.Match[str]) -> str:
        begin, name, end = match.groups()
        columns, lines, sources = described[name]["columns"], [], []
        for cells in described[name]["rows"]:
            needed = {experiment for cell in cells for experiment, _ in _FIGURE.findall(cell)}
            if all(results[experiment] is not None for experiment in needed):
                sources.append(", ".join(f"`results/{e}.json`" for e in sorted(needed)))
                lines.append([_FIGURE.sub(figure, cell) for cell in cells])
        lines = [columns, ["---", *["--:"] * (len(columns) - 1)], *lines]
        if len(set(sources)) == 1:
            source = f"\nSource: {sources[0]}\n"
        else:
            lines = [[*line, s] for line, s in zip(lines, ["file", "---", *sources], strict=True)]
            source = ""
        return begin + "".join(f"| {' | '.join(line)} |\n" for line in lines) + source + end

    return _TABLE.sub(fill, text)
