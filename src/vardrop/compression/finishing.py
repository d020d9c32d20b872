"""After compression: train what is left, and measure BatchNorm's statistics again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from vardrop.compression.flow import as_inputs, hooks
from vardrop.errors import VardropError

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def _keep_zeros(parameter: nn.Parameter) -> Any:
    kept = parameter.detach() != 0
    return parameter.register_hook(lambda gradient: gradient * kept)


def fine_tune(
    net: nn.Module,
    data: Iterable[tuple[Any, Tensor]],
    loss: Callable[[Any, Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
    epochs: int = 1,
) -> nn.Module:
    """Train the weights that are left, in place; weights at zero stay at zero.

    Args:
        net: a plain net, such as the result of `shrink`; BatchNorm keeps its statistics.
        data: batches (inputs, targets), read once an epoch.
        loss: `loss(output, target)`, such as `torch.nn.functional.cross_entropy`.
        optimizer: over the parameters of `net`, without momentum from before.
        epochs: how many times to go through the data.

    >>> import torch
    >>> net = torch.nn.Linear(2, 1)
    >>> _ = net.weight.data[0, 0].zero_()
    >>> data = [(torch.ones(4, 2), torch.zeros(4, 1))]
    >>> net = fine_tune(net, data, torch.nn.functional.mse_loss, torch.optim.Adam(net.parameters()))
    >>> net.weight[0, 0].item()
    0.0
    """
    if epochs < 1:
        raise VardropError(f"Expected `epochs` to be at least 1, but got {epochs}.")
    weights = [p for p in net.parameters() if p.dim() > 1 and p.requires_grad]
    with hooks(*(_keep_zeros(p) for p in weights)):
        for _ in range(epochs):
            for x, y in data:
                optimizer.zero_grad(set_to_none=True)
                loss(net(*as_inputs(x)), y).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
    return net


@torch.no_grad()
def reestimate_batchnorm(net: nn.Module, data: Iterable[Any]) -> nn.Module:
    """Measure the mean and variance of every BatchNorm again, averaged over batches, in place.

    Weights that went changed the statistics that BatchNorm remembers. Modes and momenta are left
    as they were.

    Args:
        net: a plain net.
        data: batches of inputs (or of (input, target), whose targets are not looked at).

    >>> import torch
    >>> net = torch.nn.BatchNorm1d(1)
    >>> _ = reestimate_batchnorm(net, [torch.tensor([[0.0], [2.0]])])
    >>> net.running_mean, net.running_var
    (tensor([1.]), tensor([2.]))
    """
    norms = [m for m in net.modules() if isinstance(m, _NORMS) and m.track_running_stats]
    if not norms:
        raise VardropError(
            "Expected `net` to have BatchNorm with running statistics, but got none."
        )
    modes = {m: m.training for m in net.modules()}
    momenta = [m.momentum for m in norms]
    try:
        net.eval()
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # a plain average over the batches
            norm.train()
        for batch in data:
            net(batch[0] if isinstance(batch, list | tuple) else batch)
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        for module, training in modes.items():
            module.training = training
    return net
