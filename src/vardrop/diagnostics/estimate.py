"""A measured number with its error."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

from vardrop.checks import check_number


@dataclass(frozen=True)
class Estimate:
    """A mean over independent repetitions, with its standard error."""

    value: float
    standard_error: float
    repetitions: int

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """Student's t interval around the value."""
        check_number("level", level, above=0, below=1)
        half = student_quantile(0.5 + level / 2, self.repetitions - 1) * self.standard_error
        return self.value - half, self.value + half

    def __str__(self) -> str:
        low, high = self.interval()
        return f"{self.value:.3g} (95 %: {low:.3g} to {high:.3g})"


def student_quantile(probability: float, df: int) -> float:
    """Quantile of Student's t, below 1 % off from df 3 on (Abramowitz & Stegun 26.7.5).

    >>> round(student_quantile(0.975, 10), 2)
    2.23
    """
    z = NormalDist().inv_cdf(probability)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / df ** (i + 1) for i, term in enumerate(terms))
