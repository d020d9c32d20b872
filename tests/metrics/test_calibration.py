"""Calibration errors against references, the shape of the bins, and the bootstrap interval."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from tests.refusals import assert_refused
from torch import Tensor
from torchmetrics.functional.classification import multiclass_calibration_error

from vardrop.metrics import Scheme, ece, reliability_curve


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


@pytest.mark.parametrize(("rows", "bins"), [(100, 10), (103, 10), (7, 10), (50, 1)])
def test_equal_mass_matches_split_of_sorted_rows(rows: int, bins: int) -> None:
    probs, y = predictions(rows, 3)
    confidence, predicted = probs.max(dim=1)
    gap = (confidence - (predicted == y).double())[confidence.argsort()].numpy()
    last = [-(-cut * rows // bins) for cut in range(1, bins)]
    reference = sum(abs(part.sum()) for part in np.split(gap, last)) / rows
    assert ece(probs, y, bins, "mass").item() == pytest.approx(reference)


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
    seed=st.integers(0, 2**31), rows=st.integers(1, 60), bins=st.integers(1, 20),
    scheme=st.sampled_from(["width", "mass"]),
)  # fmt: skip
def test_curve_adds_up_to_ece(seed: int, rows: int, bins: int, scheme: Scheme) -> None:
    probs, y = predictions(rows, 3, seed)
    curve = reliability_curve(probs, y, bins, scheme)
    weighted = curve.count * (curve.accuracy - curve.confidence).abs() / rows
    torch.testing.assert_close(weighted.nansum(), ece(probs, y, bins, scheme))
    assert torch.equal(curve.accuracy.isnan(), curve.count == 0)


@pytest.mark.parametrize("score", [ece, reliability_curve])
@pytest.mark.parametrize("options, message", [
    ({"bins": 0}, r"Expected `bins` to be an integer of at least 1, but got 0\."),
    ({"scheme": "quantile"}, r"Expected `scheme` to be one of 'width', 'mass', but got 'quantile'\."),
])  # fmt: skip
def test_bad_bins_are_refused(score: Callable[..., Tensor], options, message: str) -> None:
    assert_refused(message, score, *predictions(5, 3), **options)
