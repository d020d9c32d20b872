"""After compression: train what is left, and measure BatchNorm's statistics again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from vardrop.checks import check_integer, check_net, check_type
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
        data: batches (inputs, targets), read once per epoch.
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
    _check_tuning(net, data, optimizer, epochs)
    weights = [p for p in net.parameters() if p.dim() > 1 and p.requires_grad]
    with hooks(*(_keep_zeros(p) for p in weights)):
        for epoch in range(epochs):
            batches = 0
            for x, y in data:
                optimizer.zero_grad(set_to_none=True)
                value = loss(net(*as_inputs(x)), y)
                if not bool(value.isfinite()):
                    raise VardropError(
                        f"Expected a finite loss, but got {value.item()} in batch {batches} of "
                        f"epoch {epoch}. The net is as it was before that batch."
                    )
                value.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                batches += 1
            if batches == 0:
                raise VardropError(
                    f"Expected `data` to give batches in every epoch, but got none in epoch "
                    f"{epoch}. Give a list or a loader, not an iterator."
                )
    return net


def _check_tuning(net: Any, data: Any, optimizer: torch.optim.Optimizer, epochs: Any) -> None:
    check_net(net)
    check_type("data", data, Iterable, "batches of (inputs, targets)")
    check_type("optimizer", optimizer, torch.optim.Optimizer, "an optimizer")
    check_integer("epochs", epochs)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not held & {id(p) for p in net.parameters()}:
        raise VardropError(
            "Expected `optimizer` to hold parameters of `net`, but got none of them. "
            "Build it over net.parameters() after shrinking."
        )


@torch.no_grad()
def reestimate_batchnorm(net: nn.Module, data: Iterable[Any]) -> nn.Module:
    """Measure the mean and variance of every BatchNorm again, averaged over batches, in place.

    Weights that went changed the statistics that BatchNorm remembers. Modes and momenta are left
    as they were; where a batch fails, so are the statistics.

    Args:
        net: a plain net.
        data: batches of inputs (or of (input, target), whose targets are not looked at).

    >>> import torch
    >>> net = torch.nn.BatchNorm1d(1)
    >>> _ = reestimate_batchnorm(net, [torch.tensor([[0.0], [2.0]])])
    >>> net.running_mean, net.running_var
    (tensor([1.]), tensor([2.]))
    """
    check_net(net)
    check_type("data", data, Iterable, "batches of inputs")
    norms = {
        name: m
        for name, m in net.named_modules()
        if isinstance(m, _NORMS) and m.track_running_stats
    }
    if not norms:
        raise VardropError(
            "Expected `net` to have BatchNorm with running statistics, but got none."
        )
    with _measuring(net, norms):
        batches = 0
        for batch in data:
            net(batch[0] if isinstance(batch, list | tuple) else batch)
            batches += 1
        if batches == 0:
            raise VardropError("Expected `data` to give batches of inputs, but got none.")
        for name, norm in norms.items():
            if not all(bool(b.isfinite().all()) for b in norm.buffers()):
                raise VardropError(
                    f"Expected finite inputs to '{name}', but got NaN or infinity. "
                    "The statistics are as they were."
                )
    return net


@contextmanager
def _measuring(net: nn.Module, norms: dict[str, Any]) -> Iterator[None]:
    """BatchNorm starts anew with a plain average; all is as it was where that fails."""
    modes = {m: m.training for m in net.modules()}
    momenta = {m: m.momentum for m in norms.values()}
    before = {m: copy.deepcopy(dict(m.named_buffers())) for m in norms.values()}
    try:
        net.eval()
        for norm in norms.values():
            norm.reset_running_stats()
            norm.momentum = None
            norm.train()
        yield
    except BaseException:
        for norm, buffers in before.items():
            for key, value in buffers.items():
                norm.get_buffer(key).copy_(value)
        raise
    finally:
        for norm, momentum in momenta.items():
            norm.momentum = momentum
        for module, training in modes.items():
            module.training = training
