"""Schedules for beta: pure functions of the step (or epoch)."""

from __future__ import annotations

import math
from collections.abc import Callable

from vardrop.checks import check_number
from vardrop.errors import VardropError

Schedule = Callable[[float], float]


def constant(beta: float = 1.0) -> Schedule:
    """The same beta throughout.

    >>> constant(0.5)(10)
    0.5
    """
    check_number("beta", beta, at_least=0)
    return lambda step: beta


def linear_warmup(start: float, end: float, beta: float = 1.0) -> Schedule:
    """0 until `start`, a straight line, `beta` from `end` on.

    Sparse VD's authors use epochs 5 and 20.

    >>> [linear_warmup(5, 20)(e) for e in (0, 5, 10, 20)]
    [0.0, 0.0, 0.3333333333333333, 1.0]

    Soenderby et al. 2016, "Ladder variational autoencoders", sec. 2.3.
    """
    check_number("start", start, at_least=0)
    check_number("end", end)
    if not start < end:
        raise VardropError(f"Expected 0 <= `start` < `end`, but got {start} and {end}.")
    check_number("beta", beta, at_least=0)
    return lambda step: beta * min(max((step - start) / (end - start), 0.0), 1.0)


def cyclical(period: float, rise: float = 0.5, beta: float = 1.0) -> Schedule:
    """Repeats a rise from 0 to `beta` over the first part `rise` of each period.

    >>> [cyclical(10)(s) for s in (0, 2.5, 5, 9, 10)]
    [0.0, 0.5, 1.0, 1.0, 0.0]

    Fu et al. 2019, "Cyclical annealing schedule", eq. 6.
    """
    check_number("period", period, above=0)
    check_number("rise", rise, above=0, at_most=1)
    check_number("beta", beta, at_least=0)
    return lambda step: beta * min(math.fmod(step, period) / (rise * period), 1.0)
