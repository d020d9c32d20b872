"""A prediction: what the draws say together, and how much they disagree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from vardrop.errors import VardropError
from vardrop.prediction.outputs import (
    CLASS_AXIS,
    Likelihood,
    binary_entropy,
    entropy,
    gaussian_log_prob,
    interpret,
)

_BISECTIONS = 60


class Interval(NamedTuple):
    """Lower and upper bounds, in the shape of the prediction."""

    lower: Tensor
    upper: Tensor


@dataclass(frozen=True, eq=False, repr=False)
class Prediction:
    """The predictive distribution of N rows, reduced over draws.

    Classification (`categorical`, `bernoulli`): `probs` is the mean probability, `entropy` its
    entropy, and

        entropy = aleatoric + epistemic,   epistemic = I(y; w) = H[E p] - E H[p] >= 0.

    Regression (`gaussian`, `heteroscedastic`): `aleatoric` and `epistemic` are variances, and

        std^2 = aleatoric + epistemic,   aleatoric = E Var[y | w],   epistemic = Var E[y | w].

    `mean` is the mean output (logits for classification), `samples` the draws a row, `draws` the
    outputs that were kept (K, N, ...), `standard_error` the one of the mean probability (or value),
    `share` the part of the weights that was sampled, for mode="selective".

    >>> import torch, vardrop as vd
    >>> from vardrop.prediction import predict
    >>> net = vd.convert(torch.nn.Linear(4, 3), vd.bayes_by_backprop())
    >>> p = predict(net, torch.randn(5, 4), samples=8)
    >>> p.probs.shape, p.epistemic.shape, p.interval(0.95).lower.shape
    (torch.Size([5, 3]), torch.Size([5]), torch.Size([5, 3]))

    Depeweg et al. 2018, "Decomposition of uncertainty in Bayesian deep learning", eq. 2 and 6.
    """

    likelihood: Likelihood
    noise_std: float
    mean: Tensor
    output_variance: Tensor
    expected: Tensor
    mean_probs: Tensor | None
    standard_error: Tensor
    samples: Tensor
    draws: Tensor
    share: float | None = None

    def __len__(self) -> int:
        return len(self.mean)

    def __repr__(self) -> str:
        least, most = int(self.samples.min()), int(self.samples.max())
        count = f"{most}" if least == most else f"{least} to {most}"
        return f"Prediction({len(self)} rows, {self.likelihood}, {count} draws)"

    @property
    def classifies(self) -> bool:
        """Whether there are class probabilities."""
        return self.mean_probs is not None

    @property
    def probs(self) -> Tensor:
        """The mean probability: of every class, or of a one."""
        if self.mean_probs is None:
            raise VardropError(
                f"Expected a classification for `probs`, but got likelihood={self.likelihood!r}. "
                "Use mean and std."
            )
        return self.mean_probs

    @property
    def entropy(self) -> Tensor:
        """The entropy of the mean probability, in nats: the total uncertainty."""
        if self.likelihood == "categorical":
            return entropy(self.probs, CLASS_AXIS - 1)
        return binary_entropy(self.probs)

    @property
    def aleatoric(self) -> Tensor:
        """What remains if the weights were known: mean entropy, or mean variance of the target."""
        return self.expected

    @property
    def epistemic(self) -> Tensor:
        """What the draws disagree about: mutual information, or the variance of the mean."""
        if self.classifies:
            return (self.entropy - self.expected).clamp(min=0)
        return self.output_variance

    @property
    def std(self) -> Tensor:
        """Standard deviation: of the output over draws, or, in regression, of the target."""
        if self.classifies:
            return self.output_variance.sqrt()
        return (self.output_variance + self.expected).sqrt()

    def interval(self, level: float = 0.95) -> Interval:
        """Central interval of the mixture of the kept draws.

        Regression: quantiles of 1/K sum_k N(mean_k, variance_k), found on its distribution
        function. Classification: quantiles of the probability over the draws.
        """
        if not 0 < level < 1:
            raise VardropError(f"Expected `level` to lie between 0 and 1, but got {level}.")
        parts = interpret(self._kept(), self.likelihood, self.noise_std)
        tails = torch.tensor([(1 - level) / 2, (1 + level) / 2], device=self.mean.device)
        if parts.probs is not None or not bool(parts.aleatoric.any()):
            values = parts.location if parts.probs is None else parts.probs
            return Interval(*torch.quantile(values, tails.to(values), dim=0))
        std = parts.aleatoric.sqrt()
        return Interval(*(mixture_quantile(parts.location, std, float(q)) for q in tails))

    def log_prob(self, y: Tensor) -> Tensor:
        """log p(y | x) of every row, (N,): the log of the mean density, never the mean of the log.

        Regression: log 1/K sum_k N(y; mean_k, variance_k), by log-sum-exp over the kept draws.
        """
        if self.likelihood == "categorical":
            return self._log_class(y)
        expected = self.mean.shape
        if y.shape != expected:
            raise VardropError(
                f"Expected `y` to have shape {tuple(expected)}, but got {tuple(y.shape)}. "
                "Reshape the target."
            )
        if self.likelihood == "bernoulli":
            chosen = torch.where(y > 0, self.probs, 1 - self.probs)
            return chosen.log().flatten(1).sum(1) if y.dim() > 1 else chosen.log()
        parts = interpret(self._kept(), self.likelihood, self.noise_std)
        if not bool((parts.aleatoric > 0).all()):
            raise VardropError(
                "Expected `noise_std` to be positive for a density, but got 0. "
                "Pass noise_std= to predict."
            )
        each = gaussian_log_prob(y, parts.location, parts.aleatoric)
        each = each.flatten(2).sum(2) if each.dim() > 2 else each
        return torch.logsumexp(each, 0) - torch.tensor(float(len(each))).log()

    def _log_class(self, y: Tensor) -> Tensor:
        classes = self.probs.shape[1]
        if y.is_floating_point() or y.shape != self.probs[:, 0].shape:
            raise VardropError(
                f"Expected `y` to hold class indices of shape {tuple(self.probs[:, 0].shape)}, "
                f"but got {y.dtype} of shape {tuple(y.shape)}."
            )
        if len(y) and not (int(y.min()) >= 0 and int(y.max()) < classes):
            wrong = int(y.min()) if int(y.min()) < 0 else int(y.max())
            raise VardropError(
                f"Expected `y` to be classes from 0 to {classes - 1}, but got {wrong}. "
                "The net's output has no such class."
            )
        chosen = self.probs.gather(1, y.unsqueeze(1)).squeeze(1).log()
        return chosen.flatten(1).sum(1) if chosen.dim() > 1 else chosen

    def _kept(self) -> Tensor:
        if len(self.draws) == 0:
            raise VardropError(
                "Expected kept draws, but got none. Predict with keep= the draws that you need."
            )
        return self.draws


def mixture_quantile(mean: Tensor, std: Tensor, level: float) -> Tensor:
    """Quantile of the equal mixture of normals along axis 0, by bisection.

    >>> import torch
    >>> mixture_quantile(torch.zeros(1, 1), torch.ones(1, 1), 0.975)
    tensor([1.9600])
    """
    centre = torch.special.ndtri(torch.tensor(level, dtype=torch.float64)).to(mean)
    each = mean + std * centre
    low, high = each.amin(0), each.amax(0)  # the mixture's quantile lies between its parts'
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        below = torch.special.ndtr((middle - mean) / std).mean(0) < level
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return 0.5 * (low + high)


def join(parts: Sequence[Prediction], share: float | None = None) -> Prediction:
    """The predictions of several batches as one; as many draws stay as every batch kept."""
    first, kept = parts[0], min(len(p.draws) for p in parts)
    if len(parts) == 1:
        return first if share is None else replace(first, share=share)
    return Prediction(
        likelihood=first.likelihood,
        noise_std=first.noise_std,
        mean=torch.cat([p.mean for p in parts]),
        output_variance=torch.cat([p.output_variance for p in parts]),
        expected=torch.cat([p.expected for p in parts]),
        mean_probs=torch.cat([p.probs for p in parts]) if first.classifies else None,
        standard_error=torch.cat([p.standard_error for p in parts]),
        samples=torch.cat([p.samples for p in parts]),
        draws=torch.cat([p.draws[:kept] for p in parts], 1) if kept else first.draws[:0],
        share=share,
    )
