"""Reduction of draws as they come: moments, mean probability and entropy, a few draws kept."""

from __future__ import annotations

import torch
from torch import Tensor

from vardrop.prediction.outputs import Likelihood, interpret
from vardrop.prediction.result import Prediction

_FEWEST = 16  # draws before a standard error is believed


class Moments:
    """Mean and sum of squared deviations of a stream, merged block by block.

    Chan, Golub & LeVeque 1979, "Updating formulae and a pairwise algorithm for computing sample
    variances", eq. 2.1.
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean: Tensor
        self.square: Tensor

    def add(self, values: Tensor) -> None:
        """Take in values (S, ...)."""
        block = values.shape[0]
        mean = values.sum(0).div_(block)
        square = (values - mean).square_().sum(0)
        if self.count == 0:
            self.count, self.mean, self.square = block, mean, square
            return
        total, shift = self.count + block, mean - self.mean
        self.mean = self.mean + shift * (block / total)
        self.square = self.square + square + shift.square() * (self.count * block / total)
        self.count = total

    @property
    def variance(self) -> Tensor:
        """The unbiased variance; zero for a single value."""
        return self.square / max(self.count - 1, 1)

    @property
    def standard_error(self) -> Tensor:
        """Of the mean."""
        return (self.square / (self.count * max(self.count - 1, 1))).sqrt_()


class Reduction:
    """The draws of one batch, reduced: its memory does not grow with their number."""

    def __init__(self, likelihood: Likelihood, noise_std: float, keep: int) -> None:
        self.likelihood, self.noise_std, self.keep = likelihood, noise_std, keep
        self.location, self.probs = Moments(), Moments()
        self.aleatoric: Tensor | None = None
        self.kept: list[Tensor] = []

    def add(self, outputs: Tensor) -> None:
        """Take in outputs (S, N, ...)."""
        outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        room = self.keep - sum(len(k) for k in self.kept)
        if room > 0:
            self.kept.append(outputs if room >= outputs.shape[0] else outputs[:room].clone())
        parts = interpret(outputs, self.likelihood, self.noise_std)
        self.location.add(parts.location)
        each = parts.aleatoric.sum(0)
        self.aleatoric = each if self.aleatoric is None else self.aleatoric + each
        if parts.probs is not None:
            self.probs.add(parts.probs)

    @property
    def _settling(self) -> Moments:
        return self.probs if self.probs.count else self.location

    def settled(self, tolerance: float | None) -> bool:
        """Whether the standard error of every mean probability (or value) is below a tolerance."""
        if tolerance is None or self.location.count < _FEWEST:
            return False
        return bool(self._settling.standard_error.max() < tolerance)

    def _draws(self, like: Tensor) -> Tensor:
        if len(self.kept) == 1:
            return self.kept[0]
        return torch.cat(self.kept) if self.kept else like.new_zeros(0)

    def result(self) -> Prediction:
        """The prediction from the draws so far."""
        mean = self.location.mean
        assert self.aleatoric is not None
        return Prediction(
            likelihood=self.likelihood,
            noise_std=self.noise_std,
            mean=mean,
            output_variance=self.location.variance,
            expected=self.aleatoric / self.location.count,
            mean_probs=self.probs.mean if self.probs.count else None,
            standard_error=self._settling.standard_error,
            samples=torch.full((len(mean),), self.location.count, device=mean.device),
            draws=self._draws(mean),
        )
