"""Student's quantiles without scipy."""

import pytest
from scipy.stats import t

from experiments.diagnostics import Estimate, student_quantile


@pytest.mark.parametrize("df", [3, 5, 10, 100])
@pytest.mark.parametrize("probability", [0.9, 0.975, 0.99])
def test_student_quantile_is_below_one_percent_off(probability: float, df: int) -> None:
    assert student_quantile(probability, df) == pytest.approx(t.ppf(probability, df), rel=0.01)


def test_interval_is_students() -> None:
    low, high = Estimate(2.0, 0.1, 31).interval(0.95)
    assert (low, high) == pytest.approx(t.interval(0.95, 30, 2.0, 0.1), rel=1e-4)


def test_prints_value_and_interval() -> None:
    assert str(Estimate(2.0, 0.1, 31)) == "2 (95 %: 1.8 to 2.2)"
