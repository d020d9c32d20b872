"""Likelihoods p(y | output), for training and for prediction.

| likelihood                   | output                             | target                   |
|------------------------------|------------------------------------|--------------------------|
| `Categorical`                | logits (N, C, ...)                 | classes (N, ...)         |
| `Categorical(class_axis=-1)` | logits (N, ..., C), as of tokens   | classes (N, ...)         |
| `Bernoulli`                  | logits (N, ...)                    | zeros and ones (N, ...)  |
| `Gaussian`                   | means (N, ...)                     | values (N, ...)          |
| `HeteroscedasticGaussian`    | means, log variances (N, ..., 2 T) | values (N, ..., T)       |
| `Values`                     | values (N, ...)                    | none: it has no density  |

Called as a module, each returns the negative log-likelihood of an example: summed over its targets
(pixels, tokens, outputs) and averaged over the batch. For draws (S, N, ...) it returns their parts
and log E p(y | draw), in log space throughout.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from vardrop._core.checks import check_net, check_number, check_tensor, check_type, describe_value
from vardrop._core.errors import VardropError
from vardrop._core.sharding import full_tensor
from vardrop.functional import generator, standard_normal
from vardrop.functional.normal import LOG_2PI


class Parts(NamedTuple):
    """Draws (S, N, ...) by meaning.

    `location` is averaged into the mean. `log_probs` has one entry per outcome, along the class
    axis of the likelihood. `probs` is the probability of every class, or of a one. `aleatoric` is
    the entropy (classes) or the variance (values) of the target given the draw.
    """

    location: Tensor
    aleatoric: Tensor
    log_probs: Tensor | None = None
    probs: Tensor | None = None


class TeacherOutput(NamedTuple):
    """The predictive mean, standard deviation and log-probabilities of N examples."""

    mean: Tensor
    std: Tensor
    log_probs: Tensor | None


class Likelihood(nn.Module, ABC):
    """p(y | output)."""

    class_axis: int | None = None  # the axis of outcomes in the log-probabilities (N, ...)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        """The mean NLL of an example, in nats: summed over its targets, averaged over examples."""
        return -_per_example(self.log_density(output.unsqueeze(0), target).squeeze(0), 1).mean()

    def nll(self, output: Tensor, target: Tensor) -> Tensor:
        """The mean NLL of an example, the same as calling the likelihood."""
        return self.forward(output, target)

    def example_nll(self, output: Tensor, target: Tensor) -> Tensor:
        """The NLL of every example, (N,), summed over its targets."""
        return -self.log_prob(output.unsqueeze(0), target)

    def valid_mask(self, y: Tensor) -> Tensor:
        """True for targets (N, ...) that count: all except an ignored class."""
        return torch.ones_like(y, dtype=torch.bool)

    @abstractmethod
    def parts(self, draws: Tensor) -> Parts:
        """Outputs (S, N, ...) by meaning."""

    @abstractmethod
    def log_density(self, draws: Tensor, y: Tensor) -> Tensor:
        """log p of every target under every draw, (S, N, ...)."""

    def log_prob(self, draws: Tensor, y: Tensor) -> Tensor:
        """log p(y | x) of every example, (N,), from outputs (S, N, ...).

        log 1/S sum_s prod_t p(y_t | draw s), over all targets of an example. It is finite if one
        draw is finite.
        """
        each = _per_example(self.log_density(draws, y), 2)
        return torch.logsumexp(each, 0) - math.log(len(each))

    @abstractmethod
    def sample(self, output: Tensor) -> Tensor:
        """Draw one target for every example."""

    def distillation_loss(
        self, output: Tensor, teacher: TeacherOutput, temperature: float
    ) -> Tensor:
        """The loss of a student with this output under the predictive distribution of a teacher."""
        return functional.mse_loss(output, teacher.mean)

    def locations(self, output: Tensor) -> Tensor:
        """The part of an output that is averaged into the mean."""
        return output

    def output_shape(self, mean: torch.Size) -> torch.Size:
        """The shape of an output whose locations have this shape."""
        return mean

    def check_target(self, mean: Tensor, y: Tensor) -> None:
        """Raise an error for a target that does not fit locations (N, ...)."""
        _check_same_shape("y", y, mean.shape)

    def check_outcomes(self, shape: torch.Size) -> None:
        """Raise an error for outputs (N, ...) that this likelihood has no meaning for."""
        return

    def frozen_copy(self) -> Likelihood:
        """The same with copies of the current tensors, which training does not change."""
        return self

    def scaled(self, factor: float) -> Likelihood:
        """The same with its standard deviation or temperature multiplied by `factor`, fixed.

        `vardrop.calibrate` finds the factor that fits held-out data.
        """
        raise VardropError(f"Expected a likelihood with noise, but got {self!r}.")

    def apply_temperature(self, log_probs: Tensor, temperature: float) -> Tensor:
        """Divide log-probabilities (N, ...) by a temperature and normalise them."""
        if self.class_axis is None:
            raise VardropError(f"Expected class probabilities, but got {self!r}.")
        return functional.log_softmax(log_probs / temperature, self.class_axis)


class _OfClasses(Likelihood):
    """A likelihood whose logits are output / `temperature`."""

    def __init__(self, temperature: float = 1.0) -> None:
        super().__init__()
        check_number("temperature", temperature, above=0)
        self.temperature = temperature

    def _logits(self, output: Tensor) -> Tensor:
        return output if self.temperature == 1 else output / self.temperature


class Categorical(_OfClasses):
    """-log softmax(output / T)[target], summed over the targets of an example.

    The output is (N, C, ...), or (N, ..., C) with `class_axis=-1` (tokens). The target (N, ...)
    holds class indices. Targets of `ignore_index`, such as padding, do not count. Every sequence
    needs a target that counts, because it counts as one of `num_data`. In training with one target
    per example, examples without one are left out of the mean, as in torch.

    Args:
        temperature: T, 1 in training.
        class_axis: 1, or -1 for the last.
        ignore_index: the class of targets that do not count, by default as in torch.

    >>> import torch
    >>> Categorical()(torch.zeros(1, 2), torch.tensor([1]))
    tensor(0.6931)
    >>> Categorical(class_axis=-1)(torch.zeros(1, 4, 2), torch.tensor([[1, 0, 1, -100]]))
    tensor(2.0794)
    """

    class_axis: int

    def __init__(
        self, temperature: float = 1.0, class_axis: int = 1, ignore_index: int = -100
    ) -> None:
        super().__init__(temperature)
        if not isinstance(class_axis, int) or class_axis not in (1, -1):
            raise VardropError(
                f"Expected `class_axis` to be 1 or -1, but got {describe_value(class_axis)}. "
                "Move the classes of the output to one of them."
            )
        check_type("ignore_index", ignore_index, int, "an integer")
        self.class_axis, self.ignore_index = class_axis, ignore_index
        self.draws_axis = 2 if class_axis == 1 else -1  # of classes in draws (S, N, ...)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        """torch's cross entropy, summed over the positions of an example."""
        if self.temperature != 1:
            output = output / self.temperature
        if output.dim() <= 2:
            return functional.cross_entropy(output, target, ignore_index=self.ignore_index)
        logits = output
        if self.class_axis == -1:  # one long sequence avoids a copy with classes in the middle
            soft = target.is_floating_point()
            logits, target = output.flatten(0, -2), target.flatten(0, -2 if soft else -1)
        total = functional.cross_entropy(
            logits, target, ignore_index=self.ignore_index, reduction="sum"
        )
        return total / len(output)

    def scaled(self, factor: float) -> Categorical:
        """The temperature times `factor`."""
        return Categorical(self.temperature * factor, self.class_axis, self.ignore_index)

    def extra_repr(self) -> str:
        options = [] if self.temperature == 1 else [f"temperature={self.temperature:.4g}"]
        options += [] if self.class_axis == 1 else [f"class_axis={self.class_axis}"]
        options += [] if self.ignore_index == -100 else [f"ignore_index={self.ignore_index}"]
        return ", ".join(options)

    def valid_mask(self, y: Tensor) -> Tensor:
        """True for targets (N, ...) that count."""
        return y != self.ignore_index

    def masked(self, y: Tensor, mask: Tensor) -> Tensor:
        """Set targets to `ignore_index` if the mask, such as an attention mask, is zero.

        Args:
            y: the targets.
            mask: zero where a target does not count.

        Returns:
            The targets.

        >>> import torch
        >>> Categorical().masked(torch.tensor([[3, 1, 0]]), torch.tensor([[1, 1, 0]]))
        tensor([[   3,    1, -100]])
        """
        check_tensor("y", y)
        check_tensor("mask", mask)
        if mask.shape != y.shape:
            raise VardropError(
                f"Expected `mask` to have the shape {tuple(y.shape)} of the targets, but got "
                f"{tuple(mask.shape)}. Mask each target."
            )
        targets = y.masked_fill(mask == 0, self.ignore_index)
        self.check_valid(targets)
        return targets

    def check_valid(self, y: Tensor) -> None:
        """Raise an error for an example without a target that counts.

        Args:
            y: the targets.
        """
        empty = ~_per_example(self.valid_mask(y), 1).bool()
        if bool(empty.any()):
            raise VardropError(
                f"Expected a target that counts in every example, but got {self.ignore_index} "
                f"alone in row {int(empty.int().argmax())}. Leave the example out: it would count "
                "as one of `num_data` without any information."
            )

    def parts(self, draws: Tensor) -> Parts:
        """Log-probabilities and probabilities of the classes, and their entropy."""
        if draws.dim() < 3:
            raise VardropError(
                f"Expected the output to have shape (N, classes, ...), but got "
                f"{tuple(draws.shape[1:])}. Pass likelihood=vardrop.Bernoulli() or "
                "vardrop.Gaussian() for one value."
            )
        # torch's softmax is slow along a short axis.
        logits, axis = self._logits(draws), self.draws_axis
        shifted = logits - logits.amax(axis, keepdim=True)
        probs = shifted.exp()
        total = probs.sum(axis, keepdim=True)
        log_probs = shifted.sub_(total.log())
        probs.div_(total)
        return Parts(draws, entropy(log_probs, probs, axis), log_probs, probs)

    def log_density(self, draws: Tensor, y: Tensor) -> Tensor:
        """log softmax(draw / T)[y], or 0 for a target that does not count."""
        self.check_target(draws[0], y)
        axis, valid = self.draws_axis, self.valid_mask(y)
        index = y.where(valid, 0).unsqueeze(self.class_axis)
        logs = self._logits(draws).log_softmax(axis)
        chosen = logs.gather(axis, index.expand(len(draws), *index.shape)).squeeze(axis)
        return chosen.where(valid, 0)

    def check_outcomes(self, shape: torch.Size) -> None:
        """One output is no class, because its probability would always be one."""
        if len(shape) > 1 and shape[self.class_axis] < 2:
            raise VardropError(
                f"Expected at least two classes for Categorical(), but got an output of shape "
                f"{tuple(shape)}. Use Bernoulli() for one logit, or Gaussian() for a number."
            )

    def check_target(self, mean: Tensor, y: Tensor) -> None:
        """Targets must be class indices of the output, with one that counts in every example."""
        check_tensor("y", y)
        classes, expected = mean.shape[self.class_axis], mean.select(self.class_axis, 0).shape
        if y.is_floating_point() or y.dtype == torch.bool or y.shape != expected:
            raise VardropError(
                f"Expected `y` to hold class indices of shape {tuple(expected)}, "
                f"but got {y.dtype} of shape {tuple(y.shape)}."
            )
        valid = y[self.valid_mask(y)]
        low, high = (int(valid.min()), int(valid.max())) if valid.numel() else (0, 0)
        if low < 0 or high >= classes:
            wrong = low if low < 0 else high
            raise VardropError(
                f"Expected `y` to be classes from 0 to {classes - 1}, but got {wrong}. "
                "The output of the model has no such class."
            )
        self.check_valid(y)

    def sample(self, output: Tensor) -> Tensor:
        """Classes, from softmax(output / T)."""
        probs = self._logits(output).softmax(self.class_axis).movedim(self.class_axis, -1)
        source = generator(output.device)
        classes = torch.multinomial(probs.flatten(0, -2), 1, generator=source)
        return classes.view(probs.shape[:-1])

    def distillation_loss(
        self, output: Tensor, teacher: TeacherOutput, temperature: float
    ) -> Tensor:
        """T^2 KL(p_T || softmax(output / T)), p_T the teacher's probability at temperature T."""
        log_probs = functional.log_softmax(output / temperature, self.class_axis)
        return _kl_to_teacher(self, log_probs, teacher, temperature)


class Bernoulli(_OfClasses):
    """-log p(target) for independent binary targets with logits output / `temperature`.

    Args:
        temperature: the divisor of the logits.

    >>> import torch
    >>> Bernoulli()(torch.zeros(2), torch.tensor([0.0, 1.0]))
    tensor(0.6931)
    """

    class_axis: int = -1  # of log-probabilities (N, ..., 2) of a zero and a one

    def scaled(self, factor: float) -> Bernoulli:
        """The temperature times `factor`."""
        return Bernoulli(self.temperature * factor)

    def extra_repr(self) -> str:
        return "" if self.temperature == 1 else f"temperature={self.temperature:.4g}"

    def parts(self, draws: Tensor) -> Parts:
        """Log-probabilities of zero and one, the probability of one, and the entropy."""
        logits = self._logits(draws)
        log_probs, probs = _two_sides(logits), logits.sigmoid()
        return Parts(draws, entropy(log_probs, log_probs.exp(), -1), log_probs, probs)

    def log_density(self, draws: Tensor, y: Tensor) -> Tensor:
        """log sigmoid(draw / T) of a one, log sigmoid(-draw / T) of a zero."""
        _check_same_shape("target", y, draws.shape[1:])
        target, logits = y.to(draws.dtype).expand_as(draws), self._logits(draws)
        return -functional.binary_cross_entropy_with_logits(logits, target, reduction="none")

    def check_target(self, mean: Tensor, y: Tensor) -> None:
        """Zeros and ones."""
        super().check_target(mean, y)
        if not bool(((y == 0) | (y == 1)).all()):
            raise VardropError("Expected `y` to hold zeros and ones, but got other values.")

    def sample(self, output: Tensor) -> Tensor:
        """Ones, by sigmoid(output / T)."""
        probs = self._logits(output).sigmoid()
        return torch.bernoulli(probs, generator=generator(output.device))

    def distillation_loss(
        self, output: Tensor, teacher: TeacherOutput, temperature: float
    ) -> Tensor:
        """T^2 KL of the two-sided distributions at temperature T."""
        return _kl_to_teacher(self, _two_sides(output / temperature), teacher, temperature)


class Gaussian(Likelihood):
    """-log N(target; output, std^2) with one standard deviation, fixed or learned.

    Args:
        std: the standard deviation, or its initial value.
        learned: whether it is learned.

    >>> import torch
    >>> likelihood = Gaussian(std=1.0)
    >>> likelihood(torch.zeros(1, 1), torch.zeros(1, 1)), likelihood.std
    (tensor(0.9189), tensor(1.))
    """

    log_std: Tensor

    def __init__(self, std: float = 1.0, learned: bool = False) -> None:
        super().__init__()
        check_number("std", std, above=0, remedy="Pass vardrop.Values() for outputs without noise.")
        check_type("learned", learned, bool, "True or False")
        log_std = torch.full((1,), math.log(std))
        if learned:
            self.log_std = nn.Parameter(log_std)
        else:
            self.register_buffer("log_std", log_std)

    @property
    def std(self) -> Tensor:
        """The current standard deviation of the targets, detached."""
        return full_tensor(self.log_std.detach()).exp().squeeze()

    def parts(self, draws: Tensor) -> Parts:
        """The draws, and std^2 for each."""
        return Parts(draws, self.std.square().to(draws).expand_as(draws))

    def log_density(self, draws: Tensor, y: Tensor) -> Tensor:
        """log N(y; draw, std^2)."""
        _check_same_shape("target", y, draws.shape[1:])
        z = (y - draws) * torch.exp(-self.log_std)
        return -(0.5 * (z.square() + LOG_2PI) + self.log_std)

    def sample(self, output: Tensor) -> Tensor:
        """output + std noise."""
        return output + self.std * standard_normal(output.shape, output)

    def frozen_copy(self) -> Gaussian:
        """A Gaussian with the current std."""
        likelihood = Gaussian()
        likelihood.log_std = full_tensor(self.log_std.detach()).clone()
        return likelihood

    def scaled(self, factor: float) -> Gaussian:
        """std times `factor`."""
        return Gaussian(float(self.std) * factor)

    def extra_repr(self) -> str:
        return f"std={float(self.std):.4g}"


class HeteroscedasticGaussian(Likelihood):
    """-log N(target; mean, scale^2 exp(log_variance)), both from the last axis of the output.

    The last axis holds the means, then the log variances.

    Args:
        scale: the factor of the standard deviation. It is 1 in training.

    >>> import torch
    >>> HeteroscedasticGaussian()(torch.zeros(1, 2), torch.zeros(1, 1))
    tensor(0.9189)
    """

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        check_number("scale", scale, above=0)
        self.scale = scale

    def scaled(self, factor: float) -> HeteroscedasticGaussian:
        """The scale times `factor`."""
        return HeteroscedasticGaussian(self.scale * factor)

    def extra_repr(self) -> str:
        return "" if self.scale == 1 else f"scale={self.scale:.4g}"

    def _split(self, output: Tensor) -> tuple[Tensor, Tensor]:
        if output.shape[-1] % 2:
            raise VardropError(
                "Expected the output to hold a mean and a log variance per target, so an even last "
                f"axis, but got {output.shape[-1]} entries."
            )
        mean, log_variance = output.chunk(2, dim=-1)
        return mean, log_variance if self.scale == 1 else log_variance + 2 * math.log(self.scale)

    def parts(self, draws: Tensor) -> Parts:
        """Means and variances."""
        mean, log_variance = self._split(draws)
        return Parts(mean, log_variance.exp())

    def log_density(self, draws: Tensor, y: Tensor) -> Tensor:
        """log N(y; mean, variance)."""
        mean, log_variance = self._split(draws)
        _check_same_shape("target", y, mean.shape[1:])
        square = (y - mean).square() * torch.exp(-log_variance)
        return -0.5 * (square + log_variance + LOG_2PI)

    def sample(self, output: Tensor) -> Tensor:
        """mean + sqrt(variance) noise."""
        mean, log_variance = self._split(output)
        return mean + torch.exp(0.5 * log_variance) * standard_normal(mean.shape, mean)

    def distillation_loss(
        self, output: Tensor, teacher: TeacherOutput, temperature: float
    ) -> Tensor:
        """The KL from the normal with the teacher's mean and variance, without its constant."""
        mean, log_variance = self._split(output)
        square = (teacher.mean - mean).square() + teacher.std.square()
        return 0.5 * (square * torch.exp(-log_variance) + log_variance).mean()

    def locations(self, output: Tensor) -> Tensor:
        """The means."""
        return self._split(output)[0]

    def output_shape(self, mean: torch.Size) -> torch.Size:
        """As many log variances as means, along the last axis."""
        return torch.Size((*mean[:-1], 2 * mean[-1]))


class Values(Likelihood):
    """Outputs without a model of the noise of the targets, for prediction only.

    >>> import torch
    >>> Values().parts(torch.ones(8, 2, 1)).aleatoric.sum()
    tensor(0.)
    """

    def parts(self, draws: Tensor) -> Parts:
        """The draws, and no noise."""
        return Parts(draws, draws.new_zeros(()).expand_as(draws))

    def log_density(self, draws: Tensor, y: Tensor) -> Tensor:
        """Raises an error: there is no density."""
        raise VardropError(
            "Expected a likelihood with a density, but got Values(). "
            "Pass likelihood=vardrop.Gaussian(std) with the standard deviation of the targets."
        )

    def sample(self, output: Tensor) -> Tensor:
        """The output itself."""
        return output


def entropy(log_probs: Tensor, probs: Tensor, axis: int) -> Tensor:
    """-sum p log p along an axis, with 0 log 0 = 0.

    >>> import torch
    >>> probs = torch.tensor([0.5, 0.5, 0.0])
    >>> entropy(probs.log(), probs, 0)
    tensor(0.6931)
    """
    return -(probs * log_probs.clamp(min=torch.finfo(log_probs.dtype).min)).sum(axis)


def _two_sides(logits: Tensor) -> Tensor:
    """log p of a zero and of a one, on a new last axis."""
    return functional.logsigmoid(torch.stack([-logits, logits], -1))


def _kl_to_teacher(
    likelihood: Likelihood, log_probs: Tensor, teacher: TeacherOutput, temperature: float
) -> Tensor:
    assert teacher.log_probs is not None
    axis = likelihood.class_axis
    assert axis is not None
    target = likelihood.apply_temperature(teacher.log_probs, temperature)
    probs = target.exp()
    lowest = torch.finfo(target.dtype).min
    gap = probs * (target.clamp(min=lowest) - log_probs.clamp(min=lowest))
    return temperature**2 * _per_example(gap.sum(axis), 1).mean()


def _per_example(values: Tensor, leading: int) -> Tensor:
    """Sums over the axes after the first `leading` ones."""
    return values.flatten(leading).sum(leading) if values.dim() > leading else values


def _check_same_shape(name: str, y: Tensor, expected: torch.Size) -> None:
    check_tensor(name, y)
    if y.shape != expected:
        raise VardropError(
            f"Expected `{name}` to have the shape {tuple(expected)} of the prediction, but got "
            f"{tuple(y.shape)}: broadcasting would mix examples. Reshape the target."
        )


class Objective(Protocol):
    """A model with its likelihood, such as an ELBO."""

    net: nn.Module
    likelihood: Any


def check_model(net: object) -> None:
    """Raise an error unless a value is a module, and not a model with its likelihood.

    >>> import torch
    >>> check_model(torch.nn.Linear(2, 1))
    """
    check_net(net)
    if hasattr(net, "likelihood") and hasattr(net, "net"):
        raise VardropError(
            f"Expected `net` to be a model, but got {type(net).__name__}. Pass its `net`, or for "
            "the export of predictions with uncertainty vardrop.freeze of it."
        )


def resolve_likelihood(
    net: nn.Module | Objective, likelihood: Likelihood | None
) -> tuple[nn.Module, Likelihood]:
    """Return the model and the likelihood of an objective, or of a model and a likelihood.

    Args:
        net: an objective such as an ELBO, or a model.
        likelihood: overrides the likelihood of the objective. Without both it is Categorical().

    Returns:
        The model and the likelihood.

    >>> import torch
    >>> resolve_likelihood(torch.nn.Linear(2, 1), None)[1]
    Categorical()
    """
    model: Any = net
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        model = model.module
    meaning: Any = likelihood
    if hasattr(model, "likelihood") and hasattr(model, "net"):
        meaning = model.likelihood if meaning is None else meaning
        model = model.net
    if not isinstance(model, nn.Module):
        raise VardropError(
            f"Expected `net` to be a torch.nn.Module or an ELBO, but got {describe_value(net)}."
        )
    if meaning is None:
        meaning = Categorical()
    if not isinstance(meaning, Likelihood):
        raise VardropError(
            "Expected `likelihood` to be one of vardrop's, such as vardrop.Categorical(), but got "
            f"{describe_value(meaning)}. Pass likelihood= what the output means."
        )
    return model, meaning
