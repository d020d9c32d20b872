"""Ranked probability, interval and quantile scores against closed forms and references."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings, strategies as st
from scipy.integrate import quad
from scipy.stats import norm
from sklearn.metrics import mean_pinball_loss
from torch import Tensor
from torchmetrics.functional.regression import continuous_ranked_probability_score

from vardrop.errors import VardropError
from vardrop.metrics import (
    crps,
    crps_gaussian,
    interval_coverage,
    interval_width,
    pinball_loss,
)

pytestmark = pytest.mark.filterwarnings("error")

# Mean, standard deviation and observation of three normal forecasts: good, biased, overconfident.
FORECASTS = [(0.0, 1.0, 0.3), (2.0, 0.5, 0.5), (-1.0, 0.1, 3.0)]
FAMILY_WISE_ERROR = 1e-6


def column(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float64)


@pytest.mark.parametrize(("mean", "std", "y"), FORECASTS)
def test_gaussian_crps_matches_quadrature(mean: float, std: float, y: float) -> None:
    below = quad(lambda x: norm.cdf(x, mean, std) ** 2, mean - 40 * std, y, points=[mean])[0]
    above = quad(lambda x: norm.sf(x, mean, std) ** 2, y, max(y, mean) + 40 * std)[0]
    result = crps_gaussian(column(mean), column(std), column(y)).item()
    assert result == pytest.approx(below + above, rel=1e-7)


def test_gaussian_crps_is_twice_the_mean_pinball_loss() -> None:
    def loss(q: float) -> float:
        quantile = column(float(norm.ppf(q, 2.0, 0.5)))
        return pinball_loss(quantile, column(0.5), q).item()

    integral = 2 * quad(loss, 0, 1)[0]
    assert crps_gaussian(column(2.0), column(0.5), column(0.5)).item() == pytest.approx(integral)


@pytest.mark.parametrize("fair", [True, False])
def test_ensemble_crps_estimates_the_gaussian_one(fair: bool) -> None:
    # Each row is one ensemble of 5; the rows give the standard error. The plain estimator exceeds
    # the fair one by E|x - x'| / (2 S) = std / (S sqrt(pi)). Six comparisons share the error rate.
    generator = torch.Generator().manual_seed(0)
    rows, size = 4000, 5
    limit = norm.isf(FAMILY_WISE_ERROR / 2 / (2 * len(FORECASTS)))
    for mean, std, y in FORECASTS:
        noise = torch.randn(size, rows, generator=generator, dtype=torch.float64)
        draws = mean + std * noise
        observed = torch.full((rows,), y, dtype=torch.float64)
        chunks = zip(draws.chunk(200, dim=1), observed.chunk(200), strict=True)
        batches = torch.stack([crps(part, target, fair=fair) for part, target in chunks])
        expected = crps_gaussian(column(mean), column(std), column(y)).item()
        expected += 0 if fair else std / (size * math.sqrt(math.pi))
        error = batches.std() / math.sqrt(len(batches))
        assert abs((batches.mean() - expected) / error) < limit


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 2**31), size=st.integers(2, 12), cases=st.integers(1, 6))
def test_ensemble_crps_matches_all_pairs(seed: int, size: int, cases: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randn(size, cases, generator=generator, dtype=torch.float64)
    y = torch.randn(cases, generator=generator, dtype=torch.float64)
    plain = continuous_ranked_probability_score(draws.T, y)
    torch.testing.assert_close(crps(draws, y, fair=False), plain)
    pairs = (draws.unsqueeze(0) - draws.unsqueeze(1)).abs().sum(dim=(0, 1))
    fair = (draws - y).abs().mean(dim=0) - pairs / (2 * size * (size - 1))
    torch.testing.assert_close(crps(draws, y), fair.mean())


def test_one_draw_scores_its_absolute_error() -> None:
    assert crps(torch.tensor([[1.0, 4.0]]), torch.tensor([3.0, 5.0]), fair=False) == 1.5


def test_crps_takes_any_shape() -> None:
    draws, y = torch.randn(6, 2, 3), torch.randn(2, 3)
    torch.testing.assert_close(crps(draws, y), crps(draws.flatten(1), y.flatten()))
    torch.testing.assert_close(crps(draws[:, 0, 0], y[0, 0]), crps(draws[:, :1, 0], y[:1, 0]))


def test_crps_keeps_its_precision_far_from_zero() -> None:
    # On a grid of eighths all numbers are exact in single precision, so the shift is as well.
    draws, y = torch.tensor([[0.125], [0.5], [-0.25]]), torch.tensor([0.375])
    torch.testing.assert_close(crps(draws + 65536, y + 65536), crps(draws, y))


@settings(deadline=None, max_examples=50)
@given(scale=st.floats(0.01, 100), shift=st.floats(-10, 10), seed=st.integers(0, 2**31))
def test_crps_moves_with_the_unit(scale: float, shift: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    mean, y = draws[0], draws[1]
    std = draws[2].exp()
    expected = scale * crps(draws, y)
    torch.testing.assert_close(crps(scale * draws + shift, scale * y + shift), expected)
    moved = crps_gaussian(scale * mean + shift, scale * std, scale * y + shift)
    torch.testing.assert_close(moved, scale * crps_gaussian(mean, std, y))


def test_coverage_counts_both_ends() -> None:
    lower, upper = torch.zeros(4), torch.ones(4)
    assert interval_coverage(lower, upper, torch.tensor([0.0, 1.0, -0.1, 0.5])) == 0.75


def test_infinite_intervals_cover_everything() -> None:
    bound = torch.full((2,), torch.inf)
    assert interval_coverage(-bound, bound, torch.tensor([-5.0, 1e30])) == 1
    assert interval_width(-bound, bound) == torch.inf


def test_normal_intervals_cover_at_their_level() -> None:
    # Two-sided error rate 1e-6 from the binomial standard error.
    y = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    bound = torch.full_like(y, float(norm.isf(0.05)))
    error = math.sqrt(0.9 * 0.1 / len(y))
    z = (interval_coverage(-bound, bound, y).item() - 0.9) / error
    assert abs(z) < norm.isf(FAMILY_WISE_ERROR / 2)
    assert interval_width(-bound, bound).item() == pytest.approx(2 * norm.isf(0.05))


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 2**31), quantile=st.floats(0.01, 0.99))
def test_pinball_loss_matches_sklearn(seed: int, quantile: float) -> None:
    pred, y = torch.randn(2, 20, generator=torch.Generator().manual_seed(seed)).double()
    reference = mean_pinball_loss(y, pred, alpha=quantile)
    assert pinball_loss(pred, y, quantile).item() == pytest.approx(reference)


def test_pinball_loss_is_least_at_the_quantile() -> None:
    y = torch.arange(1.0, 102.0)
    losses = [pinball_loss(torch.full_like(y, guess), y, 0.8) for guess in (71.0, 81.0, 91.0)]
    assert losses[1] < min(losses[0], losses[2])


@pytest.mark.parametrize(
    ("score", "inputs"),
    [(crps, 2), (crps_gaussian, 3), (interval_coverage, 3), (interval_width, 2)],
)
def test_half_precision_is_scored_in_single(score: Callable[..., Tensor], inputs: int) -> None:
    ones = torch.ones(4).half()
    arguments = [ones.expand(3, 4), ones] if score is crps else [ones] * inputs
    result = score(*arguments)
    assert result.dtype == torch.float32
    assert result.shape == ()


ZERO, ONE, TWO = torch.zeros(1), torch.ones(1), torch.ones(2)
NAN, INF, EMPTY = ONE * torch.nan, ONE * torch.inf, ONE[:0]
DRAWS = torch.ones(3, 1)


BAD_DRAWS = [
    (lambda: crps(DRAWS, TWO), r"`draws` .* y\.shape = \(2,\), but got shape \(3, 1\)\. Move"),
    (lambda: crps(ZERO[0], ZERO[0]), r"`draws` .* y\.shape = \(\), but got shape \(\)\. Move"),
    (lambda: crps(DRAWS[:1], ONE), r"`draws` to hold at least 2 draws, but got 1\. Take more"),
    (lambda: crps(DRAWS * INF, ONE), r"`draws` to be finite, but got 3 infinities\. Find"),
    (lambda: crps(DRAWS, NAN), r"`y` to hold no NaN, but got 1 NaN values\. Find"),
    (lambda: crps(DRAWS[:, :0], EMPTY), r"`draws` to hold at least one value, but got shape \(3"),
    (lambda: crps(DRAWS.int(), ONE), r"`draws` to hold floating-point numbers, but got dtype"),
]
BAD_GAUSSIANS = [
    (lambda: crps_gaussian(ONE, TWO, ONE), r"`std` to have shape \(1,\) to match `mean`, but got"),
    (lambda: crps_gaussian(ONE, ONE, TWO), r"`y` to have shape \(1,\) to match `mean`, but got"),
    (lambda: crps_gaussian(ONE, ZERO, ONE), r"`std` to be positive, but got 0\. Add"),
    (lambda: crps_gaussian(NAN, ONE, ONE), r"`mean` to hold no NaN, but got 1 NaN values\. Find"),
    (lambda: crps_gaussian(ONE, INF, ONE), r"`std` to be finite, but got 1 infinities\. Find"),
]
BAD_INTERVALS = [
    (lambda: interval_coverage(ONE, ONE, TWO), r"`y` to have shape \(1,\) to match `lower`, but"),
    (lambda: interval_coverage(ONE, ONE, NAN), r"`y` to hold no NaN, but got 1 NaN values\. Find"),
    (lambda: interval_coverage(ONE, ZERO, ONE), r"`lower` to be at most `upper`, but got 1 .*"),
    (lambda: interval_width(ONE, ZERO), r"`lower` to be at most `upper`, but got 1 .* Swap"),
    (lambda: interval_width(ONE, TWO), r"`upper` to have shape \(1,\) to match `lower`, but got"),
    (lambda: interval_width(EMPTY, EMPTY), r"`lower` to hold at least one value, but got shape"),
]
BAD_QUANTILES = [
    (lambda: pinball_loss(ONE, TWO, 0.5), r"`y` to have shape \(1,\) to match `pred_quantile`"),
    (lambda: pinball_loss(NAN, ONE, 0.5), r"`pred_quantile` to hold no NaN, but got 1 NaN values"),
    (lambda: pinball_loss(ONE, ONE, 90), r"`quantile` to lie strictly between 0 and 1, but got 90"),
]


@pytest.mark.parametrize(
    ("call", "message"), [*BAD_DRAWS, *BAD_GAUSSIANS, *BAD_INTERVALS, *BAD_QUANTILES]
)
def test_bad_input_is_refused(call: Callable[[], Tensor], message: str) -> None:
    with pytest.raises(VardropError, match="Expected " + message):
        call()
