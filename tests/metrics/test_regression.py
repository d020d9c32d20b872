"""Ranked probability and interval scores against closed forms and references."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings, strategies as st
from scipy.integrate import quad
from scipy.stats import norm
from tests.refusals import assert_refused
from torch import Tensor

from vardrop.metrics import crps_gaussian, interval_coverage, interval_width

# Mean, standard deviation and observation of three normal forecasts: good, biased, overconfident.
FORECASTS = [(0.0, 1.0, 0.3), (2.0, 0.5, 0.5), (-1.0, 0.1, 3.0)]


def column(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float64)


@pytest.mark.parametrize(("mean", "std", "y"), FORECASTS)
def test_gaussian_crps_matches_quadrature(mean: float, std: float, y: float) -> None:
    below = quad(lambda x: norm.cdf(x, mean, std) ** 2, mean - 40 * std, y, points=[mean])[0]
    above = quad(lambda x: norm.sf(x, mean, std) ** 2, y, max(y, mean) + 40 * std)[0]
    result = crps_gaussian(column(mean), column(std), column(y)).item()
    assert result == pytest.approx(below + above, rel=1e-7)


@settings(deadline=None, max_examples=50)
@given(scale=st.floats(0.01, 100), shift=st.floats(-10, 10), seed=st.integers(0, 2**31))
def test_crps_moves_with_the_unit(scale: float, shift: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    mean, y, std = draws[0], draws[1], draws[2].exp()
    moved = crps_gaussian(scale * mean + shift, scale * std, scale * y + shift)
    torch.testing.assert_close(moved, scale * crps_gaussian(mean, std, y))


def test_coverage_counts_both_ends() -> None:
    lower, upper = torch.zeros(4), torch.ones(4)
    assert interval_coverage(lower, upper, torch.tensor([0.0, 1.0, -0.1, 0.5])) == 0.75


def test_infinite_intervals_cover_everything() -> None:
    bound = torch.full((2,), torch.inf)
    assert interval_coverage(-bound, bound, torch.tensor([-5.0, 1e30])) == 1
    assert interval_width(-bound, bound) == torch.inf


@pytest.mark.parametrize(
    ("score", "inputs"), [(crps_gaussian, 3), (interval_coverage, 3), (interval_width, 2)]
)
def test_half_precision_is_scored_in_single(score: Callable[..., Tensor], inputs: int) -> None:
    result = score(*[torch.ones(4).half()] * inputs)
    assert (result.dtype, result.shape) == (torch.float32, ())


ZERO, ONE, TWO = torch.zeros(1), torch.ones(1), torch.ones(2)
NAN, INF, EMPTY = ONE * torch.nan, ONE * torch.inf, ONE[:0]


BAD_GAUSSIANS = [
    (lambda: crps_gaussian(None, ONE, ONE), r"`mean` to be a tensor, but got None"),
    (lambda: crps_gaussian(ONE, ONE, ONE.long()), r"`y` to hold floating-point numbers"),
    (lambda: crps_gaussian(ONE, TWO, ONE), r"`std` to have shape \(1,\) to match `mean`, but got"),
    (lambda: crps_gaussian(ONE, ONE, TWO), r"`y` to have shape \(1,\) to match `mean`, but got"),
    (lambda: crps_gaussian(ONE, ZERO, ONE), r"`std` to be positive, but got 0\. Add"),
    (lambda: crps_gaussian(NAN, ONE, ONE), r"`mean` to be finite, but got 1 NaN or inf"),
    (lambda: crps_gaussian(ONE, INF, ONE), r"`std` to be finite, but got 1 NaN or inf"),
]
BAD_INTERVALS = [
    (lambda: interval_coverage(ONE, ONE, TWO), r"`y` to have shape \(1,\) to match `lower`, but"),
    (lambda: interval_coverage(ONE, ONE, NAN), r"`y` to hold no NaN, but got 1 NaN values\. Find"),
    (lambda: interval_coverage(ONE, ZERO, ONE), r"`lower` to be at most `upper`, but got 1 .*"),
    (lambda: interval_width(ONE, ZERO), r"`lower` to be at most `upper`, but got 1 .* Swap"),
    (lambda: interval_width(ONE, TWO), r"`upper` to have shape \(1,\) to match `lower`, but got"),
    (lambda: interval_width(EMPTY, EMPTY), r"`lower` to hold at least one value, but got shape"),
]


@pytest.mark.parametrize(("call", "message"), [*BAD_GAUSSIANS, *BAD_INTERVALS])
def test_bad_input_is_refused(call: Callable[[], Tensor], message: str) -> None:
    assert_refused("Expected " + message, call)
