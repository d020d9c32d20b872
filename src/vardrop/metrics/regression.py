"""Scores of predictive distributions, intervals and quantiles of a real number."""

import math

import torch
from torch import Tensor

from vardrop._core.checks import check_shape
from vardrop._core.errors import VardropError
from vardrop.metrics.validate import check_values, weighted_mean


def crps_gaussian(mean: Tensor, std: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
    """Continuous ranked probability score of normal distributions, averaged over the examples.

    std (z (2 Phi(z) - 1) + 2 phi(z) - 1 / sqrt(pi)) with z = (y - mean) / std. phi and Phi
    are the density and distribution function of the standard normal.

    Args:
        mean: predictive means, any shape (*).
        std: predictive standard deviations, shape (*), positive.
        y: observed values, shape (*).
        weight: how many examples each example counts for, shape (*). One if None.

    Returns:
        scalar in the unit of `y`. Lower is better.

    >>> crps_gaussian(torch.tensor([0.0]), torch.tensor([1.0]), torch.tensor([0.0]))
    tensor(0.2337)

    Gneiting, Raftery, Westveld & Goldman 2005, "Calibrated probabilistic forecasting using ensemble
    model output statistics and minimum CRPS estimation".
    """
    inputs = {"mean": mean, "std": std, "y": y}
    mean, std, y = (check_values(k, values, finite=True) for k, values in inputs.items())
    check_shape("std", std, mean.shape, "mean")
    check_shape("y", y, mean.shape, "mean")
    if std.min() <= 0:
        raise VardropError(
            f"Expected `std` to be positive, but got {std.min().item():.6g}. "
            "Add a small constant, or pass the standard deviation and not its logarithm."
        )
    z = (y - mean) / std
    density = (-z.square() / 2).exp() / math.sqrt(2 * math.pi)
    # 2 Phi(z) - 1 = erf(z / sqrt(2)), without the cancellation.
    inner = z * torch.erf(z / math.sqrt(2)) + 2 * density - 1 / math.sqrt(math.pi)
    return weighted_mean(std * inner, weight)


def _check_bounds(lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bounds of intervals, which must have one shape and be in order."""
    lower, upper = check_values("lower", lower), check_values("upper", upper)
    check_shape("upper", upper, lower.shape, "lower")
    if (lower > upper).any():
        raise VardropError(
            "Expected `lower` to be at most `upper`, but got "
            f"{int((lower > upper).sum())} intervals with `lower` above `upper`. "
            "Swap the two arguments, or sort the predicted quantiles."
        )
    if (lower == math.inf).any() or (upper == -math.inf).any():
        raise VardropError(
            "Expected intervals with numbers inside, but got a `lower` of infinity or an `upper` "
            "of minus infinity. Find where the model overflows, or drop those examples."
        )
    return lower, upper


def interval_coverage(
    lower: Tensor, upper: Tensor, y: Tensor, weight: Tensor | None = None
) -> Tensor:
    """Fraction of the observed values that are in their interval, ends included.

    1/N sum_n [lower_n <= y_n <= upper_n].

    Args:
        lower: lower ends, any shape (*). May be infinite.
        upper: upper ends, shape (*). May be infinite.
        y: observed values, shape (*).
        weight: how many examples each example counts for, shape (*). One if None.

    Returns:
        scalar in [0, 1]. For a calibrated model, the nominal level of the intervals.

    >>> lower, upper = torch.tensor([0.0, 0.0]), torch.tensor([1.0, 1.0])
    >>> interval_coverage(lower, upper, torch.tensor([0.5, 1.5]))
    tensor(0.5000)

    Gneiting, Balabdaoui & Raftery 2007, "Probabilistic forecasts, calibration and sharpness".
    """
    lower, upper = _check_bounds(lower, upper)
    y = check_values("y", y)
    check_shape("y", y, lower.shape, "lower")
    return weighted_mean(((lower <= y) & (y <= upper)).to(y.dtype), weight)


def interval_width(lower: Tensor, upper: Tensor, weight: Tensor | None = None) -> Tensor:
    """Mean width of the intervals, a measure of sharpness.

    1/N sum_n (upper_n - lower_n).

    Args:
        lower: lower ends, any shape (*).
        upper: upper ends, shape (*).
        weight: how many examples each example counts for, shape (*). One if None.

    Returns:
        scalar in the unit of the bounds. At equal coverage, lower is better.

    >>> interval_width(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 3.0]))
    tensor(1.5000)

    Gneiting, Balabdaoui & Raftery 2007, "Probabilistic forecasts, calibration and sharpness".
    """
    lower, upper = _check_bounds(lower, upper)
    return weighted_mean(upper - lower, weight)
