"""Calibration errors against references, the shape of the bins, and the bootstrap interval."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from scipy.stats import binom
from torch import Tensor
from torchmetrics.functional.classification import (
    binary_calibration_error,
    multiclass_calibration_error,
)

from vardrop.errors import VardropError
from vardrop.metrics import Scheme, classwise_ece, ece, ece_interval, reliability_curve

pytestmark = pytest.mark.filterwarnings("error")


def predictions(rows: int, classes: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(rows, classes, generator=generator, dtype=torch.float64)
    probs = logits.softmax(dim=1)
    # Labels drawn from the probabilities give gaps of both signs, so that the bins matter.
    return probs, probs.multinomial(1, generator=generator).squeeze(1)


def binary(confidence: Tensor) -> Tensor:
    return torch.stack([confidence, 1 - confidence], dim=1)


@pytest.mark.parametrize("bins", [1, 7, 15])
def test_ece_matches_torchmetrics(bins: int) -> None:
    probs, y = predictions(500, 4)
    reference = multiclass_calibration_error(probs, y, num_classes=4, n_bins=bins, norm="l1")
    assert ece(probs, y, bins).item() == pytest.approx(reference.item(), abs=1e-6)


def test_classwise_ece_matches_torchmetrics() -> None:
    probs, y = predictions(500, 4)
    columns = enumerate(probs.T.contiguous())
    each = [binary_calibration_error(p, (y == k).int(), n_bins=10) for k, p in columns]
    reference = torch.stack(each).mean().item()
    assert classwise_ece(probs, y, bins=10).item() == pytest.approx(reference, abs=1e-6)


@pytest.mark.parametrize(("rows", "bins"), [(100, 10), (103, 10), (7, 10), (50, 1)])
def test_equal_mass_matches_split_of_sorted_rows(rows: int, bins: int) -> None:
    probs, y = predictions(rows, 3)
    confidence, predicted = probs.max(dim=1)
    gap = (confidence - (predicted == y).double())[confidence.argsort()].numpy()
    last = [-(-cut * rows // bins) for cut in range(1, bins)]
    reference = sum(abs(part.sum()) for part in np.split(gap, last)) / rows
    assert ece(probs, y, bins, "mass").item() == pytest.approx(reference)


def test_equal_mass_bins_differ_by_at_most_one_row() -> None:
    count = reliability_curve(*predictions(103, 3), 10, "mass").count
    assert count.sum() == 103
    assert count.max() - count.min() == 1


@pytest.mark.parametrize("scheme", ["width", "mass"])
def test_equal_confidence_shares_a_bin(scheme: Scheme) -> None:
    confidence = torch.tensor([0.6] * 5 + [0.9] * 5)
    curve = reliability_curve(binary(confidence), torch.tensor([0, 1] * 5), 2, scheme)
    expected = [0, 10] if scheme == "width" else [5, 5]
    assert curve.count.tolist() == expected
    count = reliability_curve(binary(confidence), torch.tensor([0, 1] * 5), 5, scheme).count
    assert sorted(count.tolist()) == [0, 0, 0, 5, 5]


def test_bins_are_closed_on_the_right() -> None:
    # Five classes, so that a confidence can fall on the edges 0.2, 0.4, 0.6, 0.8 and 1.
    confidence = torch.tensor([0.2, 0.4, 0.6, 0.8, 1.0])
    rest = ((1 - confidence) / 4).unsqueeze(1).expand(5, 4)
    probs = torch.cat([confidence.unsqueeze(1), rest], dim=1)
    curve = reliability_curve(probs, torch.zeros(5, dtype=torch.long), bins=15)
    # 0.2 is the right edge of the third bin of fifteen, and so on.
    assert curve.count.tolist() == [0, 0, 1] * 5
    torch.testing.assert_close(curve.confidence[2::3], confidence)


@settings(deadline=None, max_examples=50)
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 60),
    bins=st.integers(1, 20),
    scheme=st.sampled_from(["width", "mass"]),
)
def test_curve_adds_up_to_ece(seed: int, rows: int, bins: int, scheme: Scheme) -> None:
    probs, y = predictions(rows, 3, seed)
    curve = reliability_curve(probs, y, bins, scheme)
    weighted = curve.count * (curve.accuracy - curve.confidence).abs() / rows
    torch.testing.assert_close(weighted.nansum(), ece(probs, y, bins, scheme))
    assert torch.equal(curve.accuracy.isnan(), curve.count == 0)


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 2**31), scheme=st.sampled_from(["width", "mass"]))
def test_one_bin_bounds_ece_from_below(seed: int, scheme: Scheme) -> None:
    # By the triangle inequality, splitting a bin cannot lower the error.
    probs, y = predictions(40, 3, seed)
    assert ece(probs, y, 10, scheme) >= ece(probs, y, 1, scheme) - 1e-12


def test_perfect_and_worst_predictions() -> None:
    probs = torch.eye(3)
    assert ece(probs, torch.tensor([0, 1, 2])) == 0
    assert ece(probs, torch.tensor([1, 2, 0])) == 1
    assert classwise_ece(probs, torch.tensor([0, 1, 2])) == 0


def test_interval_covers_at_about_its_level() -> None:
    # Confidence exceeds accuracy by 0.2 everywhere, so the true error is 0.2 for any bins. The test
    # fails with probability below 1e-6 while the true coverage of the 90 % interval is 85 to 92 %.
    generator = torch.Generator().manual_seed(1)
    trials, rows, hits = 200, 400, 0
    for seed in range(trials):
        confidence = 0.7 + 0.3 * torch.rand(rows, generator=generator)
        wrong = torch.rand(rows, generator=generator) > confidence - 0.2
        lower, upper = ece_interval(
            binary(confidence), wrong.long(), bins=5, resamples=200, level=0.9, seed=seed
        )
        hits += bool(lower <= 0.2 <= upper)
    assert binom.ppf(5e-7, trials, 0.85) <= hits <= binom.isf(5e-7, trials, 0.92)


def test_interval_reaches_down_to_zero_for_a_calibrated_model() -> None:
    # The plain quantiles of the resampled error would all lie above zero here.
    confidence = torch.full((400,), 0.75)
    y = (torch.arange(400) % 4 == 0).long()
    lower, upper = ece_interval(binary(confidence), y, resamples=100)
    assert lower == 0
    assert 0 <= upper < 0.05


def test_interval_narrows_with_rows_and_level() -> None:
    def width(rows: int, level: float) -> float:
        confidence = torch.full((rows,), 0.9)
        y = (torch.arange(rows) % 2 == 0).long()
        lower, upper = ece_interval(binary(confidence), y, resamples=200, level=level)
        return (upper - lower).item()

    assert width(1600, 0.9) < width(100, 0.9)
    assert width(100, 0.5) < width(100, 0.9)


@pytest.mark.parametrize("scheme", ["width", "mass"])
def test_interval_depends_on_the_seed_only(scheme: Scheme) -> None:
    probs, y = predictions(100, 3)
    state = torch.random.get_rng_state()
    first = ece_interval(probs, y, 10, scheme, resamples=20, seed=3)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(7)
    assert ece_interval(probs, y, 10, scheme, resamples=20, seed=3) == first
    assert ece_interval(probs, y, 10, scheme, resamples=20, seed=4) != first


@pytest.mark.parametrize("score", [ece, ece_interval, classwise_ece, reliability_curve])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bins": 0}, r"Expected `bins` to be an integer of at least 1, but got 0\."),
        (
            {"scheme": "quantile"},
            r"Expected `scheme` to be one of \('width', 'mass'\), but got 'quantile'\. Pass",
        ),
    ],
)
def test_bad_bins_are_refused(
    score: Callable[..., Tensor], options: dict[str, object], message: str
) -> None:
    with pytest.raises(VardropError, match=message):
        score(*predictions(5, 3), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"resamples": 0}, r"Expected `resamples` to be an integer of at least 1, but got 0\."),
        ({"level": 95}, r"Expected `level` to lie strictly between 0 and 1, but got 95\. Write"),
        ({"level": 0.0}, r"Expected `level` to lie strictly between 0 and 1, but got 0\.0\. "),
    ],
)
def test_bad_resampling_is_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(VardropError, match=message):
        ece_interval(*predictions(5, 3), **options)
