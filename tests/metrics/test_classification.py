"""Accuracy, log score and Brier score against references, and the checks on class probabilities."""

from collections.abc import Callable

import pytest
import torch
from sklearn.metrics import accuracy_score, brier_score_loss, log_loss
from tests.refusals import assert_refused
from torch import Tensor

from vardrop import metrics
from vardrop.metrics import nll, nll_from_log_probs

FROM_PROBS = [metrics.accuracy, nll, metrics.brier, metrics.ece, metrics.reliability_curve]


def predictions(rows: int, classes: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(rows, classes, generator=generator, dtype=torch.float64)
    return logits.softmax(dim=1), torch.randint(classes, (rows,), generator=generator)


@pytest.mark.parametrize("classes", [2, 3, 10])
def test_scores_match_references(classes: int) -> None:
    (probs, y), labels = predictions(200, classes), list(range(classes))
    reference = accuracy_score(y, probs.argmax(dim=1))
    assert metrics.accuracy(probs, y).item() == pytest.approx(reference)
    assert nll(probs, y).item() == pytest.approx(log_loss(y, probs, labels=labels))
    reference = brier_score_loss(y, probs, labels=labels, scale_by_half=False)
    assert metrics.brier(probs, y).item() == pytest.approx(reference)


def test_log_probs_survive_where_probs_underflow() -> None:
    log_probs = torch.tensor([[0.0, -200.0], [0.0, -1.0]]).log_softmax(dim=1)
    y = torch.tensor([1, 0])
    assert nll(log_probs.exp(), y) == torch.inf
    assert nll_from_log_probs(log_probs, y).item() == pytest.approx((200 + 0.3132617) / 2)


def test_log_probs_and_probs_agree() -> None:
    probs, y = predictions(50, 4)
    torch.testing.assert_close(nll_from_log_probs(probs.log(), y), nll(probs, y))


def test_impossible_class_is_allowed_in_log_probs() -> None:
    assert nll_from_log_probs(torch.tensor([[0.0, -torch.inf]]), torch.tensor([0])) == 0


@pytest.mark.parametrize("score", FROM_PROBS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_precision_of_the_result(score: Callable[..., Tensor], dtype: torch.dtype) -> None:
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
def test_bad_input_is_refused(score: Callable[..., Tensor], probs, y, message: str) -> None:
    assert_refused("Expected " + message, score, probs, y)


@pytest.mark.parametrize("log_probs, y, message", [
    (GOOD.log()[0], LABELS, r"`log_probs` to have shape \(N, K\), but got shape \(2,\)\."),
    (GOOD, LABELS, r"`log_probs` .* sum to one in each row, but got a row with sum 3\.5"),
    (GOOD * torch.nan, LABELS, r"`log_probs` to hold no NaN, but got 4 NaN values\. Find"),
    (GOOD.log(), LABELS + 1, r"`y` to hold labels from 0 to 1, but got labels from 1 to 2\."),
])  # fmt: skip
def test_bad_log_probs_are_refused(log_probs: Tensor, y: Tensor, message: str) -> None:
    assert_refused("Expected " + message, nll_from_log_probs, log_probs, y)
