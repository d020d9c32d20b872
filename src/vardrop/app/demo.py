"""The demo: seven ways to train one small model on scikit-learn's digits, compared.

The digits are of unseen writers, clean and corrupted in seven ways. All models have the same
layers, optimizer, batches and epochs. Their settings are chosen on validation digits by one rule,
from grids of two or three settings.
"""

from __future__ import annotations

import copy
import math
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import vardrop as vd
from vardrop._core.progress import ProgressLine
from vardrop.app.data import Images, load_out_of_distribution
from vardrop.app.data.datasets import digits
from vardrop.app.report import canvas, page
from vardrop.app.report.gallery import make_card
from vardrop.app.runs.config import free_directory, prepare
from vardrop.noisy import has_noise
from vardrop.tuning import train

KINDS = ("Gaussian noise", "salt and pepper", "blur", "shift", "rotation", "contrast", "occlusion")
STRENGTHS, SEEDS = (1, 2, 3, 4, 5), (10, 11, 12)
PLAIN, TEMPERATURE, ENSEMBLE = "plain", "+ temperature", "5 plain models"
DECAY, PRUNED = "weight decay", "+ magnitude pruning"
BAYES, SPARSE = "Bayes by Backprop", "sparse VD, pruned"
ROWS = (PLAIN, TEMPERATURE, ENSEMBLE, DECAY, PRUNED, BAYES, SPARSE)
_PAIRS = ((SPARSE, PLAIN), (SPARSE, PRUNED), (BAYES, ENSEMBLE), (BAYES, DECAY))
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
_TITLE = "scikit-learn digits: 1000 to train, 198 to choose, 599 to test"
_LEGEND = (
    "Mean ± standard error over {} test sets; * marks the best mean. corr.: mean of 7 corruptions "
    "at 5 strengths. AUROC: photographs detected by entropy. train s: CPU seconds, with the choice "
    "of settings."
)
_SAME = "A temperature changes neither the accuracy nor the size of the plain model."
_TRAINED, _TESTED = 1000, 599
_RATE, _BATCH, _EPOCHS, _DRAWS, _MEMBERS = 5e-3, 200, 100, 16, 5
_DECAYS, _FRACTIONS = (1e-4, 1e-3, 3e-3), (0.2, 0.1, 0.05)
_KL_WEIGHTS, _SPARSE_KL_WEIGHTS = (0.01, 0.03), (0.03, 0.1)

Scores = dict[str, float]
Predict = Callable[[Tensor], vd.Prediction]
# A name, a way to predict, the size of its file, and the CPU seconds of all its trainings.
Row = tuple[str, Predict, int, float]


class Candidate(NamedTuple):
    """A trained model, its setting, and the size of its file."""

    net: nn.Module
    setting: float
    bytes: int


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
    scores: dict[str, list[Scores]] = {name: [] for name in ROWS}
    line = ProgressLine("demo", len(ROWS) * len(seeds), progress=True)
    with torch.random.fork_rng(devices=[]), line:
        for seed in seeds:
            for name, row in score_rows(seed):
                scores[name].append(row)
                line.advance(text=f"{name}, seed {seed}")
    console, sentences = Console(), [compare(scores, *pair) for pair in _PAIRS]
    table = Table("", title=_TITLE, box=None, padding=(0, 1, 0, 0))
    for column in COLUMNS:
        table.add_column(column.replace(" ", "\n"), justify="right", no_wrap=True)
    for name, cell in cells(scores).items():
        table.add_row(name, *(f"{mean}\n[dim]{error}[/dim]" for mean, error in cell))
    console.print(table)
    console.print(_LEGEND.format(len(seeds)), *sentences, sep="\n")
    path = directory / "report.html"
    path.write_text(render_page(scores, sentences), encoding="utf-8")
    console.print(f"report: {path.resolve()}", soft_wrap=True)
    return scores


def split(seed: int) -> tuple[Images, Images, Images]:
    """1000 training digits, 198 validation digits, and a contiguous third of the file for testing.

    The file is ordered by writer, so the test digits were written by other people.

    Args:
        seed: chooses the third and shuffles the rest.
    """
    x, y = digits()
    order = torch.arange(len(y)).roll(-(_TESTED * seed + 137 * (seed // 3)))
    test, rest = order[:_TESTED], order[_TESTED:]
    rest = rest[torch.randperm(len(rest), generator=torch.Generator().manual_seed(seed))]
    parts = (rest[:_TRAINED], rest[_TRAINED:], test)
    train, validation, tested = (Images(x[part].flatten(1), y[part]) for part in parts)
    return train, validation, tested


def corrupt(kind: str, x: Tensor, strength: int) -> Tensor:
    """Corrupted digits. Equal arguments give equal digits, so all models see the same ones.

    Args:
        kind: one of `KINDS`.
        x: digits of shape (N, 64), with values from 0 to 1.
        strength: one of `STRENGTHS`.
    """
    generator, level = torch.Generator().manual_seed(strength), strength - 1
    if kind == "Gaussian noise":
        return (x + 0.1 * strength * torch.randn(x.shape, generator=generator)).clamp(0, 1)
    if kind == "salt and pepper":
        fraction, u = (0.05, 0.1, 0.15, 0.2, 0.3)[level], torch.rand(x.shape, generator=generator)
        return x.where(u >= fraction, (u < fraction / 2).float())
    if kind == "blur":
        kernel = torch.exp(-0.5 * (torch.arange(-3, 4) / (0.4, 0.6, 0.8, 1.0, 1.3)[level]) ** 2)
        square = kernel[:, None] * kernel / kernel.sum() ** 2
        return F.conv2d(x.view(-1, 1, 8, 8), square[None, None], padding=3).flatten(1)
    if kind == "contrast":
        return x.mean(1, keepdim=True).lerp(x, (0.8, 0.6, 0.45, 0.3, 0.2)[level])
    if kind == "occlusion":
        corner = torch.randint(0, 9 - strength, (len(x), 2, 1), generator=generator)
        offset = torch.arange(8) - corner
        inside = (offset >= 0) & (offset < strength)
        return x.masked_fill((inside[:, 0, :, None] & inside[:, 1, None]).flatten(1), 0.0)
    direction = 2 * math.pi * torch.rand(len(x), generator=generator)
    matrix = torch.eye(2, 3).repeat(len(x), 1, 1)
    if kind == "shift":  # by up to 1.5 pixels
        step = torch.stack([direction.cos(), direction.sin()], 1)
        matrix[:, :, 2] = 0.3 * strength * 2 / 7 * step
    else:  # rotation by up to 50 degrees to either side
        angle = math.radians(10 * strength) * (direction - math.pi).sign()
        rows = [angle.cos(), -angle.sin(), angle.sin(), angle.cos()]
        matrix[:, :, :2] = torch.stack(rows, 1).view(-1, 2, 2)
    grid = F.affine_grid(matrix, [len(x), 1, 8, 8], align_corners=True)
    return F.grid_sample(x.view(-1, 1, 8, 8), grid, align_corners=True).flatten(1)


def make_net() -> nn.Sequential:
    """The model of all rows."""
    return nn.Sequential(nn.Linear(64, 300, bias=False), nn.ReLU(), nn.Linear(300, 10))


def fit(
    data: Images, seed: int, decay: float = 0.0, recipe: vd.Recipe | None = None, beta: float = 0.0
) -> nn.Module:
    """Train a model, with learned noise if there is a recipe.

    Args:
        data: the training digits.
        seed: of the weights, the order of the digits and the noise.
        decay: the weight decay.
        recipe: the method.
        beta: the weight of the KL, which is reached after half of the epochs.
    """
    torch.manual_seed(seed)
    net = make_net() if recipe is None else vd.convert(make_net(), recipe)
    elbo = vd.ELBO(net, vd.Categorical(), len(data.y), beta=0.0, kl_value_every=10)
    optimizer = torch.optim.Adam(vd.parameter_groups(elbo, _RATE, weight_decay=decay), fused=True)
    warmup = vd.linear_warmup(0, _EPOCHS / 2, beta)
    for _ in train(elbo, optimizer, *data, _EPOCHS, _BATCH, beta=warmup, seed=seed, progress=False):
        pass
    return net.eval()


def write_and_read(model: vd.Shrunk | nn.Module, setting: float) -> Candidate:
    """A model that was packed into a file and read again."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.vdp"
        size = vd.pack(model, path).bytes
        return Candidate(vd.unpack(path, into=make_net()).eval(), setting, size)


def prune_magnitudes(net: nn.Module, fraction: float, decay: float, data: Images) -> Candidate:
    """Keep the largest weights of a model and train them for half of the epochs."""
    net = copy.deepcopy(net).train()
    weights = [p for p in net.parameters() if p.dim() == 2]
    with torch.no_grad():
        least = torch.cat([w.abs().flatten() for w in weights]).quantile(1 - fraction)
        for weight in weights:
            weight.mul_(weight.abs() >= least)
    optimizer = torch.optim.Adam(net.parameters(), _RATE, weight_decay=decay, fused=True)
    batches = list(zip(data.x.split(_BATCH), data.y.split(_BATCH), strict=True))
    vd.fine_tune(net, batches, F.cross_entropy, optimizer, _EPOCHS // 2, progress=False)
    return write_and_read(net.eval(), fraction)


def make_predict(net: nn.Module, likelihood: vd.Likelihood | None = None) -> Predict:
    """Predictions of a model, with its noise if it has any."""
    if has_noise(net):
        return lambda x: vd.predict(net, x, _DRAWS, seed=0, keep=0)
    return lambda x: vd.predict(net, x, 1, mode="mean", likelihood=likelihood, seed=0)


def choose(candidates: Sequence[Candidate], validation: Images) -> Candidate:
    """The last candidate whose validation NLL is within one standard error of the best.

    Candidates are sorted from the least to the most regularized.
    """
    logs = [make_predict(candidate.net)(validation.x).log_probs for candidate in candidates]
    losses = [F.nll_loss(log, validation.y, reduction="none") for log in logs]
    gaps = [loss - min(losses, key=torch.mean) for loss in losses]
    near = [bool(gap.mean() <= gap.std() / len(gap) ** 0.5) for gap in gaps]
    return [candidate for candidate, fits in zip(candidates, near, strict=True) if fits][-1]


def train_rows(seed: int, data: Images, validation: Images) -> Iterator[Row]:
    """Train all models and choose their settings, one after the other.

    Args:
        seed: of all trainings.
        data: the training digits.
        validation: the digits for all choices.
    """
    size, start = 4 * sum(p.numel() for p in make_net().parameters()), time.process_time()

    def row(name: str, predict: Predict, count: int = size) -> Row:
        return name, predict, count, time.process_time() - start

    plain = fit(data, seed)
    rows = [row(PLAIN, make_predict(plain))]  # the caller takes time between two rows
    calibrated = vd.calibrate(plain, validation, seed=0, progress=False)
    rows.append(row(TEMPERATURE, make_predict(plain, calibrated)))
    members = [plain, *(fit(data, 1000 * k + seed) for k in range(1, _MEMBERS))]
    yield from (*rows, row(ENSEMBLE, vd.Ensemble(members), _MEMBERS * size))
    start = time.process_time()
    net, decay, _ = choose([Candidate(fit(data, seed, d), d, size) for d in _DECAYS], validation)
    decayed = row(DECAY, make_predict(net))
    pruned = choose([prune_magnitudes(net, f, decay, data) for f in _FRACTIONS], validation)
    yield from (decayed, row(PRUNED, make_predict(pruned.net), pruned.bytes))
    start = time.process_time()
    recipe = vd.bayes_by_backprop(vd.Normal(learned=True))
    noisy = [Candidate(fit(data, seed, 0.0, recipe, b), b, 2 * size) for b in _KL_WEIGHTS]
    bayes = choose(noisy, validation)
    yield row(BAYES, make_predict(bayes.net), bayes.bytes)
    start = time.process_time()
    sparse = [(b, fit(data, seed, 0.0, vd.sparse_vd(), b)) for b in _SPARSE_KL_WEIGHTS]
    files = [write_and_read(vd.shrink(net, validation.x), b) for b, net in sparse]
    smallest = choose(files, validation)
    yield row(SPARSE, make_predict(smallest.net), smallest.bytes)


def score_rows(seed: int) -> Iterator[tuple[str, Scores]]:
    """Train the models of one seed, and score them on its test digits.

    Scores of corrupted digits are averaged over kinds and strengths.

    Args:
        seed: of the split and of the trainings.
    """
    train, validation, test = split(seed)
    photos = load_out_of_distribution("photos", (1, 8, 8)).flatten(1)
    corrupted = [torch.cat([corrupt(k, test.x, strength) for k in KINDS]) for strength in STRENGTHS]

    def quality(log_probs: Tensor) -> Scores:
        probs = log_probs.exp()
        return {
            "acc %": 100 * float(vd.metrics.accuracy(probs, test.y)),
            "NLL": float(vd.metrics.nll_from_log_probs(log_probs, test.y)),
            "ECE": float(vd.metrics.ece(probs, test.y)),
        }

    for name, predict, size, seconds in train_rows(seed, train, validation):
        clean, scores = predict(test.x), {}
        logs = [predict(x).log_probs.split(len(test.y)) for x in corrupted]
        by_strength = [[quality(log) for log in kinds] for kinds in logs]
        for key, score in quality(clean.log_probs).items():
            scores[f"clean {key}"] = score
            scores[f"corr. {key}"] = fmean(q[key] for kinds in by_strength for q in kinds)
        for strength, kinds in zip(STRENGTHS, by_strength, strict=True):
            scores[f"NLL at strength {strength}"] = fmean(q["NLL"] for q in kinds)
        scores["AUROC"] = float(vd.metrics.auroc(clean.entropy, predict(photos).entropy))
        yield name, scores | {"file kB": size / 1000, "train s": seconds}


def estimate(rows: Sequence[Scores], column: str) -> tuple[float, float]:
    """The mean of a score over seeds, and its standard error."""
    values = [row[column] for row in rows]
    return fmean(values), stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def cells(scores: dict[str, list[Scores]]) -> dict[str, list[tuple[str, str]]]:
    """The cells of the table by model: means, the best one with a star, and standard errors."""
    text: dict[str, list[tuple[str, str]]] = {name: [] for name in scores}
    for column, (places, larger) in COLUMNS.items():
        estimates = {name: estimate(rows, column) for name, rows in scores.items()}
        best = (max if larger else min)(mean for mean, _ in estimates.values())
        for name, (mean, error) in estimates.items():
            text[name].append((f"{mean:.{places}f}{'*' * (mean == best)}", f"±{error:.{places}f}"))
    return text


def compare(scores: dict[str, list[Scores]], name: str, other: str) -> str:
    """A sentence about the differences between two models, over the same seeds.

    Args:
        scores: of every seed, by model.
        name: the model.
        other: the model it is compared with.
    """
    pairs = list(zip(scores[name], scores[other], strict=True))

    def gap(column: str, places: int) -> str:
        return f"{fmean(s[column] - o[column] for s, o in pairs):+z.{places}f}"

    lower = sum(s["corr. NLL"] < o["corr. NLL"] for s, o in pairs)
    ratio = fmean(s["file kB"] for _, s in pairs) / fmean(s["file kB"] for s, _ in pairs)
    size = f"{ratio:.1f} times smaller" if ratio >= 1 else f"{1 / ratio:.1f} times larger"
    return (
        f"{name} compared with {other}: the file is {size}. Corrupted digits: NLL "
        f"{gap('corr. NLL', 2)} (lower in {lower} of {len(pairs)}), accuracy "
        f"{gap('corr. acc %', 1)} points. Clean digits: NLL {gap('clean NLL', 3)}, accuracy "
        f"{gap('clean acc %', 1)} points. AUROC {gap('AUROC', 3)}."
    )


def render_page(scores: dict[str, list[Scores]], sentences: list[str]) -> str:
    """The report: the sentences, the table and two pictures."""
    strengths, sizes = (canvas.axes(None, 4.4, 3.8) for _ in range(2))
    columns = ["clean NLL", *(f"NLL at strength {strength}" for strength in STRENGTHS)]
    colours = (canvas.GREY, canvas.BLUE, *canvas.OTHERS)
    for (name, rows), colour in zip(scores.items(), colours, strict=True):
        style: dict[str, Any] = {"label": name, "color": colour, "capsize": 2}
        means, errors = zip(*(estimate(rows, column) for column in columns), strict=True)
        strengths.errorbar((0, *STRENGTHS), means, errors, lw=1.5, **style)
        accuracy, error = estimate(rows, "corr. acc %")
        sizes.errorbar(estimate(rows, "file kB")[0], accuracy, error, marker="o", ls="", **style)
    sizes.set_xscale("log")
    canvas.legend_above(canvas.tidy(strengths, "strength of the corruption", "NLL"))
    canvas.legend_above(canvas.tidy(sizes, "file size in kB", "accuracy on corrupted digits, %"))
    table = [
        [page.Cell(name), *(page.Cell(mean, error) for mean, error in row)]
        for name, row in cells(scores).items()
    ]
    text = "Means and standard errors over test sets; {} is better."
    cards = [[make_card("NLL", "NLL", strengths)], [make_card("File size", "File size", sizes)]]
    return page.render(
        title="digits of unseen writers",
        verdicts={"": [re.split("(?<=:) ", sentence, maxsplit=1) for sentence in sentences]},
        scores=page.Table(["", *COLUMNS], table, _LEGEND.format(len(scores[PLAIN]))),
        pictures=[
            ("Corrupted digits", text.format("lower"), cards[0]),
            ("File size", f"{text.format('up and left')} {_SAME}", cards[1]),
        ],
    )
