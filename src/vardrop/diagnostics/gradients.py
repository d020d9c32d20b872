"""Variance of the stochastic gradient: what an estimator costs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from vardrop.checks import check_integer, check_net
from vardrop.diagnostics.likelihood import mean_cross_entropy
from vardrop.diagnostics.measuring import Estimate, Loader, drawing, outputs
from vardrop.errors import VardropError
from vardrop.estimators import Estimator
from vardrop.noisy import sampling

Loss = Callable[[Tensor, Tensor], Tensor]


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
