"""z-tests from the Monte-Carlo standard error, with one family-wise error rate for all tests."""

import math

import torch

FAMILY_WISE = 1e-6


def z_bound(comparisons):
    """|z| that `comparisons` normal z-scores exceed with probability FAMILY_WISE in all."""
    p = torch.tensor(1 - FAMILY_WISE / (2 * comparisons), dtype=torch.float64)
    return float(math.sqrt(2) * torch.special.erfinv(2 * p - 1))


def assert_mean(samples, expected):
    """The mean over axis 0 of independent samples agrees with `expected`."""
    samples = samples.double()
    error = samples.std(0) / math.sqrt(len(samples))
    z = (samples.mean(0) - expected).abs() / error.clamp(min=1e-12)
    assert z.max() < z_bound(z.numel()), f"z = {z.max():.1f}"


def assert_variance(samples, expected, mean=None):
    """The variance over axis 0 agrees with `expected`, by the standard error of (x - mean)^2.

    A known mean also serves samples of two values, whose squares about it are constant.
    """
    samples = samples.double()
    if mean is not None:
        return assert_mean((samples - mean).square(), expected)
    squares = (samples - samples.mean(0)).square() * len(samples) / (len(samples) - 1)
    return assert_mean(squares, expected)


def assert_same_mean(found, expected, bound=None):
    """Two sets of independent samples have the same mean over axis 0."""
    found, expected = found.double(), expected.double()
    error = (found.var(0) / len(found) + expected.var(0) / len(expected)).sqrt()
    z = (found.mean(0) - expected.mean(0)).abs() / error.clamp(min=1e-12)
    assert z.max() < (bound or z_bound(z.numel())), f"z = {z.max():.1f}"


def assert_same_moments(found, expected, bound):
    """Two sets of draws (S, N, outputs) agree in their means within `bound` standard errors.

    So do the covariances between all outputs of an example.
    """
    centred = [d.double() - d.double().mean(0) for d in (found, expected)]
    products = [d.unsqueeze(-1) * d.unsqueeze(-2) for d in centred]
    assert_same_mean(found, expected, bound)
    assert_same_mean(*products, bound)
