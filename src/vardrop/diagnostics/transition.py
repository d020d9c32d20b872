"""How far a net is on the way from a dropout net to a variance net."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from vardrop._core.calls import call, untouched
from vardrop._core.checks import check_integer
from vardrop._core.errors import VardropError
from vardrop.diagnostics.alpha import spread_log_alpha
from vardrop.diagnostics.measuring import Loader, batches
from vardrop.noisy import evaluating, sampling


@dataclass(frozen=True)
class Accuracies:
    """Fractions of right answers of one classifier, predicted in three ways."""

    deterministic: float  # the mean weights
    sample: float  # one draw, averaged over the draws
    ensemble: float  # the average of the draws' probabilities


@dataclass(frozen=True)
class Transition:
    """Fractions of the weights by alpha, and accuracies that tell whether means still matter."""

    below_one: float  # alpha < 1: the mean dominates
    between: float  # 1 <= alpha < exp(3)
    above: float  # alpha >= exp(3): the noise dominates
    accuracies: Accuracies

    def __str__(self) -> str:
        a = self.accuracies
        return (
            f"alpha < 1: {self.below_one:.1%}, 1..e^3: {self.between:.1%}, "
            f">= e^3: {self.above:.1%} | accuracy det {a.deterministic:.2%}, "
            f"sample {a.sample:.2%}, ensemble {a.ensemble:.2%}"
        )


@torch.no_grad()
def accuracies(net: nn.Module, loader: Loader, samples: int = 20) -> Accuracies:
    """Accuracy of a noisy classifier by its mean weights, by one draw, and by an ensemble.

        ensemble: argmax of 1/S sum_s softmax(net(x; w_s)),  w_s ~ q

    BatchNorm uses its running statistics throughout.

    Args:
        net: a net with noisy modules; output (N, C).
        loader: batches (x, y) with class indices y.
        samples: draws S.

    >>> import torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Linear(2, 2), vd.variance_layer())
    >>> x, y = torch.eye(2), torch.tensor([0, 1])
    >>> accuracies(net, [(x, y)], samples=3).sample <= 1
    True
    """
    check_integer("samples", samples)
    right, count = torch.zeros(3, dtype=torch.float64), 0
    with evaluating(net):
        for x, y in batches(loader):
            with sampling(net, on=False):
                mean = call(net, untouched(x))
            if y.shape != mean.shape[:-1]:
                raise VardropError(
                    f"Expected class indices of shape {tuple(mean.shape[:-1])} in `loader`, but "
                    f"got {tuple(y.shape)}: broadcasting would mix examples. Reshape them."
                )
            with sampling(net):
                draws = torch.stack([call(net, untouched(x)).softmax(-1) for _ in range(samples)])
            right[0] += (mean.argmax(-1) == y).sum()
            right[1] += (draws.argmax(-1) == y).sum() / samples
            right[2] += (draws.mean(0).argmax(-1) == y).sum()
            count += len(y)
    if count == 0:
        raise VardropError("Expected `loader` to yield batches, but got none.")
    return Accuracies(*(right / count).tolist())


def transition(net: nn.Module, loader: Loader, samples: int = 20) -> Transition:
    """The state of a net between dropout and variance net; call it after every epoch to log it.

    A variance net has large alphas, a deterministic accuracy at chance and a good ensemble; a
    sparse net has large alphas too, but keeps its deterministic accuracy.

    >>> import torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Linear(2, 2), vd.variational_dropout(per="layer"))
    >>> transition(net, [(torch.eye(2), torch.tensor([0, 1]))], samples=2).between
    1.0

    Neklyudov, Molchanov, Ashukha & Vetrov 2019, "Variance networks", sec. 5.
    """
    found = spread_log_alpha(net)
    flat = torch.cat([la.flatten().double() for la in found.values()])
    below, above = (flat < 0).double().mean().item(), (flat >= 3).double().mean().item()
    return Transition(below, 1 - below - above, above, accuracies(net, loader, samples))
