"""What noise costs training: the variance of the likelihood of a batch, and of its gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from vardrop._core.checks import check_integer, check_net
from vardrop._core.errors import VardropError
from vardrop.diagnostics.measuring import Estimate, Loader, drawing, outputs
from vardrop.estimators import Estimator
from vardrop.noisy import sampling

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class LikelihoodCovariance:
    """Var of num_data * (mean loss of a batch), split by how it depends on the batch size.

    Var = num_data^2 (Var[L_i] / M + (M - 1) / M Cov[L_i, L_j])
        = falling + constant,   falling = num_data^2 (Var - Cov) / M,  constant = num_data^2 Cov
    """

    variance: Estimate  # Var[L_i] of one example, over data and noise
    covariance: Estimate  # Cov[L_i, L_j] of two examples of one batch
    batch_size: int
    num_data: int

    @property
    def falling(self) -> float:
        """The part that a larger batch reduces."""
        difference = self.variance.value - self.covariance.value
        return self.num_data**2 * difference / self.batch_size

    @property
    def constant(self) -> float:
        """The part that stays, whatever the batch."""
        return self.num_data**2 * self.covariance.value


def example_cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of every example, (N, C, ...) and (N, ...) to (N,): summed over positions."""
    loss = functional.cross_entropy(output, target, reduction="none")
    return loss.flatten(1).sum(1) if loss.dim() > 1 else loss


def mean_cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """The mean over examples of their cross-entropy."""
    return example_cross_entropy(output, target).mean()


@torch.no_grad()
def likelihood_covariance(
    net: nn.Module,
    loader: Loader,
    loss: Loss = example_cross_entropy,
    estimator: Estimator | None = None,
    num_data: int = 1,
    repeats: int = 1,
) -> LikelihoodCovariance:
    """Split the variance of the likelihood into what falls with the batch size and what does not.

    One-way analysis of variance with the batches (one noise draw each) as groups: the variance of
    the batch means and the variance inside batches give Cov[L_i, L_j] and Var[L_i], unbiased; the
    standard errors are jackknifed over batches.

    Args:
        net: a net with noisy modules.
        loader: shuffled batches (x, y) of one size M >= 2; at least three.
        loss: (output, target) -> one loss per example, (M,).
        estimator: how the layers draw; None leaves each layer its own.
        num_data: scale of the loss.
        repeats: passes over the loader.

    >>> import torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Linear(3, 2), vd.bayes_by_backprop())
    >>> data = [(torch.randn(5, 3), torch.tensor([0, 1, 0, 1, 0])) for _ in range(6)]
    >>> likelihood_covariance(net, data).batch_size
    5

    Kingma, Salimans & Welling 2015, eq. 4 and 5.
    """
    check_net(net)
    check_integer("num_data", num_data)
    means, within, size = [], [], 0
    with drawing(net, estimator), sampling(net):
        for output, y in outputs(net, loader, repeats):
            losses = loss(output, y).double()
            size = len(y)
            if losses.shape != (size,) or size < 2:
                raise VardropError(
                    f"Expected `loss` to give one value for each of two or more examples, but got "
                    f"shape {tuple(losses.shape)} for {size}. Use reduction='none'."
                )
            means.append(losses.mean())
            within.append(losses.var())
    if len(means) < 3:
        raise VardropError(f"Expected `loader` to yield at least 3 batches, but got {len(means)}.")
    covariance, variance = _components(torch.stack(means), torch.stack(within), size)
    return LikelihoodCovariance(variance, covariance, size, num_data)


def _components(means: Tensor, within: Tensor, size: int) -> tuple[Estimate, Estimate]:
    def both(means: Tensor, within: Tensor) -> Tensor:
        covariance = means.var() - within.mean() / size
        return torch.stack([covariance, covariance + within.mean()])

    count = len(means)
    kept = [torch.arange(count) != i for i in range(count)]
    left_out = torch.stack([both(means[k], within[k]) for k in kept])
    error = (left_out.var(0) * (count - 1) ** 2 / count).sqrt()
    value = both(means, within)
    covariance, variance = (
        Estimate(v, e, count) for v, e in zip(value.tolist(), error.tolist(), strict=True)
    )
    return covariance, variance


def gradient_variance(
    net: nn.Module,
    loader: Loader,
    loss: Loss = mean_cross_entropy,
    estimator: Estimator | None = None,
    noise: bool = True,
    num_data: int = 1,
    repeats: int = 1,
) -> dict[str, Estimate]:
    """Variance of the stochastic gradient, averaged over the elements of each parameter.

        V = E 1/(2J) ||g - g'||^2,   g, g' gradients of num_data * mean loss of two mini-batches

    Every pair of consecutive batches, each with noise of its own, gives one independent value;
    their mean is unbiased and their spread gives the interval. Two gradients are held at a time.

    Args:
        net: a net with noisy modules; its mode, gradients and buffers stay as they are.
        loader: shuffled batches (x, y) of one size; needs four batches in all.
        loss: mean loss of an example of a batch, (output, target) -> scalar.
        estimator: how the layers draw; None leaves each layer its own.
        noise: False measures the variance of the data alone.
        num_data: scale of the loss; the training-set size gives the scale of the paper.
        repeats: passes over the loader.

    >>> import torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Linear(3, 2), vd.bayes_by_backprop())
    >>> data = [(torch.randn(5, 3), torch.tensor([0, 1, 0, 1, 0])) for _ in range(6)]
    >>> gradient_variance(net, data, estimator=vd.flipout)["weight"].repetitions
    3

    Kingma, Salimans & Welling 2015, table 1.
    """
    check_net(net)
    check_integer("num_data", num_data)
    parameters = {name: p for name, p in net.named_parameters() if p.requires_grad}
    squares: dict[str, list[float]] = {name: [] for name in parameters}
    previous: tuple[Tensor, ...] | None = None
    with drawing(net, estimator), sampling(net, on=noise), torch.enable_grad():
        for output, y in outputs(net, loader, repeats):
            gradients = torch.autograd.grad(
                num_data * loss(output, y),
                list(parameters.values()),
                allow_unused=True,
                materialize_grads=True,
            )
            if previous is None:
                previous = gradients
                continue
            for name, g, other in zip(parameters, gradients, previous, strict=True):
                squares[name].append(0.5 * (g - other).square().mean().item())
            previous = None
    return {name: _estimate(values) for name, values in squares.items()}


def _estimate(values: list[float]) -> Estimate:
    if len(values) < 2:
        raise VardropError(
            f"Expected `loader` to yield at least 4 batches, but got {len(values)} pairs of them. "
            "Use smaller batches, or more repeats."
        )
    sample = torch.tensor(values, dtype=torch.float64)
    return Estimate(sample.mean().item(), (sample.std() / len(sample) ** 0.5).item(), len(sample))
