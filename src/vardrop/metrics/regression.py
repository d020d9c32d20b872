"""Scores of predictive distributions, intervals and quantiles of a real number."""

import math

import torch
from torch import Tensor

from vardrop.errors import VardropError
from vardrop.metrics.checks import (
    check_finite,
    check_fraction,
    check_shape,
    check_values,
)


def _check_draws(draws: Tensor, y: Tensor, least: int) -> tuple[Tensor, Tensor]:
    """Return draws and observed values, once known to be finite and to match."""
    draws, y = check_finite("draws", draws), check_finite("y", y)
    if draws.ndim != y.ndim + 1 or draws.shape[1:] != y.shape:
        raise VardropError(
            f"Expected `draws` to have shape (S, *y.shape) with y.shape = {tuple(y.shape)}, "
            f"but got shape {tuple(draws.shape)}. Move the dimension of the draws to the front."
        )
    if draws.shape[0] < least:
        raise VardropError(
            f"Expected `draws` to hold at least {least} draws, but got {draws.shape[0]}. "
            "Take more draws, or pass fair=False to score a single one."
        )
    return draws, y


def crps(draws: Tensor, y: Tensor, *, fair: bool = True) -> Tensor:
    """Continuous ranked probability score of an ensemble of draws, averaged over the cases.

    1/S sum_s |x_s - y| - 1/(2 D) sum_s sum_t |x_s - x_t|, with D = S (S - 1) for the fair estimator
    and D = S^2 for the plain one. The fair one is unbiased for the distribution the draws come from
    and may be negative for one case; the plain one scores the ensemble itself, as if its draws were
    the whole distribution, and depends on S.

    Args:
        draws: draws from the predictive distribution, shape (S, *), with draws first.
        y: observed values, shape (*).
        fair: whether to use the fair estimator, which needs at least two draws.

    Returns:
        scalar in the unit of `y`; lower is better.

    >>> draws, y = torch.tensor([[0.0], [2.0]]), torch.tensor([1.0])
    >>> crps(draws, y), crps(draws, y, fair=False)
    (tensor(0.), tensor(0.5000))

    Gneiting & Raftery 2007, "Strictly proper scoring rules, prediction, and estimation"; Ferro
    2014, "Fair scores for ensemble forecasts".
    """
    draws, y = _check_draws(draws, y, least=2 if fair else 1)
    size = draws.shape[0]
    # Distances between draws do not change around y, and small numbers lose less precision.
    ascending = (draws - y).movedim(0, -1).sort(dim=-1).values
    # Half the double sum is sum_i (2 i - S - 1) x_(i) over sorted draws, so no pairs are formed.
    rank = torch.arange(1, size + 1, device=draws.device)
    half_sum = ((2 * rank - size - 1) * ascending).sum(dim=-1)
    pairs = size * (size - 1) if fair else size**2
    return (ascending.abs().mean(dim=-1) - half_sum / pairs).mean()


def crps_gaussian(mean: Tensor, std: Tensor, y: Tensor) -> Tensor:
    """Continuous ranked probability score of normal distributions, averaged over the cases.

    std (z (2 Phi(z) - 1) + 2 phi(z) - 1 / sqrt(pi)) with z = (y - mean) / std, where phi and Phi
    are the density and distribution function of the standard normal.

    Args:
        mean: predictive means, any shape (*).
        std: predictive standard deviations, shape (*), positive.
        y: observed values, shape (*).

    Returns:
        scalar in the unit of `y`; lower is better.

    >>> crps_gaussian(torch.tensor([0.0]), torch.tensor([1.0]), torch.tensor([0.0]))
    tensor(0.2337)

    Gneiting, Raftery, Westveld & Goldman 2005, "Calibrated probabilistic forecasting using ensemble
    model output statistics and minimum CRPS estimation".
    """
    mean, std, y = check_finite("mean", mean), check_finite("std", std), check_finite("y", y)
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
    return (std * inner).mean()


def _check_bounds(lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bounds of intervals, once known to be of one shape and in order."""
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
            "of minus infinity. Find where the model overflows, or drop those rows."
        )
    return lower, upper


def interval_coverage(lower: Tensor, upper: Tensor, y: Tensor) -> Tensor:
    """Fraction of the observed values that lie in their interval, ends included.

    1/N sum_n [lower_n <= y_n <= upper_n].

    Args:
        lower: lower ends, any shape (*); may be infinite.
        upper: upper ends, shape (*); may be infinite.
        y: observed values, shape (*).

    Returns:
        scalar in [0, 1]; for a calibrated model, the nominal level of the intervals.

    >>> lower, upper = torch.tensor([0.0, 0.0]), torch.tensor([1.0, 1.0])
    >>> interval_coverage(lower, upper, torch.tensor([0.5, 1.5]))
    tensor(0.5000)

    Gneiting, Balabdaoui & Raftery 2007, "Probabilistic forecasts, calibration and sharpness".
    """
    lower, upper = _check_bounds(lower, upper)
    y = check_values("y", y)
    check_shape("y", y, lower.shape, "lower")
    return ((lower <= y) & (y <= upper)).to(y.dtype).mean()


def interval_width(lower: Tensor, upper: Tensor) -> Tensor:
    """Mean width of the intervals, a measure of sharpness.

    1/N sum_n (upper_n - lower_n).

    Args:
        lower: lower ends, any shape (*).
        upper: upper ends, shape (*).

    Returns:
        scalar in the unit of the bounds; at equal coverage, lower is better.

    >>> interval_width(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 3.0]))
    tensor(1.5000)

    Gneiting, Balabdaoui & Raftery 2007, "Probabilistic forecasts, calibration and sharpness".
    """
    lower, upper = _check_bounds(lower, upper)
    return (upper - lower).mean()


def pinball_loss(pred_quantile: Tensor, y: Tensor, quantile: float) -> Tensor:
    """Pinball loss of predicted quantiles, whose minimiser is the true quantile.

    1/N sum_n max(q (y_n - x_n), (q - 1) (y_n - x_n)) for predictions x_n of quantile q.

    Args:
        pred_quantile: predicted quantiles, any shape (*).
        y: observed values, shape (*).
        quantile: probability q of the quantile, strictly between 0 and 1.

    Returns:
        scalar in the unit of `y`, at least 0; half the mean absolute error for q = 0.5.

    >>> pinball_loss(torch.tensor([1.0, 1.0]), torch.tensor([0.0, 2.0]), 0.9)
    tensor(0.5000)

    Koenker & Bassett 1978, "Regression quantiles".
    """
    check_fraction("quantile", quantile)
    pred_quantile, y = check_finite("pred_quantile", pred_quantile), check_finite("y", y)
    check_shape("y", y, pred_quantile.shape, "pred_quantile")
    excess = y - pred_quantile
    return torch.maximum(quantile * excess, (quantile - 1) * excess).mean()
