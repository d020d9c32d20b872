"""Ranked probability and interval scores against closed forms and references."""

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from scipy.integrate import quad
from scipy.stats import norm
from tests.refusals import assert_refused

from vardrop.app.runs import scores as scoring
from vardrop.metrics import crps_gaussian, interval_coverage, interval_width, intervals
from vardrop.metrics.intervals import Estimate, bootstrap, bootstrap_estimate, repetition_estimate

# Mean, standard deviation and observation of three normal forecasts: good, biased, overconfident.
FORECASTS = [(0.0, 1.0, 0.3), (2.0, 0.5, 0.5), (-1.0, 0.1, 3.0)]


def column(value):
    return torch.tensor([value], dtype=torch.float64)


@pytest.mark.parametrize(("mean", "std", "y"), FORECASTS)
def test_gaussian_crps_matches_quadrature(mean, std, y):
    below = quad(lambda x: norm.cdf(x, mean, std) ** 2, mean - 40 * std, y, points=[mean])[0]
    above = quad(lambda x: norm.sf(x, mean, std) ** 2, y, max(y, mean) + 40 * std)[0]
    result = crps_gaussian(column(mean), column(std), column(y)).item()
    assert result == pytest.approx(below + above, rel=1e-7)


@settings(deadline=None, max_examples=50)
@given(scale=st.floats(0.01, 100), shift=st.floats(-10, 10), seed=st.integers(0, 2**31))
def test_crps_moves_with_the_unit(scale, shift, seed):
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    mean, y, std = draws[0], draws[1], draws[2].exp()
    moved = crps_gaussian(scale * mean + shift, scale * std, scale * y + shift)
    torch.testing.assert_close(moved, scale * crps_gaussian(mean, std, y))


def test_coverage_counts_both_ends_and_infinite_intervals_cover_everything():
    lower, upper = torch.zeros(4), torch.ones(4)
    assert interval_coverage(lower, upper, torch.tensor([0.0, 1.0, -0.1, 0.5])) == 0.75
    bound = torch.full((2,), torch.inf)
    assert interval_coverage(-bound, bound, torch.tensor([-5.0, 1e30])) == 1
    assert interval_width(-bound, bound) == torch.inf


SCORES = [(crps_gaussian, 3), (interval_coverage, 3), (interval_width, 2)]


@pytest.mark.parametrize("score, inputs", SCORES)
def test_half_precision_is_scored_in_single(score, inputs):
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
def test_bad_input_is_refused(call, message):
    assert_refused("Expected " + message, call)


# Intervals of scores: over rows by a bootstrap, over seeds by Student's distribution.


N = 60


def random(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def classes(count, ties=True):
    """Probabilities, with ties or without, and labels that follow them."""
    logits = (2 * random(N, count)).round() / 2 if ties else random(N, count)
    return logits.softmax(1), (logits + random(N, count, seed=1)).argmax(1)


def logs(probs, y):
    return probs.gather(1, y[:, None]).flatten().log()


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_weighted_classes_are_scored_as_rows_that_stand_for_several(count, weighted, ties):
    probs, y = classes(count, ties)
    chosen = torch.arange(N) % 3 if weighted else torch.ones(N, dtype=torch.long)
    rows, names = torch.arange(N).repeat_interleave(chosen), [str(k) for k in range(count)]
    share = torch.full((count,), 1 / count)
    whole = scoring.class_scores(probs[rows], logs(probs, y)[rows], y[rows], names, share).metrics
    for name, score in intervals.class_scores(probs, logs(probs, y), y).items():
        found = score(torch.stack([chosen.double(), 2 * chosen.double()]))
        assert found.tolist() == pytest.approx([whole[name]] * 2, abs=1e-9), name


def test_a_class_without_a_row_is_left_out_of_averages():
    probs, y = classes(3)
    weights, found = (y != 2).double()[None], intervals.class_scores(probs, logs(probs, y), y)
    own = [(probs.argmax(1) == y)[y == k].double().mean().item() for k in (0, 1)]
    assert float(found["balanced_accuracy"](weights)) == pytest.approx(sum(own) / 2)
    assert math.isfinite(float(found["auroc"](weights)))
    assert math.isnan(float(found["auroc"]((y == 0).double()[None])))


@pytest.mark.parametrize("weighted", [False, True])
def test_weighted_numbers_are_scored_as_rows_that_stand_for_several(weighted):
    y, mean = 5 + random(N), 5 + random(N, seed=1)
    lower, upper, log_probs = mean - 1, mean + 2, -random(N, seed=2).square()
    chosen = torch.arange(N) % 3 if weighted else torch.ones(N, dtype=torch.long)
    rows = torch.arange(N).repeat_interleave(chosen)
    own = [t[rows] for t in (mean, torch.ones(N), log_probs, y)]
    whole = scoring.number_scores(*own, (lower[rows], upper[rows])).metrics
    given = mean, torch.ones(N), log_probs, y, (lower, upper), chosen.double()
    assert scoring.number_scores(*given).metrics == pytest.approx(whole)
    found = intervals.number_scores(mean, y, lower, upper, log_probs)
    assert set(found) == set(whole) - {"crps"}
    for name, score in found.items():
        assert float(score(chosen.double()[None])) == pytest.approx(whole[name], rel=1e-6), name
    assert "nll" not in intervals.number_scores(mean, y, lower, upper, None)


def test_the_error_of_a_mean_is_that_of_the_formula():
    rows = random(200)
    drawn = bootstrap({"mean": intervals.average(rows)}, 200)["mean"]
    expected = float(rows.std(correction=0)) / math.sqrt(200)
    assert abs((float(drawn.std()) / expected - 1) * math.sqrt(2 * len(drawn))) < 6
    found = bootstrap_estimate(float(rows.mean()), drawn)
    assert found.low < found.value < found.high
    assert (found.high - found.low) / (2 * 1.96 * expected) == pytest.approx(1, abs=0.2)


def test_two_nets_are_scored_on_the_same_resamples():
    rows = random(50)
    one, other = (bootstrap({"s": intervals.average(r)}, 50)["s"] for r in (rows, rows + 3))
    assert torch.allclose(other - one, torch.tensor(3.0).double())
    assert bootstrap_estimate(3.0, other - one).sign == 1
    assert bootstrap_estimate(-3.0, one - other).sign == -1
    assert bootstrap_estimate(0.0, one - one.mean()).sign == 0


def test_rows_that_count_twice_are_drawn_with_their_weight():
    rows, weight = random(40), torch.ones(40)
    weight[0] = 1e9
    seen = (bootstrap({"s": intervals.average(rows)}, 40, weight)["s"] - rows[0]).abs() < 1e-6
    assert 0.5 < float(seen.double().mean()) < 0.75  # 1 - 1/e of the resamples have that row


def test_many_rows_are_resampled_a_few_at_a_time(monkeypatch):
    rows = {"s": intervals.average(random(30))}
    whole = bootstrap(rows, 30)["s"]
    monkeypatch.setattr(intervals, "_AT_ONCE", 30 * 7)
    assert torch.allclose(bootstrap(rows, 30)["s"], whole, rtol=1e-12)


def test_more_rows_have_fewer_resamples_and_a_normal_interval():
    rows = random(5001)
    drawn = bootstrap({"s": intervals.average(rows)}, 5001)["s"]
    assert len(drawn) == 200
    found = bootstrap_estimate(float(rows.mean()), drawn)
    assert abs((found.error * math.sqrt(5001) / float(rows.std()) - 1) * math.sqrt(2 * 200)) < 6
    assert found.high - found.value == pytest.approx(1.96 * found.error)


def test_scores_that_few_resamples_define_have_no_interval():
    drawn = torch.full((1000,), math.nan)
    drawn[:400] = 1.0
    assert bootstrap_estimate(1.0, drawn) == Estimate(1.0)
    assert bootstrap_estimate(math.inf, torch.ones(1000)) == Estimate(math.inf)
    assert Estimate(1.0).sign == 0


def test_repetitions_have_the_interval_of_student():
    values, mean, spread = [0.5, 0.7, 0.9, 0.6], 0.675, 0.17078251276599332
    found = repetition_estimate(values)
    half = 3.182446305284263 * spread / 2  # the 97.5 % point with 3 degrees of freedom
    assert found == pytest.approx((mean, spread / 2, mean - half, mean + half))
    wider = repetition_estimate(values, ratio=0.25)
    assert wider.error == found.error
    assert (wider.high - wider.value) / half == pytest.approx(math.sqrt(1 + 4 * 0.25))
    assert repetition_estimate(values, bounds=(0.6, 0.7))[2:] == (0.6, 0.7)
    assert repetition_estimate([0.5]) == Estimate(0.5)
