"""Score the models of the demo, print a table, and write a report."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, stdev

import torch
from matplotlib.axes import Axes
from rich.console import Console
from rich.table import Table
from torch import Tensor

from vardrop import metrics
from vardrop._core.progress import ProgressLine
from vardrop.app.data import load_out_of_distribution
from vardrop.app.demo.digits import KINDS, STRENGTHS, corrupt, split
from vardrop.app.demo.rows import (
    BAYES,
    DECAY,
    ENSEMBLE,
    PLAIN,
    PRUNED,
    ROWS,
    SPARSE,
    train_rows,
)
from vardrop.app.report import canvas, page
from vardrop.app.report.gallery import make_card
from vardrop.app.runs.config import free_directory, prepare

Scores = dict[str, float]
SEEDS = (10, 11, 12)
# Digits after the point, and whether a larger score is better.
COLUMNS = {
    "clean acc %": (1, True),
    "clean NLL": (3, False),
    "corr. acc %": (1, True),
    "corr. NLL": (2, False),
    "corr. ECE": (3, False),
    "AUROC": (3, True),
    "file kB": (1, False),
    "train s": (1, False),
}
_LEGEND = (
    "Mean ± standard error over {} test sets; * marks the best mean. corr.: mean of 7 corruptions "
    "at 5 strengths. AUROC: photographs detected by entropy. train s: CPU seconds, with the choice "
    "of settings."
)
_PAIRS = ((SPARSE, PLAIN), (SPARSE, PRUNED), (BAYES, ENSEMBLE), (BAYES, DECAY))


def main(out: str | Path | None = None, seeds: Sequence[int] = SEEDS) -> dict[str, list[Scores]]:
    """Train all models for every seed, print a table and sentences, and write a report.

    Args:
        out: a directory; runs/demo-<number> by default.
        seeds: of the test sets and trainings.

    Returns:
        The scores of every seed, by model.
    """
    directory = free_directory("demo") if out is None else Path(out)
    prepare(directory, force=False)
    print("Seven models on digits of unseen writers, clean and corrupted. About a minute.")
    scores: dict[str, list[Scores]] = {}
    total = len(ROWS) * len(seeds)
    with torch.random.fork_rng(devices=[]), ProgressLine("demo", total, progress=True) as line:
        for seed in seeds:
            for name, row in score_rows(seed):
                scores.setdefault(name, []).append(row)
                line.advance(text=f"{name}, seed {seed}")
    console, sentences = Console(), [compare(scores, *pair) for pair in _PAIRS]
    console.print(_table(scores))
    console.print(_LEGEND.format(len(seeds)), *sentences, sep="\n")
    path = directory / "report.html"
    path.write_text(_page(scores, sentences), encoding="utf-8")
    console.print(f"report: {path.resolve()}", soft_wrap=True)
    return scores


def score_rows(seed: int) -> Iterator[tuple[str, Scores]]:
    """Train the models of one seed, and score them on its test digits.

    Args:
        seed: of the split and of the trainings.
    """
    train, validation, test = split(seed)
    photos = load_out_of_distribution("photos", (1, 8, 8)).flatten(1)
    corrupted = [torch.cat([corrupt(k, test.x, strength) for k in KINDS]) for strength in STRENGTHS]
    for name, row in train_rows(seed, train, validation):
        clean = row.predict(test.x)
        yield (
            name,
            {
                **{
                    f"clean {key}": value
                    for key, value in _quality(clean.log_probs, test.y).items()
                },
                **_score_corrupted([row.predict(x).log_probs for x in corrupted], test.y),
                "AUROC": float(metrics.auroc(clean.entropy, row.predict(photos).entropy)),
                "file kB": row.bytes / 1000,
                "train s": row.seconds,
            },
        )


def _score_corrupted(logs: Sequence[Tensor], y: Tensor) -> Scores:
    """Scores that are averaged over kinds and strengths, and the NLL of every strength."""
    qualities = [[_quality(part, y) for part in log.split(len(y))] for log in logs]
    scores = {
        f"corr. {key}": fmean(q[key] for kinds in qualities for q in kinds)
        for key in ("acc %", "NLL", "ECE")
    }
    for strength, kinds in zip(STRENGTHS, qualities, strict=True):
        scores[f"NLL at strength {strength}"] = fmean(quality["NLL"] for quality in kinds)
    return scores


def _quality(log_probs: Tensor, y: Tensor) -> Scores:
    probs = log_probs.exp()
    return {
        "acc %": 100 * float(metrics.accuracy(probs, y)),
        "NLL": float(metrics.nll_from_log_probs(log_probs, y)),
        "ECE": float(metrics.ece(probs, y)),
    }


def estimate(rows: Sequence[Scores], column: str) -> tuple[float, float]:
    """The mean of a score over seeds, and its standard error."""
    values = [row[column] for row in rows]
    return fmean(values), stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def cells(scores: dict[str, list[Scores]]) -> dict[str, list[tuple[str, str]]]:
    """The cells of the table by model: means, the best one with a star, and standard errors."""
    text: dict[str, list[tuple[str, str]]] = {name: [] for name in scores}
    for column, (places, larger) in COLUMNS.items():
        means = {name: estimate(rows, column)[0] for name, rows in scores.items()}
        best = (max if larger else min)(means.values())
        for name, rows in scores.items():
            mean, error = estimate(rows, column)
            text[name].append((f"{mean:.{places}f}{'*' * (mean == best)}", f"±{error:.{places}f}"))
    return text


def _table(scores: dict[str, list[Scores]]) -> Table:
    title = "scikit-learn digits: 1000 to train, 198 to choose, 599 to test"
    table = Table("", title=title, box=None, padding=(0, 1, 0, 0))
    for column in COLUMNS:
        table.add_column(column.replace(" ", "\n"), justify="right", no_wrap=True)
    for name, row in cells(scores).items():
        table.add_row(name, *(f"{mean}\n[dim]{error}[/dim]" for mean, error in row))
    return table


def compare(scores: dict[str, list[Scores]], name: str, other: str) -> str:
    """A sentence about the differences between two models, over the same seeds.

    Args:
        scores: of every seed, by model.
        name: the model.
        other: the model it is compared with.
    """
    pairs = list(zip(scores[name], scores[other], strict=True))

    def gap(column: str, places: int) -> str:
        mean = fmean(score[column] - other_score[column] for score, other_score in pairs)
        return f"{round(mean, places) + 0.0:+.{places}f}"  # adding 0.0 turns -0.0 into 0.0

    lower = sum(score["corr. NLL"] < other_score["corr. NLL"] for score, other_score in pairs)
    ratio = fmean(s["file kB"] for _, s in pairs) / fmean(s["file kB"] for s, _ in pairs)
    size = f"{ratio:.1f} times smaller" if ratio >= 1 else f"{1 / ratio:.1f} times larger"
    return (
        f"{name} compared with {other}: the file is {size}. Corrupted digits: NLL "
        f"{gap('corr. NLL', 2)} (lower in {lower} of {len(pairs)}), accuracy "
        f"{gap('corr. acc %', 1)} points. Clean digits: NLL {gap('clean NLL', 3)}, accuracy "
        f"{gap('clean acc %', 1)} points. AUROC {gap('AUROC', 3)}."
    )


def _page(scores: dict[str, list[Scores]], sentences: list[str]) -> str:
    rows = [
        [page.Cell(name), *(page.Cell(mean, error) for mean, error in row)]
        for name, row in cells(scores).items()
    ]
    table = page.Table(["", *COLUMNS], rows, _LEGEND.format(len(next(iter(scores.values())))))
    caption = "Means and standard errors over test sets; lower is better."
    size = "Error bars are standard errors over test sets; up and left is better."
    return page.render(
        title="digits of unseen writers",
        verdicts={"": [sentence.split(": ", 1) for sentence in sentences]},
        scores=table,
        pictures=[
            ("Corrupted digits", caption, [make_card("NLL", "NLL", plot_strengths(scores))]),
            ("File size", size, [make_card("File size", "File size", plot_sizes(scores))]),
        ],
    )


def plot_strengths(scores: dict[str, list[Scores]]) -> Axes:
    """NLL by the strength of the corruption.

    Args:
        scores: of every seed, by model.
    """
    ax = canvas.axes(None, 4.4, 3.8)
    columns = ["clean NLL", *(f"NLL at strength {strength}" for strength in STRENGTHS)]
    colours = (canvas.GREY, canvas.BLUE, *canvas.OTHERS)
    for (name, rows), colour in zip(scores.items(), colours, strict=True):
        means, errors = zip(*(estimate(rows, column) for column in columns), strict=True)
        ax.errorbar((0, *STRENGTHS), means, errors, color=colour, label=name, lw=1.5, capsize=2)
    canvas.tidy(ax, "strength of the corruption", "NLL")
    canvas.legend_above(ax)
    return ax


def plot_sizes(scores: dict[str, list[Scores]]) -> Axes:
    """Accuracy on corrupted digits by the size of the file.

    Args:
        scores: of every seed, by model.
    """
    ax = canvas.axes(None, 4.4, 3.8)
    colours = (canvas.GREY, canvas.BLUE, *canvas.OTHERS)
    for (name, rows), colour in zip(scores.items(), colours, strict=True):
        (size, _), (accuracy, error) = (estimate(rows, c) for c in ("file kB", "corr. acc %"))
        ax.errorbar(size, accuracy, error, color=colour, label=name, marker="o", ls="", capsize=2)
    ax.set_xscale("log")
    canvas.tidy(ax, "file size in kB", "accuracy on corrupted digits, %")
    canvas.legend_above(ax)
    return ax
