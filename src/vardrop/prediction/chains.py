"""Chains: nets of modules in a row that treat every row of a batch alone.

In such a net the draws can be laid side by side as further rows behind the first noisy layer, which
spares the cost of vmap.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from vardrop.layers import Variational

_ROW_BY_ROW = {
    nn.ReLU, nn.LeakyReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.ELU, nn.Softplus, nn.Softmax,
    nn.Identity, nn.Flatten, nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.BatchNorm1d,
    nn.BatchNorm2d, nn.BatchNorm3d, nn.LayerNorm, nn.GroupNorm, nn.MaxPool1d, nn.MaxPool2d,
    nn.AvgPool1d, nn.AvgPool2d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.Dropout,
}  # fmt: skip


class Chain(NamedTuple):
    """The modules before the first noisy layer, that layer, and those behind it."""

    before: list[nn.Module]
    first: Variational
    behind: list[nn.Module]


def chain(net: nn.Module, local: type) -> Chain | None:
    """The net as a chain whose noisy layers all draw by the estimator `local`, or None."""
    modules = _links(net)
    start = next((i for i, m in enumerate(modules) if isinstance(m, Variational)), None)
    if start is None or any(m._forward_hooks or m._forward_pre_hooks for m in net.modules()):
        return None
    first = modules[start]
    assert isinstance(first, Variational)
    if not all(_row_by_row(m, local) for m in modules[start:]) or first in modules[start + 1 :]:
        return None
    return Chain(modules[:start], first, modules[start + 1 :])


def _links(net: nn.Module) -> list[nn.Module]:
    if type(net) is nn.Sequential:
        return [link for child in net for link in _links(child)]
    return [net]


def _row_by_row(module: nn.Module, local: type) -> bool:
    if isinstance(module, Variational):
        fits = module.gate is None and module.posterior is not None
        return fits and type(module.estimator) is local
    if isinstance(module, nn.Flatten) and module.start_dim != 1:
        return False
    if isinstance(module, nn.Softmax) and module.dim in (None, 0):
        return False
    return type(module) in _ROW_BY_ROW
