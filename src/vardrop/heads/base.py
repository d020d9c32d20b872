"""The head: a linear layer on features whose rule turns logits into class probabilities."""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from vardrop._core.checks import check_integer, check_type
from vardrop._core.errors import VardropError
from vardrop._core.values import Value
from vardrop.functional import to_float32_or_wider
from vardrop.likelihoods.base import sum_targets
from vardrop.noisy import Noisy

Branches = Mapping[str, Tensor]
_TAP = threading.local()  # `head`, `labels` and `runs`, while this thread computes a loss


class HeadParts(NamedTuple):
    """loss = nll + kl + aux - entropy, per example.

    Each is the mean over examples (axis 0) of a sum over positions, and over classes.

    Args:
        loss: the sum.
        nll: the negative log-likelihood.
        kl: the KL of the masks.
        aux: the loss of the auxiliary branch.
        entropy: of the rates.
    """

    loss: Tensor
    nll: Tensor
    kl: Tensor
    aux: Tensor
    entropy: Tensor


@dataclass(frozen=True)
class ClassRule(Value, ABC):
    """How a head turns class logits into probabilities: a value with pure functions.

    `logits` are the outputs of the linear layer, (..., classes). `branches` holds the outputs, of
    the same shape, of the further linear maps that the rule names. With a branch `retain`, class k
    is retained with probability sigmoid(retain_k).
    """

    branches: ClassVar[tuple[str, ...]] = ()
    linear: ClassVar[bool] = False  # the probabilities are the softmax of the logits

    def log_probs(self, logits: Tensor, branches: Branches) -> Tensor:
        """Class log-probabilities without noise: log softmax(o), or log softmax(o + log rho).

        Args:
            logits: of the linear layer, (..., classes).
            branches: the outputs of the other linear maps by name.

        Returns:
            The log-probabilities, (..., classes).
        """
        if "retain" in branches:
            logits = logits + functional.logsigmoid(branches["retain"])
        return torch.log_softmax(logits, dim=-1)

    def draw(self, logits: Tensor, branches: Branches) -> Tensor:
        """Class log-probabilities under one draw of the noise, without labels.

        Args:
            logits: of the linear layer, (..., classes).
            branches: the outputs of the other linear maps by name.

        Returns:
            The log-probabilities, (..., classes).
        """
        return self.log_probs(logits, branches)

    @abstractmethod
    def loss(self, logits: Tensor, branches: Branches, y: Tensor) -> HeadParts:
        """The training objective under one draw of the noise.

        Args:
            logits: of the linear layer, (..., classes).
            branches: the outputs of the other linear maps by name.
            y: the labels, (...).

        Returns:
            The objective and its parts.
        """

    def retain_probability(self, logits: Tensor, branches: Branches) -> Tensor:
        """The probability that each class is retained, in the shape of the logits.

        Args:
            logits: of the linear layer, (..., classes).
            branches: the outputs of the other linear maps by name.

        Returns:
            The probabilities.
        """
        if "retain" in branches:
            return torch.sigmoid(branches["retain"])
        return torch.ones_like(logits)


class Head(Noisy, nn.Linear):
    """A classifier on features: `weight` and `bias` give the logits, the rule the probabilities.

    `head(h)` returns class log-probabilities in one pass, and `head(h, samples=S)` their
    Monte-Carlo average over draws. `head.loss(h, y)` is the objective of the rule with its parts.
    `head.retain_probability(h)` is the probability that each class is retained.

    Args:
        in_features: width of the features.
        num_classes: at least two.
        rule: how logits become probabilities, such as `vardrop.heads.DropMaxRule()`.
        bias: whether the linear maps have one.

    >>> import torch, vardrop as vd
    >>> head = vd.Head(5, 3, vd.heads.DropMaxRule())
    >>> head.loss(torch.randn(4, 5), torch.tensor([0, 1, 2, 0]))._fields
    ('loss', 'nll', 'kl', 'aux', 'entropy')
    >>> head.eval()(torch.randn(4, 5)).shape
    torch.Size([4, 3])
    """

    rule: ClassRule

    def __init__(
        self, in_features: int, num_classes: int, rule: ClassRule, bias: bool = True
    ) -> None:
        check_integer("in_features", in_features)
        check_integer("num_classes", num_classes)
        check_type("bias", bias, bool, "True or False")
        nn.Linear.__init__(self, in_features, num_classes, bias)
        self.make_head(rule)

    def make_head(self, rule: ClassRule) -> None:
        """Register the rule and its branches on a plain linear layer.

        Args:
            rule: how logits become probabilities.
        """
        check_type("rule", rule, ClassRule, "a rule such as vardrop.heads.DropMaxRule()")
        if self.out_features < 2:
            raise VardropError(
                f"Expected at least 2 classes, but got {self.out_features}. "
                "Use a Bernoulli likelihood for one logit."
            )
        self.rule = rule
        for name in rule.branches:
            branch = nn.Linear(self.in_features, self.out_features, self.bias is not None)
            self.add_module(name, branch.to(self.weight).train(self.training))

    def reset_parameters(self) -> None:
        """Reset the logits and the branches of the rule."""
        super().reset_parameters()
        if "rule" in vars(self):  # torch's own constructor calls this first
            for name in self.rule.branches:
                getattr(self, name).reset_parameters()

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return self.out_features

    def _maps(self, h: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        if h.shape[-1] != self.in_features:
            raise VardropError(
                f"Expected the last axis of the features to be {self.in_features}, "
                f"but got shape {tuple(h.shape)}."
            )
        logits = to_float32_or_wider(functional.linear(h, self.weight, self.bias))
        return logits, {
            name: to_float32_or_wider(getattr(self, name)(h)) for name in self.rule.branches
        }

    def forward(self, h: Tensor, samples: int | None = None) -> Tensor:
        """Class log-probabilities: one pass, one draw while sampling, or a mean over `samples`."""
        if getattr(_TAP, "head", None) is self:
            _TAP.runs += 1
            return self.loss(h, _TAP.labels)  # type: ignore[return-value]
        maps = self._maps(h)
        if samples is None:
            return self.rule.draw(*maps) if self.is_sampling else self.rule.log_probs(*maps)
        check_integer("samples", samples)
        draws = torch.stack([self.rule.draw(*maps) for _ in range(samples)])
        return torch.logsumexp(draws, dim=0) - math.log(samples)

    def loss(self, h: Tensor, y: Tensor) -> HeadParts:
        """The objective and its parts for features h (..., in_features) and labels y (...).

        Args:
            h: the features, (..., in_features).
            y: the labels, (...).

        Returns:
            The objective and its parts.
        """
        maps = self._maps(h)
        if y.shape != h.shape[:-1] or y.is_floating_point():
            raise VardropError(
                f"Expected `y` to hold class indices of shape {tuple(h.shape[:-1])}, but got "
                f"{y.dtype} of shape {tuple(y.shape)}."
            )
        # Otherwise a check of values would break the graph, or wait for a device.
        if not torch.compiler.is_compiling() and y.numel() and y.is_cpu:
            low, high = int(y.min()), int(y.max())
            if low < 0 or high >= self.num_classes:
                raise VardropError(
                    f"Expected `y` to be in 0..{self.num_classes - 1}, but got {low}..{high}. "
                    "Count classes from 0."
                )
        return self.rule.loss(*maps, y)

    def retain_probability(self, h: Tensor) -> Tensor:
        """The probability that each class is retained for features h, (..., num_classes).

        Args:
            h: the features, (..., in_features).

        Returns:
            The probabilities, (..., num_classes).
        """
        return self.rule.retain_probability(*self._maps(h))

    def loss_in(self, net: nn.Module, x: Any, y: Tensor) -> HeadParts:
        """`loss` at the features that the head receives in `net(x)`. It must be the last module.

        It is computed in the forward pass of the head, when a sharded model has its tensors
        together. Other threads still get log-probabilities from the same head.

        Args:
            net: the model.
            x: its input.
            y: the labels.

        Returns:
            The objective and its parts.
        """
        _TAP.head, _TAP.labels, _TAP.runs = self, y, 0
        try:
            output: Any = net(x)
        except (TypeError, AttributeError) as error:
            if not _TAP.runs:
                raise
            output = error
        finally:
            runs, _TAP.head, _TAP.labels = _TAP.runs, None, None
        if runs != 1 or not isinstance(output, HeadParts):
            raise VardropError(
                "Expected the head to be the last module of the model and to run once, but got "
                f"{runs} runs and another output. Remove the modules after the head: it "
                "returns log-probabilities."
            )
        return output

    def noise_names(self) -> Iterable[str]:
        """The tensors of the branches."""
        return [name for name in self.state_dict() if name.partition(".")[0] in self.rule.branches]

    def extra_repr(self) -> str:
        return f"{nn.Linear.extra_repr(self)}, rule={self.rule!r}"


def is_target(y: Tensor, logits: Tensor) -> Tensor:
    """True at the class of each label, in the shape of the logits."""
    return torch.arange(logits.shape[-1], device=y.device) == y.unsqueeze(-1)


def mean_nll(log_probs: Tensor, y: Tensor) -> Tensor:
    """Mean over examples of -log_probs[y], summed over positions."""
    return sum_targets(-log_probs.gather(-1, y.unsqueeze(-1)).squeeze(-1), 1).mean()


def only_nll(nll: Tensor) -> HeadParts:
    """The parts of a rule whose loss is only a likelihood."""
    zero = torch.zeros_like(nll)
    return HeadParts(nll, nll, zero, zero, zero)
