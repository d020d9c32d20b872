"""Pictures: they draw what the data says, on any Axes, and leave matplotlib as it was."""

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from tests.app.report import runs
from tests.refusals import assert_refused
from vardrop import metrics
from vardrop.app import report
from vardrop.app.report.canvas import png
from vardrop.metrics.intervals import Estimate

HISTORY = list(runs.history(4))
G = torch.Generator().manual_seed(0)
PROBS, LABELS = runs._classes(50, G)

LINE = torch.linspace(0, 1, 9)
SCORES = {"$a$": Estimate(0.5, 0.1, 0.3, 0.7), "b": Estimate(0.25)}

DRAWN = {
    "training_curves": lambda ax: report.training_curves(HISTORY, ax),
    "layer_sparsity": lambda ax: report.layer_sparsity({"a": 0.5, "b": 1.0}, ax),
    "reliability_diagram": lambda ax: report.reliability_diagram(PROBS, LABELS, ax=ax),
    "uncertainty_histograms": lambda ax: report.uncertainty_histograms(LINE, {"o": LINE}, ax=ax),
    "risk_coverage_curve": lambda ax: report.risk_coverage_curve(LINE, LINE > 0.5, ax=ax),
    "regression_band": lambda ax: report.regression_band(LINE, LINE, LINE, LINE - 1, LINE + 1, ax),
    "score_intervals": lambda ax: report.score_intervals({"nll": SCORES, "rmse": SCORES}, ax),
}


def test_every_public_picture_is_in_the_table():
    homes = {name: getattr(value, "__module__", "") for name, value in vars(report).items()}
    own = f"{report.__name__}.pictures"
    assert set(DRAWN) == {name for name, home in homes.items() if home.startswith(own)}


@pytest.mark.parametrize("name", DRAWN)
def test_draws_on_the_given_axes_and_on_its_own_and_leaves_matplotlib_as_it_was(name):
    given, settings = Figure().add_subplot(), dict(matplotlib.rcParams)
    assert DRAWN[name](given) is given
    assert png(DRAWN[name](None), dpi=40).startswith(b"\x89PNG")
    assert dict(matplotlib.rcParams) == settings
    assert __import__("matplotlib.pyplot").pyplot.get_fignums() == []


def test_training_curves_show_the_numbers_of_the_history():
    strips = report.training_curves(HISTORY).child_axes
    for strip, key in zip(strips, ("nll", "kl", "beta"), strict=True):
        assert strip.lines[0].get_ydata().tolist() == [row[key] for row in HISTORY]
    assert strips[0].lines[1].get_ydata().tolist() == [row["validation"]["nll"] for row in HISTORY]
    assert strips[0].get_title(loc="right") == "dashed: validation"  # above the curves
    assert len(strips[0].texts) == 0


def test_score_intervals_draw_dots_with_their_intervals():
    (panel,) = report.score_intervals({"rmse": SCORES}).child_axes
    interval, dot, other, reference = panel.lines
    assert list(interval.get_xdata()) == [0.3, 0.7]
    assert (list(dot.get_xdata()), list(dot.get_ydata())) == ([0.5], [0])
    assert (list(other.get_xdata()), list(other.get_ydata())) == ([0.25], [1])
    assert set(reference.get_xdata()) == {0.5}
    assert [label.get_text() for label in panel.get_yticklabels()] == ["$a$", "b"]
    assert_refused("`scores` to hold at least one score", report.score_intervals, {})


def test_layer_sparsity_draws_bars_of_the_given_length():
    bars = report.layer_sparsity({"a": 0.25, "b": 0.75}).patches
    assert [bar.get_width() for bar in bars] == [0.25, 0.75]


def test_reliability_dots_are_the_reliability_curve():
    ax = report.reliability_diagram(PROBS, LABELS, bins=5)
    curve = metrics.reliability_curve(PROBS, LABELS, 5)
    filled = curve.count > 0
    expected = torch.stack([curve.confidence[filled], curve.accuracy[filled]], 1)
    dots = torch.as_tensor(np.asarray(ax.collections[-1].get_offsets()))
    torch.testing.assert_close(dots, expected, check_dtype=False)


@pytest.mark.parametrize("inside, outside", [(LINE, LINE + 1), (torch.zeros(5), torch.zeros(3))])
def test_histograms_hold_all_cases_equal_ones_too(inside, outside):
    ax = report.uncertainty_histograms(inside, {"other": outside})
    assert png(ax, dpi=40).startswith(b"\x89PNG")
    assert sum(bar.get_height() for bar in ax.patches[:30]) == pytest.approx(1)


def test_regression_bands_say_their_level_and_are_in_order_of_the_prediction():
    mean = torch.tensor([3.0, 1.0, 2.0])  # of several features
    ax = report.regression_band(torch.rand(3, 2), mean, mean, mean - 1, mean + 1)
    assert ax.lines[0].get_ydata().tolist() == [1, 2, 3]
    assert ax.get_title(loc="left") == "100.0% of the examples in the interval"
    ax = report.regression_band(LINE, LINE, LINE, LINE - 1, LINE + 1, level=0.9, target="price")
    assert ax.get_title(loc="left") == "100.0% of the examples in the 90% interval"
    assert ax.get_ylabel() == "price"
    assert ax.get_legend().get_texts()[0].get_text() == "90% interval"


@pytest.mark.parametrize("name", ["regression_band", "uncertainty_histograms"])
def test_legends_hide_nothing(name):
    ax = DRAWN[name](None)
    ax.figure.canvas.draw()
    legend, drawn = ax.get_legend().get_window_extent(), ax.get_window_extent()
    assert legend.y0 >= drawn.y1 - 1
    if ax.get_title(loc="left"):
        assert ax._left_title.get_window_extent().y0 >= legend.y1 - 2


def test_ticks_of_percentages_are_what_they_say():
    ax = report.uncertainty_histograms(torch.linspace(0, 1, 40), {"o": torch.linspace(0, 1, 37)})
    ax.figure.canvas.draw()
    for value, text in zip(ax.get_yticks(), ax.get_yticklabels(), strict=True):
        shown = float(text.get_text().rstrip("%").replace("\N{MINUS SIGN}", "-"))
        assert shown == pytest.approx(100 * value)


def test_dollar_signs_in_names_are_no_formula():
    bars = report.layer_sparsity({"a$_{$b": 0.5})
    assert bars.get_yticklabels()[0].get_text() == "a$_{$b"
    histograms = report.uncertainty_histograms(LINE, {"a$_{$b": LINE}, "$^$")
    assert histograms.get_xlabel() == "$^$"
    for ax in (bars, histograms):
        assert png(ax, dpi=40).startswith(b"\x89PNG")


WRONG = {
    "no epochs": (lambda: report.training_curves([]), "`history` to hold nll, kl, beta"),
    "no sparsity": (lambda: report.layer_sparsity({}), "`sparsity` to hold at least one number"),
    "lengths": (lambda: report.regression_band(LINE, *[LINE[:3]] * 4), "of one length"),
    "matrix": (lambda: report.uncertainty_histograms(torch.rand(3, 2)), "`inside` to hold one number per example"),
    "logits": (lambda: report.reliability_diagram(PROBS * 9, LABELS), "sum to one"),
}  # fmt: skip


@pytest.mark.parametrize("call, message", WRONG.values(), ids=WRONG)
def test_wrong_data_is_named(call, message):
    assert_refused(message, call)
