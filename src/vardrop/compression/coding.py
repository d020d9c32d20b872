"""Entropy coding of integers with constriction's range coder.

Every tensor is coded under its own histogram, which stands in the header; the coder spends
-log2(count / total) bits on a value, so zeros and coarse values are nearly free.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vardrop.compression.extras import require

_GRID = 3  # significant digits of a step, so that it is short in the header


def step_for(deviation: Tensor, weight: Tensor, tolerance: float) -> float:
    """The step of a uniform grid: `tolerance` times the posterior deviation of the kept weights.

    The harmonic mean of the variances makes the mean of (step / deviation)^2 equal tolerance^2.
    """
    kept = weight != 0
    if not bool(kept.any()):
        return tolerance * float(deviation.double().square().mean().sqrt()) or 1.0
    precision = deviation[kept].double().clamp_min(1e-12).pow(-2).mean()
    return float(f"{tolerance * float(precision.rsqrt()):.{_GRID}g}")


def quantise(tensor: Tensor, step: float) -> Tensor:
    """The nearest multiples of a step, as integers."""
    return (tensor.detach().double() / step).round().long()


def differences(tensor: Tensor) -> Tensor:
    """The first entry and the steps from one entry to the next."""
    flat = tensor.flatten()
    return torch.diff(flat, prepend=flat.new_zeros(1))


def histogram(integers: Tensor) -> list[list[int]]:
    """The distinct values, as differences, and how often each occurs."""
    values, counts = integers.flatten().unique(return_counts=True)
    return [differences(values).tolist(), counts.tolist()]


def bits(counts: list[int]) -> float:
    """The information of integers under their own histogram."""
    share = torch.tensor(counts, dtype=torch.float64)
    return float(-(share * (share / share.sum()).log2()).sum())


def _model(counts: list[int]) -> Any:
    numpy = require("numpy", "numpy")
    constriction = require("constriction", "constriction")
    shares = numpy.array(counts, dtype=numpy.float64) / sum(counts)
    return constriction.stream.model.Categorical(shares, perfect=False)


def encode(parts: list[tuple[Tensor, list[list[int]]]]) -> bytes:
    """Code integer tensors one after the other, each under its histogram."""
    numpy = require("numpy", "numpy")
    encoder = require("constriction", "constriction").stream.queue.RangeEncoder()
    for integers, (steps, counts) in parts:
        if len(counts) > 1:
            values = torch.tensor(steps).cumsum(0)
            index = torch.searchsorted(values, integers.flatten())
            encoder.encode(index.numpy().astype(numpy.int32), _model(counts))
    return bytes(encoder.get_compressed().astype("<u4").tobytes())


class Decoder:
    """Reads back, in order, what `encode` wrote."""

    def __init__(self, payload: bytes) -> None:
        numpy = require("numpy", "numpy")
        words = numpy.frombuffer(payload, dtype="<u4").astype(numpy.uint32)
        self._decoder = require("constriction", "constriction").stream.queue.RangeDecoder(words)

    def read(self, steps: list[int], counts: list[int]) -> Tensor:
        """The next tensor, flat."""
        values = torch.tensor(steps).cumsum(0)
        if len(counts) == 1:
            return values.expand(counts[0])
        index = self._decoder.decode(_model(counts), sum(counts))
        return values[torch.from_numpy(index).long()]
