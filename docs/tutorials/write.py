"""Run the tutorials and write a page and a notebook for each, with output and plots.

python docs/tutorials/write.py [NAME ...]

A tutorial is a Python script in the percent format, which editors show as cells. `# %% [markdown]`
starts a text cell, and `# %%` starts a code cell.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import matplotlib as mpl

HERE = Path(__file__).parent
NAMES = ("how_sure", "smaller", "csv_to_report", "estimators")


@dataclass
class Cell:
    """A text or code cell with its output."""

    code: bool
    source: str
    printed: str = ""
    plots: tuple[bytes, ...] = ()


def cells(script: str) -> list[Cell]:
    """Split a script in the percent format into cells."""
    found = []
    for part in script.split("# %%")[1:]:
        head, _, body = part.partition("\n")
        code, text = "[markdown]" not in head, body.strip("\n")
        if not code:
            text = "\n".join(line.removeprefix("#").removeprefix(" ") for line in text.split("\n"))
        found.append(Cell(code, text.strip("\n")))
    return found


def run(name: str, parts: list[Cell]) -> None:
    """Run the code cells of a tutorial and store their output."""
    from matplotlib import pyplot as plt

    module = ModuleType(name)
    sys.modules[name] = module
    for cell in parts:
        if cell.code:
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(cell.source, f"{name}.py", "exec"), vars(module))
            cell.printed = printed.getvalue().rstrip()
            plots = []
            for number in plt.get_fignums():
                image = io.BytesIO()
                plt.figure(number).savefig(image, format="png", dpi=110)
                plots.append(image.getvalue())
            cell.plots = tuple(plots)
            plt.close("all")


def page(name: str, parts: list[Cell]) -> str:
    """Return the tutorial as Markdown. Plots are separate files."""
    lines, number = [], 0
    for cell in parts:
        lines += [f"```python\n{cell.source}\n```" if cell.code else cell.source, ""]
        if cell.printed:
            lines += [f"```\n{cell.printed}\n```", ""]
        for _ in cell.plots:
            number += 1
            lines += [f"![Plot {number}]({name}-{number}.png)", ""]
    lines.append(f"As a [script]({name}.py) or as a [notebook]({name}.ipynb).")
    return "\n".join(lines) + "\n"


def _outputs(cell: Cell) -> list[dict[str, Any]]:
    shown: list[dict[str, Any]] = []
    if cell.printed:
        text = cell.printed.splitlines(keepends=True)
        shown.append({"output_type": "stream", "name": "stdout", "text": text})
    for plot in cell.plots:
        data = {"image/png": base64.b64encode(plot).decode()}
        shown.append({"output_type": "display_data", "data": data, "metadata": {}})
    return shown


def notebook(parts: list[Cell]) -> str:
    """Return the tutorial as a notebook in format 4.4."""
    found = []
    for cell in parts:
        source = cell.source.splitlines(keepends=True)
        entry: dict[str, Any] = {"metadata": {}, "source": source}
        if cell.code:
            more = {"execution_count": None, "outputs": _outputs(cell)}
            found.append({"cell_type": "code", **entry, **more})
        else:
            found.append({"cell_type": "markdown", **entry})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    about = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return json.dumps(
        {"cells": found, "metadata": about, "nbformat": 4, "nbformat_minor": 4},
        indent=1,
        ensure_ascii=False,
    )


def write(name: str) -> None:
    """Run one tutorial in an empty folder and write its page, notebook and plots."""
    parts = cells((HERE / f"{name}.py").read_text())
    os.chdir(tempfile.mkdtemp())
    run(name, parts)
    for old in HERE.glob(f"{name}-*.png"):
        old.unlink()
    for number, plot in enumerate([plot for cell in parts for plot in cell.plots], 1):
        (HERE / f"{name}-{number}.png").write_bytes(plot)
    (HERE / f"{name}.md").write_text(page(name, parts))
    (HERE / f"{name}.ipynb").write_text(notebook(parts) + "\n")


if __name__ == "__main__":
    mpl.use("Agg")
    warnings.filterwarnings("ignore", "FigureCanvasAgg is non-interactive")
    for asked in sys.argv[1:] or NAMES:
        start = time.process_time()
        write(asked)
        print(f"{asked}: {time.process_time() - start:.0f} s")
