"""Variance of the stochastic gradient: what an estimator costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from vardrop.diagnostics.estimate import Estimate
from vardrop.diagnostics.passes import Loader, drawing, outputs
from vardrop.errors import VardropError
from vardrop.estimators import Estimator
from vardrop.noisy import sampling

Loss = Callable[[Tensor, Tensor], Tensor]


def gradient_variance(
    net: nn.Module,
    loader: Loader,
    loss: Loss = functional.cross_entropy,
    estimator: Estimator | None = None,
    noise: bool = True,
    num_data: int = 1,
    repeats: int = 1,
    parts: int = 1,
) -> dict[str, Estimate]:
    """Variance of the stochastic gradient, averaged over the elements of each parameter.

        V = E 1/(2J) ||g - g'||^2,   g, g' gradients of num_data * mean loss of two mini-batches

    Every pair of consecutive batches, each with noise of its own, gives one independent value;
    their mean is unbiased and their spread gives the interval. Two gradients are held at a time.

    Args:
        net: a net with noisy modules; its mode, gradients and buffers stay as they are.
        loader: shuffled batches (x, y) of one size; needs four batches in all.
        loss: mean loss of a batch, (output, target) -> scalar.
        estimator: how the layers draw; None leaves each layer its own.
        noise: False measures the variance of the data alone.
        num_data: scale of the loss; the training-set size gives the scale of the paper.
        repeats: passes over the loader.
        parts: takes each batch in so many equal passes and averages their gradients, for batches
            that do not fit into memory. Noise is drawn anew for each part, so this is for
            estimators whose noise differs by example.

    >>> import torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Linear(3, 2), vd.bayes_by_backprop())
    >>> data = [(torch.randn(5, 3), torch.tensor([0, 1, 0, 1, 0])) for _ in range(6)]
    >>> gradient_variance(net, data, estimator=vd.flipout)["weight"].repetitions
    3

    Kingma, Salimans & Welling 2015, table 1.
    """
    names = [name for name, p in net.named_parameters() if p.requires_grad]
    squares: dict[str, list[float]] = {name: [] for name in names}
    previous: list[Tensor] | None = None
    with drawing(net, estimator), sampling(net, on=noise), torch.enable_grad():
        for gradients in _gradients(net, outputs(net, loader, repeats, parts), loss, parts):
            if previous is None:
                previous = gradients
                continue
            for name, g, other in zip(names, gradients, previous, strict=True):
                squares[name].append(0.5 * num_data**2 * (g - other).square().mean().item())
            previous = None
    return {name: _estimate(values) for name, values in squares.items()}


def _gradients(
    net: nn.Module, passes: Iterable[tuple[Tensor, Tensor]], loss: Loss, parts: int
) -> Iterator[list[Tensor]]:
    """The gradient of each batch: the mean over its parts."""
    parameters = [p for p in net.parameters() if p.requires_grad]
    total = [torch.zeros_like(p) for p in parameters]
    for done, (output, y) in enumerate(passes, 1):
        found = torch.autograd.grad(
            loss(output, y) / parts, parameters, allow_unused=True, materialize_grads=True
        )
        torch._foreach_add_(total, list(found))
        if done % parts == 0:
            yield total
            total = [torch.zeros_like(p) for p in parameters]


def _estimate(values: list[float]) -> Estimate:
    if len(values) < 2:
        raise VardropError(
            f"Expected `loader` to yield at least 4 batches, but got {len(values)} pairs of them. "
            "Use smaller batches, or more repeats."
        )
    sample = torch.tensor(values, dtype=torch.float64)
    return Estimate(sample.mean().item(), (sample.std() / len(sample) ** 0.5).item(), len(sample))
