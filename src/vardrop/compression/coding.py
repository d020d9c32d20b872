"""Entropy coding of integers with constriction's range coder.

Every tensor is coded under its own histogram, which stands in the header; the coder spends
-log2(count / total) bits on a value, so zeros and coarse values are nearly free.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from vardrop.compression.extras import require
from vardrop.errors import VardropError

_GRID = 3  # significant digits of a step, so that it is short in the header
_EXACT = 2**53  # integers up to here survive in a double


def step_for(name: str, deviation: Tensor, weight: Tensor, tolerance: float) -> float:
    """The step of a uniform grid: `tolerance` times the posterior deviation of the kept weights.

    The harmonic mean of the variances makes the mean of (step / deviation)^2 equal tolerance^2.
    """
    if deviation.shape != weight.shape:
        raise VardropError(
            f"Expected the deviations of '{name}' to have the shape {tuple(weight.shape)}, but "
            f"got {tuple(deviation.shape)}."
        )
    kept = weight != 0
    if not bool(kept.any()):
        return 1.0
    chosen = deviation[kept].double()
    if not bool((chosen.isfinite() & (chosen > 0)).all()):
        raise VardropError(
            f"Expected the deviations of '{name}' to be positive and finite, but got "
            f"{float(chosen.min())} to {float(chosen.max())}."
        )
    # Relative to the smallest, so that no square leaves the range of a double.
    smallest = float(chosen.min())
    mean = float((smallest / chosen).square().mean())
    return float(f"{tolerance * smallest / math.sqrt(mean):.{_GRID}g}")


def quantise(name: str, tensor: Tensor, step: float) -> Tensor:
    """The nearest multiples of a step, as integers; an error where they are none or all zero."""
    exact = tensor.detach().double()
    if not bool(exact.isfinite().all()):
        raise VardropError(
            f"Expected '{name}' to hold finite numbers, but got NaN or infinity. "
            "Such a net cannot be packed."
        )
    if not step > 0 or float(exact.abs().max()) / step > _EXACT:
        raise VardropError(
            f"Expected '{name}' to lie within 2^53 steps of {step:g}, but got a number of size "
            f"{float(exact.abs().max()):g}. Raise `tolerance`, or give larger `deviations`."
        )
    integers = (exact / step).round().long()
    if bool(exact.any()) and not bool(integers.any()):
        raise VardropError(
            f"Expected some weights of '{name}' to survive rounding, but got steps of {step:g} "
            f"for numbers up to {float(exact.abs().max()):g}. Lower `tolerance`."
        )
    return integers


def differences(tensor: Tensor) -> Tensor:
    """The first entry and the steps from one entry to the next."""
    flat = tensor.flatten()
    return torch.diff(flat, prepend=flat.new_zeros(1))


def histogram(integers: Tensor) -> list[list[int]]:
    """The distinct values, as differences, and how often each occurs."""
    values, counts = integers.flatten().unique(return_counts=True)
    return [differences(values).tolist(), counts.tolist()]


def check_histogram(name: str, table: list[Any], size: int) -> None:
    """Refuse a table that is no histogram of so many integers, before anything is made of it."""
    values, counts = table
    integers = all(type(n) is int for n in (*values, *counts))
    if not integers or len(values) != len(counts) or min(counts, default=1) < 1:
        raise VardropError(f"Expected a histogram for '{name}', but got something else.")
    if sum(counts) != size:
        raise VardropError(
            f"Expected {size} values for '{name}', but got {sum(counts)}. "
            "Give a net of the class that was packed."
        )


def bits(counts: list[int]) -> float:
    """The information of integers under their own histogram."""
    share = torch.tensor(counts, dtype=torch.float64)
    return abs(float((share * (share / share.sum()).log2()).sum()))


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
        values = torch.tensor(steps, dtype=torch.long).cumsum(0)
        if len(counts) <= 1:
            return values.expand(sum(counts))
        index = self._decoder.decode(_model(counts), sum(counts))
        return values[torch.from_numpy(index).long()]
