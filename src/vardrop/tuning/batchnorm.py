"""Measure the running statistics of BatchNorm again."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
from torch import nn

from vardrop._core.checks import check_net, check_type
from vardrop._core.errors import VardropError, report_arguments
from vardrop.noisy import named_modules_of


@torch.no_grad()
def reestimate_batchnorm(net: nn.Module, data: Iterable[object]) -> nn.Module:
    """Measure the mean and variance of every BatchNorm again, averaged over batches, in place.

    Removing weights changes the inputs of BatchNorm. Modes and momenta are left unchanged. If a
    batch fails, the statistics are unchanged too.

    Args:
        net: a plain model.
        data: batches of inputs, or of (input, target), whose targets are ignored.

    Returns:
        The model.

    >>> import torch
    >>> net = torch.nn.BatchNorm1d(1)
    >>> _ = reestimate_batchnorm(net, [torch.tensor([[0.0], [2.0]])])
    >>> net.running_mean, net.running_var
    (tensor([1.]), tensor([2.]))
    """
    check_net(net)
    check_type("data", data, Iterable, "batches of inputs")
    twin = copy.deepcopy(net).eval()
    modules = named_modules_of(twin, nn.modules.batchnorm._BatchNorm)
    norms = {name: norm for name, norm in modules.items() if norm.track_running_stats}
    if not norms:
        raise VardropError(
            "Expected `net` to have BatchNorm with running statistics, but got none."
        )
    for norm in norms.values():
        norm.reset_running_stats()
        norm.momentum = None  # a plain average
        norm.train()
    batch = None
    with report_arguments("data"):
        for batch in data:
            twin(batch[0] if isinstance(batch, list | tuple) else batch)
    if batch is None:
        raise VardropError("Expected `data` to give batches of inputs, but got none.")
    for name, norm in norms.items():
        if not all(bool(b.isfinite().all()) for b in norm.buffers()):
            raise VardropError(
                f"Expected finite inputs to '{name}', but got NaN or infinity. "
                "The statistics are unchanged."
            )
    for name, norm in norms.items():
        for key, measured in norm.named_buffers(recurse=False):
            net.get_submodule(name).get_buffer(key).copy_(measured)
    return net
