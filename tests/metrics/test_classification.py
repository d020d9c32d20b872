"""Accuracy, log score and Brier score against references, and the checks on class probabilities."""

from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from sklearn.metrics import accuracy_score, brier_score_loss, log_loss, roc_auc_score
from tests.refusals import assert_refused
from torchmetrics.functional.classification import multiclass_calibration_error

from vardrop import metrics
from vardrop.metrics import aurc, auroc, ece, nll, nll_from_log_probs as log_nll, risk_coverage

FROM_PROBS = [metrics.accuracy, nll, metrics.brier, metrics.ece, metrics.reliability_curve]


def predictions(rows, classes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(rows, classes, generator=generator, dtype=torch.float64)
    probs = logits.softmax(dim=1)
    # Labels drawn from the probabilities give gaps of both signs, so that the bins matter.
    return probs, probs.multinomial(1, generator=generator).squeeze(1)


@pytest.mark.parametrize("classes", [2, 3, 10])
def test_scores_match_references(classes):
    (probs, y), labels = predictions(200, classes), list(range(classes))
    reference = accuracy_score(y, probs.argmax(dim=1))
    assert metrics.accuracy(probs, y).item() == pytest.approx(reference)
    assert nll(probs, y).item() == pytest.approx(log_loss(y, probs, labels=labels))
    reference = brier_score_loss(y, probs, labels=labels, scale_by_half=False)
    assert metrics.brier(probs, y).item() == pytest.approx(reference)


def test_log_probs_agree_with_probs_and_survive_where_these_underflow():
    probs, y = predictions(50, 4)
    torch.testing.assert_close(log_nll(probs.log(), y), nll(probs, y))
    log_probs, y = torch.tensor([[0.0, -200.0], [0.0, -1.0]]).log_softmax(1), torch.tensor([1, 0])
    assert nll(log_probs.exp(), y) == torch.inf
    assert log_nll(log_probs, y).item() == pytest.approx((200 + 0.3132617) / 2)
    assert log_nll(torch.tensor([[0.0, -torch.inf]]), torch.tensor([0])) == 0  # impossible class


@pytest.mark.parametrize("score", FROM_PROBS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_precision_of_the_result(score, dtype):
    probs, y = predictions(20, 50)
    result = score(probs.to(dtype), y.int())
    first = result[0] if isinstance(result, tuple) else result
    assert first.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


GOOD = torch.tensor([[0.5, 0.5], [0.1, 0.9]])
LABELS = torch.tensor([0, 1])
BAD_INPUT = [
    (None, LABELS, r"`probs` to be a tensor, but got None"),
    (GOOD, [0, 1], r"`y` to be a tensor, but got \[0, 1\]"),
    (GOOD * torch.inf, LABELS, r"`probs` .* sum to one"),
    (GOOD[0], LABELS, r"`probs` to have shape \(N, K\), but got shape \(2,\)\. Flatten"),
    (GOOD[:0], LABELS[:0], r"`probs` to hold at least one value, but got shape \(0, 2\)\. Check"),
    (GOOD.int(), LABELS, r"`probs` to hold floating-point numbers, but got dtype torch\.int32\."),
    (GOOD * torch.nan, LABELS, r"`probs` to hold no NaN, but got 4 NaN values\. Find"),
    (GOOD - 0.2, LABELS, r"`probs` to be non-negative, but got -0\.1\. Apply a softmax"),
    (GOOD * 2, LABELS, r"`probs` .* sum to one in each row, but got a row with sum 2\. Apply"),
    (GOOD, LABELS[:1], r"`y` to have shape \(2,\), .* but got shape \(1,\)\. Pass class indices"),
    (GOOD, LABELS + 1, r"`y` to hold labels from 0 to 1, but got labels from 1 to 2\. Drop"),
    (GOOD, LABELS - 1, r"`y` to hold labels from 0 to 1, but got labels from -1 to 0\. Drop"),
    (GOOD, LABELS.float(), r"`y` to hold integer class indices, but got dtype torch\.float32\."),
    (GOOD, LABELS.bool(), r"`y` to hold integer class indices, but got dtype torch\.bool\."),
]


@pytest.mark.parametrize("score", FROM_PROBS)
@pytest.mark.parametrize(("probs", "y", "message"), BAD_INPUT)
def test_bad_input_is_refused(score, probs, y, message):
    assert_refused("Expected " + message, score, probs, y)


@pytest.mark.parametrize("log_probs, y, message", [
    (GOOD.log()[0], LABELS, r"`log_probs` to have shape \(N, K\), but got shape \(2,\)\."),
    (GOOD, LABELS, r"`log_probs` .* sum to one in each row, but got a row with sum 3\.5"),
    (GOOD * torch.nan, LABELS, r"`log_probs` to hold no NaN, but got 4 NaN values\. Find"),
    (GOOD.log(), LABELS + 1, r"`y` to hold labels from 0 to 1, but got labels from 1 to 2\."),
])  # fmt: skip
def test_bad_log_probs_are_refused(log_probs, y, message):
    assert_refused("Expected " + message, log_nll, log_probs, y)


# Calibration errors against references, the shape of the bins, and the bootstrap interval.


def binary(confidence):
    return torch.stack([confidence, 1 - confidence], dim=1)


@pytest.mark.parametrize("bins", [1, 7, 15])
def test_ece_matches_torchmetrics(bins):
    probs, y = predictions(500, 4)
    reference = multiclass_calibration_error(probs, y, num_classes=4, n_bins=bins, norm="l1")
    assert ece(probs, y, bins).item() == pytest.approx(reference.item(), abs=1e-6)


@pytest.mark.parametrize(("rows", "bins"), [(100, 10), (103, 10), (7, 10), (50, 1)])
def test_equal_mass_matches_split_of_sorted_rows(rows, bins):
    probs, y = predictions(rows, 3)
    confidence, predicted = probs.max(dim=1)
    gap = (confidence - (predicted == y).double())[confidence.argsort()].numpy()
    last = [-(-cut * rows // bins) for cut in range(1, bins)]
    reference = sum(abs(part.sum()) for part in np.split(gap, last)) / rows
    assert ece(probs, y, bins, "mass").item() == pytest.approx(reference)


@pytest.mark.parametrize("scheme", ["width", "mass"])
def test_equal_confidence_shares_a_bin(scheme):
    confidence = torch.tensor([0.6] * 5 + [0.9] * 5)
    curve = metrics.reliability_curve(binary(confidence), torch.tensor([0, 1] * 5), 2, scheme)
    assert curve.count.tolist() == ([0, 10] if scheme == "width" else [5, 5])
    count = metrics.reliability_curve(binary(confidence), torch.tensor([0, 1] * 5), 5, scheme).count
    assert sorted(count.tolist()) == [0, 0, 0, 5, 5]


def test_bins_are_closed_on_the_right():
    # Five classes, so that a confidence can fall on the edges 0.2, 0.4, 0.6, 0.8 and 1.
    confidence = torch.tensor([0.2, 0.4, 0.6, 0.8, 1.0])
    rest = ((1 - confidence) / 4).unsqueeze(1).expand(5, 4)
    probs = torch.cat([confidence.unsqueeze(1), rest], dim=1)
    curve = metrics.reliability_curve(probs, torch.zeros(5, dtype=torch.long), bins=15)
    # 0.2 is the right edge of the third bin of fifteen, and so on.
    assert curve.count.tolist() == [0, 0, 1] * 5
    torch.testing.assert_close(curve.confidence[2::3], confidence)


@settings(deadline=None, max_examples=50)
@given(
    seed=st.integers(0, 2**31), rows=st.integers(1, 60), bins=st.integers(1, 20),
    scheme=st.sampled_from(["width", "mass"]),
)  # fmt: skip
def test_curve_adds_up_to_ece(seed, rows, bins, scheme):
    probs, y = predictions(rows, 3, seed)
    curve = metrics.reliability_curve(probs, y, bins, scheme)
    weighted = curve.count * (curve.accuracy - curve.confidence).abs() / rows
    torch.testing.assert_close(weighted.nansum(), ece(probs, y, bins, scheme))
    assert torch.equal(curve.accuracy.isnan(), curve.count == 0)


@pytest.mark.parametrize("score", [ece, metrics.reliability_curve])
@pytest.mark.parametrize("options, message", [
    ({"bins": 0}, r"Expected `bins` to be an integer of at least 1, but got 0\."),
    ({"scheme": "quantile"}, r"Expected `scheme` to be one of 'width', 'mass', but got 'quantile'\."),
])  # fmt: skip
def test_bad_bins_are_refused(score, options, message):
    assert_refused(message, score, *predictions(5, 3), **options)


# Out-of-domain detection and selective prediction against references, with exact ties.


# A small grid of values makes most draws contain ties within and between the groups.
eighths = lambda values: torch.tensor(values, dtype=torch.float64) / 8
grid_scores = st.lists(st.integers(0, 8), min_size=1, max_size=60).map(eighths)


@settings(deadline=None, max_examples=100)
@given(scores_in=grid_scores, scores_out=grid_scores)
def test_detection_scores_match_references(scores_in, scores_out):
    target = [0] * len(scores_in) + [1] * len(scores_out)
    reference = roc_auc_score(target, torch.cat([scores_in, scores_out]))
    assert auroc(scores_in, scores_out).item() == pytest.approx(reference)


@pytest.mark.parametrize("score", [auroc, aurc])
def test_types_and_strides(score):
    first, second = torch.rand(10).half(), torch.rand(20).double()[::2]
    assert score(first, first).dtype == torch.float32
    assert (score(first, second).dtype, score(second, second).shape) == (torch.float64, ())
    assert auroc(torch.tensor([0.0, 1.0]), torch.tensor([torch.inf])) == 1


@settings(deadline=None, max_examples=25)
@given(cases=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), min_size=1, max_size=5))
def test_ties_give_the_mean_over_all_orders(cases):
    curves = []
    for order in permutations(cases):
        errors = [error for _, error in sorted(order, key=lambda case: case[0])]
        totals = torch.tensor(errors, dtype=torch.float64).cumsum(dim=0)
        curves.append(totals / torch.arange(1, len(cases) + 1))
    uncertainty, errors = torch.tensor(cases, dtype=torch.float64).T
    curve = risk_coverage(uncertainty, errors)
    torch.testing.assert_close(curve.risk, torch.stack(curves).mean(dim=0))


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 2**31), cases=st.integers(1, 50))
def test_aurc_bounds(seed, cases):
    generator = torch.Generator().manual_seed(seed)
    uncertainty = torch.rand(cases, generator=generator, dtype=torch.float64)
    errors = torch.rand(cases, generator=generator, dtype=torch.float64)
    area = aurc(uncertainty, errors)
    assert aurc(errors, errors) - 1e-12 <= area <= aurc(-errors, errors) + 1e-12
    torch.testing.assert_close(risk_coverage(uncertainty, errors).risk[-1], errors.mean())
    torch.testing.assert_close(aurc(torch.ones(cases), errors), errors.mean())


@pytest.mark.parametrize("as_type", [torch.bool, torch.int64, torch.float32])
def test_kinds_of_error(as_type):
    errors = torch.tensor([1, 0, 0]).to(as_type)
    assert aurc(torch.tensor([0.3, 0.1, 0.2]), errors).item() == pytest.approx(1 / 9)


ONE = torch.tensor([0.5])
BAD_SCORES = [
    (None, r"to be a tensor, but got None"),
    (ONE.expand(2, 1), r"to have shape \(N,\), but got shape \(2, 1\)\. Flatten it with"),
    (ONE[:0], r"to hold at least one value, but got shape \(0,\)\. Check"),
    (ONE * torch.nan, r"to hold no NaN, but got 1 NaN values\. Find"),
    (ONE.int(), r"to hold floating-point numbers, but got dtype torch\.int32\. Convert it with"),
]


@pytest.mark.parametrize(("bad", "message"), BAD_SCORES)
def test_bad_scores_are_refused(bad, message):
    assert_refused("Expected `scores_in` " + message, auroc, bad, ONE)
    assert_refused("Expected `scores_out` " + message, auroc, ONE, bad)


@pytest.mark.parametrize("score", [risk_coverage, aurc])
@pytest.mark.parametrize(("bad", "message"), BAD_SCORES)
def test_bad_uncertainty_and_errors_are_refused(score, bad, message):
    assert_refused("Expected `uncertainty` " + message, score, bad, bad)
    mismatch = r"`errors` to have shape \(1,\) to match `uncertainty`, but got shape \(2,\)"
    assert_refused("Expected " + mismatch, score, ONE, ONE.expand(2))
    assert_refused("Expected `errors` to hold no NaN, but got 1 NaN", score, ONE, ONE * torch.nan)
