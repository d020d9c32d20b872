"""Quadrature under normal distributions: expectations, and the maximum of independent normals."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

_NODES = 20
_POOL_NODES, _WIDE = 8, 4.0


@cache
def hermite() -> tuple[tuple[float, float], ...]:
    """Nodes and weights of Gauss-Hermite quadrature for the standard normal (Golub & Welsch)."""
    off = torch.arange(1, _NODES, dtype=torch.float64).sqrt()
    values, vectors = torch.linalg.eigh(torch.diag(off, 1) + torch.diag(off, -1))
    return tuple(zip(values.tolist(), vectors[0].square().tolist(), strict=True))


def largest(means: list[Tensor], variances: list[Tensor], rectified: bool) -> tuple[Tensor, Tensor]:
    """E M and Var M of the maximum M of independent normals, on its distribution function G.

    For M >= a: E (M - a) = int_a^b (1 - G), E (M - a)^2 = 2 int_a^b (t - a) (1 - G) dt, where
    G(t) is the product of the normal distribution functions.
    """
    tiny = torch.finfo(means[0].dtype).tiny
    stds = [v.clamp(min=tiny).sqrt_() for v in variances]
    low = torch.stack([m - _WIDE * s for m, s in zip(means, stds, strict=True)]).amax(0)
    high = torch.stack([m + _WIDE * s for m, s in zip(means, stds, strict=True)]).amax(0)
    if rectified:
        low, high = low.clamp_(min=0), high.clamp_(min=0)
    width = high.sub_(low)
    slopes = [s.mul_(math.sqrt(2)).reciprocal_() for s in stds]
    starts = [(low - m).mul_(k) for m, k in zip(means, slopes, strict=True)]
    slopes = [k.mul_(width) for k in slopes]
    first, second = torch.zeros_like(low), torch.zeros_like(low)
    for node, weight in _legendre():
        below = torch.full_like(low, -(0.5 ** len(means)))  # minus G, from 1 + erf
        for start, slope in zip(starts, slopes, strict=True):
            below.mul_(torch.add(start, slope, alpha=node).erf_().add_(1))
        first.add_(below.add_(1), alpha=weight)
        second.add_(below, alpha=2 * weight * node)
    excess = first.mul_(width)
    variance = second.mul_(width).mul_(width).addcmul_(excess, excess, value=-1).clamp_(min=0)
    return low.add_(excess), variance


@cache
def _legendre() -> tuple[tuple[float, float], ...]:
    """Nodes and weights of Gauss-Legendre quadrature on [0, 1] (Golub & Welsch)."""
    k = torch.arange(1, _POOL_NODES, dtype=torch.float64)
    off = k / (4 * k.square() - 1).sqrt()
    values, vectors = torch.linalg.eigh(torch.diag(off, 1) + torch.diag(off, -1))
    nodes, weights = (values + 1) / 2, vectors[0].square()
    return tuple(zip(nodes.tolist(), weights.tolist(), strict=True))
