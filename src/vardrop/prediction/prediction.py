"""A prediction: what the draws say together and how much they disagree, reduced as they come."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vardrop._core.checks import check_number
from vardrop._core.errors import NotFiniteError, VardropError
from vardrop.likelihoods import Gaussian, Likelihood, Values, entropy

_BISECTIONS = 60
_FEWEST = 16  # draws before a standard error is believed
_SMALL = 4096  # numbers below which a call of an operation costs more than its work
_SAFE = 1e-30  # a sum of probabilities whose logarithm is right in single precision


class Interval(NamedTuple):
    """An interval for every element of a prediction.

    Args:
        lower, upper: the bounds, in the shape of the prediction.
    """

    lower: Tensor
    upper: Tensor


@dataclass(frozen=True, eq=False, repr=False)
class Prediction:
    """The predictive distribution of N examples, reduced over draws.

    Classification (`Categorical`, `Bernoulli`): `probs` is the mean probability, `log_probs` its
    logarithm (taken before anything rounds to zero or one), `entropy` its entropy, and

        entropy = aleatoric + epistemic,   epistemic = I(y; w) = H[E p] - E H[p] >= 0.

    Regression (`Gaussian`, `HeteroscedasticGaussian`): `aleatoric` and `epistemic` are variances,

        std^2 = aleatoric + epistemic,   aleatoric = E Var[y | w],   epistemic = Var E[y | w].

    `log_probs` has an entry per class, on the likelihood's class axis: (N, C, ...), or (N, ..., C)
    for tokens, or (N, ..., 2) for zero and one.

    Args:
        likelihood: the meaning of the output.
        mean: the mean output (logits for classification).
        output_variance: the variance of the output over draws.
        expected: the mean over draws of the entropy, or of the variance of the target.
        standard_error: of the mean probability, or of the mean value in regression.
        samples: the number of draws for each example.
        draws: the outputs of the draws that were kept (K, N, ...).
        mean_log_probs, mean_probs: of classes; None in regression.
        analytic: whether mean and variance were propagated (mode="moments") and the draws were made
            from them.

    >>> import torch, vardrop as vd
    >>> from vardrop.prediction import predict
    >>> net = vd.convert(torch.nn.Linear(4, 3), vd.bayes_by_backprop())
    >>> p = predict(net, torch.randn(5, 4), samples=8)
    >>> p.probs.shape, p.epistemic.shape, p.interval(0.95).lower.shape
    (torch.Size([5, 3]), torch.Size([5]), torch.Size([5, 3]))

    Depeweg et al. 2018, "Decomposition of uncertainty in Bayesian deep learning", eq. 2 and 6.
    """

    likelihood: Likelihood
    mean: Tensor
    output_variance: Tensor
    expected: Tensor
    standard_error: Tensor
    samples: Tensor
    draws: Tensor
    mean_log_probs: Tensor | None = None
    mean_probs: Tensor | None = None
    analytic: bool = False

    def __len__(self) -> int:
        return len(self.mean)

    def __repr__(self) -> str:
        least, most = int(self.samples.min()), int(self.samples.max())
        count = f"{most}" if least == most else f"{least} to {most}"
        return f"Prediction({len(self)} examples, {type(self.likelihood).__name__}, {count} draws)"

    @property
    def classifies(self) -> bool:
        """Whether there are class probabilities."""
        return self.mean_probs is not None

    @property
    def probs(self) -> Tensor:
        """The mean probability: of every class, or of a one."""
        return self._require_classes(self.mean_probs, "probs")

    @property
    def log_probs(self) -> Tensor:
        """The logarithm of the mean probability of every class, or of a zero and a one."""
        return self._require_classes(self.mean_log_probs, "log_probs")

    def _require_classes(self, probs: Tensor | None, name: str) -> Tensor:
        if probs is None:
            raise VardropError(
                f"Expected a classification for `{name}`, but got likelihood={self.likelihood!r}. "
                "Use mean and std."
            )
        return probs

    @property
    def entropy(self) -> Tensor:
        """The entropy of the mean probability, in nats: the total uncertainty."""
        log_probs = self._require_classes(self.mean_log_probs, "entropy")
        assert self.likelihood.class_axis is not None
        return entropy(log_probs, log_probs.exp(), self.likelihood.class_axis)

    @property
    def aleatoric(self) -> Tensor:
        """The noise of the data: the mean entropy, or the mean variance of the target."""
        return self.expected

    @property
    def epistemic(self) -> Tensor:
        """The uncertainty about the weights: mutual information, or the variance of the mean."""
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

        Regression: quantiles of 1/K sum_k N(mean_k, variance_k). Classification: quantiles of the
        probability over the draws. With mode="moments" and noise that does not depend on the
        input, the predictive distribution is the normal N(mean, std^2), and no draws are needed.

        Args:
            level: the probability inside the interval.

        Returns:
            The bounds.
        """
        check_number("level", level, above=0, below=1)
        if self.analytic and isinstance(self.likelihood, Gaussian | Values):
            half = self.std * NormalDist().inv_cdf((1 + level) / 2)
            return Interval(self.mean - half, self.mean + half)
        parts = self.likelihood.parts(self._require_draws())
        tails = (1 - level) / 2, (1 + level) / 2
        if parts.probs is not None or isinstance(self.likelihood, Values):
            centers = parts.location if parts.probs is None else parts.probs
            return Interval(*(_quantile(centers, level) for level in tails))
        std = parts.aleatoric.sqrt()
        return Interval(*(mixture_quantile(parts.location, std, level) for level in tails))

    def log_prob(self, y: Tensor) -> Tensor:
        """log p(y | x) of every example: the logarithm of the mean density.

        An example with one class or one binary target uses all draws. Values, and several targets
        of an example together, use the draws that were kept: log 1/K sum_k prod_t p(y_t | draw k).

        Args:
            y: the targets.

        Returns:
            One number per example, (N,).
        """
        self.likelihood.check_target(self.mean, y)
        axis = self.likelihood.class_axis
        if axis is None or y[0].numel() != 1:
            return self.likelihood.log_prob(self._require_draws(), y)
        return self.log_probs.gather(axis, y.long().unsqueeze(axis)).flatten()

    def select_valid(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Select the targets that are not ignored, for metrics.

        Args:
            y: classes (N, ...).

        Returns:
            The probabilities (M, C) and the classes (M,) of these targets.

        >>> import torch, vardrop as vd
        >>> likelihood = vd.Categorical(class_axis=-1)
        >>> net = vd.convert(torch.nn.Linear(4, 3), vd.bayes_by_backprop())
        >>> p = vd.predict(net, torch.randn(5, 7, 4), samples=8, likelihood=likelihood)
        >>> y = likelihood.masked(torch.zeros(5, 7).long(), torch.arange(7).expand(5, 7) < 6)
        >>> vd.metrics.ece(*p.select_valid(y)).shape, p.select_valid(y)[0].shape
        (torch.Size([]), torch.Size([30, 3]))
        """
        self.likelihood.check_target(self.mean, y)
        axis = self.likelihood.class_axis
        if axis is None or self.probs.shape != self.log_probs.shape:
            raise VardropError(f"Expected classes for `select_valid`, but got {self.likelihood!r}.")
        which = self.likelihood.valid_mask(y)
        return self.probs.movedim(axis, -1)[which], y[which]

    def rescale(self, factor: float) -> Prediction:
        """The prediction of the same draws with more or less noise of the targets.

        Args:
            factor: of the noise, as for `Likelihood.scaled`.

        Returns:
            The new prediction.
        """
        if self.analytic:
            raise VardropError(
                'Expected a sampled prediction to rescale, but got one of mode="moments", whose '
                "draws do not have its mean and variance. Predict again with "
                "likelihood=p.likelihood.scaled(factor)."
            )
        if len(self.draws) < int(self.samples.max()):
            raise VardropError(
                f"Expected all of the {int(self.samples.max())} draws to be kept, but got "
                f"{len(self.draws)}. Predict without keep=."
            )
        summary = Summary(self.likelihood.scaled(factor), len(self.draws))
        summary.add(self.draws)
        return summary.prediction()

    def to_units(self, mean: float, std: float, likelihood: Likelihood) -> Prediction:
        """The prediction of std * y + mean, in double precision.

        In single precision, a target whose mean is much larger than its standard deviation would
        lose its digits.

        Args:
            mean, std: of the target before it was standardized.
            likelihood: of the prediction in these units, in double precision.

        Returns:
            The new prediction; the same one for classes.
        """
        if self.classifies:
            return self
        locations = likelihood.locations(self.draws.double())
        others = self.draws[..., locations.shape[-1] :].double()  # relative log variances
        return replace(
            self,
            likelihood=likelihood,
            mean=self.mean.double() * std + mean,
            output_variance=self.output_variance.double() * std**2,
            expected=self.expected.double() * std**2,
            standard_error=self.standard_error.double() * std,
            draws=torch.cat([locations * std + mean, others], -1),
        )

    def _require_draws(self) -> Tensor:
        if len(self.draws) == 0:
            raise VardropError(
                "Expected kept draws, but got none. Predict with keep= the draws that you need."
            )
        return self.draws


def _quantile(values: Tensor, level: float) -> Tensor:
    """Quantile along axis 0, with linear interpolation between values."""
    place = level * (len(values) - 1)
    low = math.floor(place)
    ordered = values.sort(0).values
    return torch.lerp(ordered[low], ordered[min(low + 1, len(values) - 1)], place - low)


def mixture_quantile(mean: Tensor, std: Tensor, level: float) -> Tensor:
    """Quantile of the equal mixture of normals along axis 0.

    It is between the quantiles of the components. Each round divides the range into equal sections
    and keeps the one that contains the quantile. An exported graph has few rounds of many sections,
    which are fewer operations. Otherwise two sections (bisection) need less time.

    >>> import torch
    >>> mixture_quantile(torch.zeros(1, 1), torch.ones(1, 1), 0.975)
    tensor([1.9600])
    """
    sections, rounds = (32, 6) if torch.compiler.is_compiling() else (2, _BISECTIONS)
    each = mean + std * NormalDist().inv_cdf(level)
    low, width = each.amin(0), each.amax(0) - each.amin(0)
    places = torch.arange(1, sections, device=mean.device).view(-1, *(1,) * mean.dim())
    for _ in range(rounds):
        width = width / sections
        ends = low + width * places  # (sections - 1, 1, N, ...)
        below = torch.erf((ends - mean) / std * math.sqrt(0.5)).mean(1) < 2 * level - 1
        low = low + width * below.sum(0)
    return low + width / 2


def concatenate(parts: Sequence[Prediction]) -> Prediction:
    """Join the predictions of several batches, with as many draws as every batch has."""
    first, count = parts[0], min(len(p.draws) for p in parts)
    if len(parts) == 1:
        return first
    sizes = sorted({tuple(p.mean.shape[1:]) for p in parts})
    if len(sizes) > 1:
        raise VardropError(
            f"Expected outputs of one shape from all batches, but got {sizes[0]} and {sizes[-1]} "
            "per example. Pad all sequences to one length, or predict each batch separately."
        )
    names = ["mean", "output_variance", "expected", "standard_error", "samples"]
    names += ["mean_log_probs", "mean_probs"] if first.classifies else []
    joined: dict[str, Any] = {n: torch.cat([getattr(p, n) for p in parts]) for n in names}
    draws = torch.cat([p.draws[:count] for p in parts], 1) if count else first.draws[:0]
    return replace(first, draws=draws, **joined)


@dataclass
class RunningMoments:
    """Mean and sum of squared deviations of a stream, merged block by block.

    Chan, Golub & LeVeque 1979, "Updating formulae and a pairwise algorithm for computing sample
    variances", eq. 2.1.
    """

    count: int = 0
    mean: Tensor = field(init=False)
    square: Tensor = field(init=False)

    def add(self, values: Tensor, finite: bool = False) -> Tensor:
        """Add values (S, ...), which may be known to be finite, and return their mean."""
        block = values.shape[0]
        finite &= not torch.compiler.is_compiling()
        if finite and 1 < block < values.numel() < _SMALL:  # one operation instead of five
            variance, mean = torch.var_mean(values, 0)
            square = variance.mul_(block - 1)
        else:
            mean = values.sum(0).div_(block)
            square = (values - mean).square_().sum(0)
        if self.count == 0:
            self.count, self.mean, self.square = block, mean, square
            return mean
        total, shift = self.count + block, mean - self.mean
        self.mean = self.mean + shift * (block / total)
        self.square = self.square + square + shift.square() * (self.count * block / total)
        self.count = total
        return mean


@dataclass
class Summary:
    """Reduces the draws of one batch; memory grows only with the draws that are kept."""

    likelihood: Likelihood
    keep: int
    location: RunningMoments = field(default_factory=RunningMoments)
    probs: RunningMoments = field(default_factory=RunningMoments)
    aleatoric: Tensor | None = None
    log_sum: Tensor | None = None  # of probabilities over draws, as a logarithm
    blocks: list[Tensor] = field(default_factory=list)

    def add(self, outputs: Tensor) -> None:
        """Add outputs (S, N, ...)."""
        outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        room = self.keep - sum(len(block) for block in self.blocks)
        if room > 0:
            self.blocks.append(outputs if room >= outputs.shape[0] else outputs[:room].clone())
        parts = self.likelihood.parts(outputs)
        self.location.add(parts.location)
        each = parts.aleatoric.sum(0)
        self.aleatoric = each if self.aleatoric is None else self.aleatoric + each
        if parts.log_probs is None or parts.probs is None:
            return
        mean = self.probs.add(parts.probs, finite=True)
        # log sum p over draws, from the probabilities unless one may have underflowed.
        alike = parts.probs.shape == parts.log_probs.shape
        total = mean * len(outputs) if alike else parts.log_probs.exp().sum(0)
        is_safe = not torch.compiler.is_compiling() and float(total.amin()) > _SAFE
        total = total.log_() if is_safe else torch.logsumexp(parts.log_probs, 0)
        self.log_sum = total if self.log_sum is None else torch.logaddexp(self.log_sum, total)

    @property
    def standard_error(self) -> Tensor:
        """Of every mean probability, or of every mean value in regression."""
        moments = self.probs if self.probs.count else self.location
        return (moments.square / (moments.count * max(moments.count - 1, 1))).sqrt_()

    def is_settled(self, tolerance: float) -> bool:
        """Whether the standard error of every mean probability (or value) is below a tolerance."""
        if self.location.count < _FEWEST or torch.compiler.is_compiling():
            return False  # a graph cannot branch on values
        return bool(self.standard_error.max() < tolerance)

    def prediction(self) -> Prediction:
        """The prediction from the draws so far."""
        mean, count = self.location.mean, self.location.count
        variance = self.location.square / max(count - 1, 1)  # zero for a single draw
        # The sum is cheap, but may overflow. A graph cannot branch on values.
        if not torch.compiler.is_compiling() and not math.isfinite(float(mean.sum())):
            if bool(mean.isnan().any()):
                row = int(mean.isnan().view(len(mean), -1).any(1).int().argmax()) + 1
                raise NotFiniteError(
                    f"Expected finite predictions, but got NaN or infinity in row {row}. Its "
                    "values are too large for this model, or the parameters of the model are not "
                    "finite."
                )
            # A log-probability that is -inf in some draws has no finite variance.
            variance = variance.nan_to_num(math.inf, math.inf)
        assert self.aleatoric is not None
        logs = None if self.log_sum is None else self.log_sum - math.log(count)
        blocks = self.blocks or [mean.new_zeros(0)]
        return Prediction(
            likelihood=self.likelihood,
            mean=mean,
            output_variance=variance,
            expected=self.aleatoric / count,
            standard_error=self.standard_error,
            samples=torch.full((mean.shape[0],), count, device=mean.device),
            draws=blocks[0] if len(blocks) == 1 else torch.cat(blocks),
            mean_log_probs=None if logs is None else logs.clamp_(max=0),
            mean_probs=self.probs.mean if self.probs.count else None,
        )
