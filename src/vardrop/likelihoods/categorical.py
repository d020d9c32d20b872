"""Likelihoods of classes and of binary targets."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from vardrop._core.checks import check_number, check_shape, check_tensor, check_type, describe_value
from vardrop._core.errors import VardropError
from vardrop.functional import generator
from vardrop.likelihoods.base import Likelihood, Parts, TeacherOutput, sum_targets


class _OfClasses(Likelihood):
    """A likelihood whose logits are output / `temperature`."""

    class_axis: int
    defaults: ClassVar[dict[str, Any]] = {"temperature": 1.0}
    scale_argument: ClassVar[str] = "temperature"

    def __init__(self, temperature: float = 1.0) -> None:
        super().__init__()
        check_number("temperature", temperature, above=0)
        self.temperature = temperature

    def _logits(self, output: Tensor) -> Tensor:
        return output if self.temperature == 1 else output / self.temperature

    def _log_probs(self, logits: Tensor) -> Tensor:
        """The log-probability of every outcome, along the class axis."""
        return functional.log_softmax(logits, self.class_axis)

    def distillation_loss(
        self, output: Tensor, teacher: TeacherOutput, temperature: float
    ) -> Tensor:
        """T^2 KL(p_T || q_T), the distributions of teacher and output at temperature T."""
        assert teacher.log_probs is not None
        target = self.apply_temperature(teacher.log_probs, temperature)
        log_probs, lowest = self._log_probs(output / temperature), torch.finfo(target.dtype).min
        gap = target.exp() * (target.clamp(min=lowest) - log_probs.clamp(min=lowest))
        return temperature**2 * sum_targets(gap.sum(self.class_axis), 1).mean()


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

    defaults: ClassVar[dict[str, Any]] = {"temperature": 1.0, "class_axis": 1, "ignore_index": -100}

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
        logits = self._logits(output)
        if logits.dim() <= 2:
            return functional.cross_entropy(logits, target, ignore_index=self.ignore_index)
        if self.class_axis == -1:  # one long sequence avoids a copy with classes in the middle
            soft = target.is_floating_point()
            logits, target = logits.flatten(0, -2), target.flatten(0, -2 if soft else -1)
        total = functional.cross_entropy(
            logits, target, ignore_index=self.ignore_index, reduction="sum"
        )
        return total / len(output)

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
        check_shape("mask", mask, y.shape, "y")
        targets = y.masked_fill(mask == 0, self.ignore_index)
        self.check_valid(targets)
        return targets

    def check_valid(self, y: Tensor) -> None:
        """Raise an error for an example without a target that counts.

        Args:
            y: the targets.
        """
        empty = ~sum_targets(self.valid_mask(y), 1).bool()
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
            raise VardropError(
                f"Expected `y` to be classes from 0 to {classes - 1}, but got "
                f"{low if low < 0 else high}. The output of the model has no such class."
            )
        self.check_valid(y)

    def sample(self, output: Tensor) -> Tensor:
        """Classes, from softmax(output / T)."""
        probs = self._logits(output).softmax(self.class_axis).movedim(self.class_axis, -1)
        source = generator(output.device)
        classes = torch.multinomial(probs.flatten(0, -2), 1, generator=source)
        return classes.view(probs.shape[:-1])


class Bernoulli(_OfClasses):
    """-log p(target) for independent binary targets with logits output / `temperature`.

    Args:
        temperature: the divisor of the logits.

    >>> import torch
    >>> Bernoulli()(torch.zeros(2), torch.tensor([0.0, 1.0]))
    tensor(0.6931)
    """

    class_axis: int = -1  # of log-probabilities (N, ..., 2) of a zero and a one

    def _log_probs(self, logits: Tensor) -> Tensor:
        return functional.logsigmoid(torch.stack([-logits, logits], -1))

    def parts(self, draws: Tensor) -> Parts:
        """Log-probabilities of zero and one, the probability of one, and the entropy."""
        logits = self._logits(draws)
        log_probs, probs = self._log_probs(logits), logits.sigmoid()
        return Parts(draws, entropy(log_probs, log_probs.exp(), -1), log_probs, probs)

    def log_density(self, draws: Tensor, y: Tensor) -> Tensor:
        """log sigmoid(draw / T) of a one, log sigmoid(-draw / T) of a zero."""
        check_shape("target", y, draws.shape[1:], "output")
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


def entropy(log_probs: Tensor, probs: Tensor, axis: int) -> Tensor:
    """-sum p log p along an axis, with 0 log 0 = 0.

    >>> import torch
    >>> probs = torch.tensor([0.5, 0.5, 0.0])
    >>> entropy(probs.log(), probs, 0)
    tensor(0.6931)
    """
    return -(probs * log_probs.clamp(min=torch.finfo(log_probs.dtype).min)).sum(axis)
