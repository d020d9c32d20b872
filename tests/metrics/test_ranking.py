"""Out-of-domain detection and selective prediction against references, with exact ties."""

from collections.abc import Callable
from itertools import permutations

import pytest
import torch
from hypothesis import given, settings, strategies as st
from sklearn.metrics import roc_auc_score
from tests.refusals import assert_refused
from torch import Tensor

from vardrop.metrics import aurc, auroc, risk_coverage


def labelled(scores_in: Tensor, scores_out: Tensor) -> tuple[Tensor, Tensor]:
    target = torch.cat([torch.zeros(len(scores_in)), torch.ones(len(scores_out))]).long()
    return torch.cat([scores_in, scores_out]), target


# A small grid of values makes most draws contain ties within and between the groups.
grid_scores = st.lists(st.integers(0, 8), min_size=1, max_size=60).map(
    lambda values: torch.tensor(values, dtype=torch.float64) / 8
)


@settings(deadline=None, max_examples=100)
@given(scores_in=grid_scores, scores_out=grid_scores)
def test_detection_scores_match_references(scores_in: Tensor, scores_out: Tensor) -> None:
    scores, target = labelled(scores_in, scores_out)
    assert auroc(scores_in, scores_out).item() == pytest.approx(roc_auc_score(target, scores))


@pytest.mark.parametrize("score", [auroc, aurc])
def test_types_and_strides(score: Callable[[Tensor, Tensor], Tensor]) -> None:
    first, second = torch.rand(10).half(), torch.rand(20).double()[::2]
    assert score(first, first).dtype == torch.float32
    assert (score(first, second).dtype, score(second, second).shape) == (torch.float64, ())


def test_infinite_scores_rank_last() -> None:
    assert auroc(torch.tensor([0.0, 1.0]), torch.tensor([torch.inf])) == 1


def test_risk_coverage_by_hand() -> None:
    curve = risk_coverage(torch.tensor([0.9, 0.1, 0.5, 0.2]), torch.tensor([1, 0, 1, 0]))
    torch.testing.assert_close(curve.coverage, torch.tensor([0.25, 0.5, 0.75, 1.0]))
    torch.testing.assert_close(curve.risk, torch.tensor([0.0, 0.0, 1 / 3, 0.5]))


@settings(deadline=None, max_examples=25)
@given(cases=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), min_size=1, max_size=5))
def test_ties_give_the_mean_over_all_orders(cases: list[tuple[int, int]]) -> None:
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
def test_aurc_bounds(seed: int, cases: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    uncertainty = torch.rand(cases, generator=generator, dtype=torch.float64)
    errors = torch.rand(cases, generator=generator, dtype=torch.float64)
    area = aurc(uncertainty, errors)
    assert aurc(errors, errors) - 1e-12 <= area <= aurc(-errors, errors) + 1e-12
    torch.testing.assert_close(risk_coverage(uncertainty, errors).risk[-1], errors.mean())
    torch.testing.assert_close(aurc(torch.ones(cases), errors), errors.mean())


@pytest.mark.parametrize("as_type", [torch.bool, torch.int64, torch.float32])
def test_kinds_of_error(as_type: torch.dtype) -> None:
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
def test_bad_scores_are_refused(bad: Tensor, message: str) -> None:
    assert_refused("Expected `scores_in` " + message, auroc, bad, ONE)
    assert_refused("Expected `scores_out` " + message, auroc, ONE, bad)


@pytest.mark.parametrize("score", [risk_coverage, aurc])
@pytest.mark.parametrize(("bad", "message"), BAD_SCORES)
def test_bad_uncertainty_is_refused(score, bad: Tensor, message: str) -> None:
    assert_refused("Expected `uncertainty` " + message, score, bad, bad)


@pytest.mark.parametrize("score", [risk_coverage, aurc])
def test_bad_errors_are_refused(score: Callable[[Tensor, Tensor], Tensor]) -> None:
    message = r"Expected `errors` to have shape \(1,\) to match `uncertainty`, but got shape \(2,\)"
    assert_refused(message, score, ONE, ONE.expand(2))
    assert_refused(r"Expected `errors` to hold no NaN, but got 1 NaN", score, ONE, ONE * torch.nan)
