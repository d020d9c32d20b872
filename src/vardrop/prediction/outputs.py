"""What a net's output means: class logits, binary logits, values, or values and log variances."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from vardrop.errors import VardropError

Likelihood = Literal["categorical", "bernoulli", "gaussian", "heteroscedastic"]
LIKELIHOODS = ("categorical", "bernoulli", "gaussian", "heteroscedastic")
CLASS_AXIS = 2  # of draws (S, N, C, ...)
_LOG_2PI = math.log(2 * math.pi)


class Parts(NamedTuple):
    """Outputs (S, N, ...) by meaning.

    `location` is what is averaged into the mean, `probs` the class probabilities, and `aleatoric`
    the entropy (classification) or the variance (regression) of the target given the draw.
    """

    location: Tensor
    probs: Tensor | None
    aleatoric: Tensor


def check_likelihood(likelihood: str, noise_std: float) -> None:
    """Raise unless the likelihood is known and its noise usable."""
    if likelihood not in LIKELIHOODS:
        raise VardropError(
            f"Expected `likelihood` to be one of {', '.join(LIKELIHOODS)}, but got {likelihood!r}."
        )
    if not (noise_std >= 0 and math.isfinite(noise_std)):
        raise VardropError(f"Expected `noise_std` to be at least 0, but got {noise_std}.")


def interpret(draws: Tensor, likelihood: Likelihood, noise_std: float) -> Parts:
    """Split outputs (S, N, ...) into their parts."""
    if likelihood == "categorical":
        return _categorical(draws)
    if likelihood == "bernoulli":
        probs = draws.sigmoid()
        return Parts(draws, probs, binary_entropy(probs))
    if likelihood == "gaussian":
        return Parts(draws, None, torch.full_like(draws, noise_std**2))
    if draws.shape[-1] % 2:
        raise VardropError(
            "Expected the last axis of the output to hold a mean and a log variance a target, "
            f"but got shape {tuple(draws.shape[1:])}."
        )
    mean, log_variance = draws.chunk(2, dim=-1)
    return Parts(mean, None, log_variance.exp())


def _categorical(draws: Tensor) -> Parts:
    if draws.dim() <= CLASS_AXIS:
        raise VardropError(
            f"Expected the output to have shape (N, classes, ...), but got "
            f'{tuple(draws.shape[1:])}. Use likelihood="gaussian" or "bernoulli" for one value.'
        )
    # torch's softmax is slow along a short axis.
    logits = draws - draws.amax(CLASS_AXIS, keepdim=True)
    # A class may be excluded, with a log-probability of minus infinity: 0 log 0 is 0.
    logits.clamp_(min=torch.finfo(logits.dtype).min)
    probs = logits.exp()
    total = probs.sum(CLASS_AXIS, keepdim=True)
    probs /= total
    entropies = total.squeeze(CLASS_AXIS).log() - (probs * logits).sum(CLASS_AXIS)
    return Parts(draws, probs, entropies)


def entropy(probs: Tensor, axis: int) -> Tensor:
    """-sum p log p along an axis, with 0 log 0 = 0."""
    return -torch.special.xlogy(probs, probs).sum(axis)


def binary_entropy(probs: Tensor) -> Tensor:
    """-p log p - (1 - p) log(1 - p), elementwise."""
    return -torch.special.xlogy(probs, probs) - torch.special.xlogy(1 - probs, 1 - probs)


def gaussian_log_prob(y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """log N(y; mean, variance), elementwise."""
    return -0.5 * ((y - mean).square() / variance + variance.log() + _LOG_2PI)
