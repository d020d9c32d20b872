"""Every private name of torch that the library relies on, each in one function with its reason.

A torch release may move or remove any of them, so tests/_core/test_torch_private.py runs them all.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn


def in_transform() -> bool:
    """Whether a `torch.func` transform such as vmap is active. There is no public query."""
    return torch._C._are_functorch_transforms_active()


def unwrap(net: nn.Module) -> nn.Module:
    """The module inside a wrapper for compilation or data-parallel training, else the module.

    `torch.compile` keeps the model under `_orig_mod` and gives no public access to it.
    """
    if isinstance(net, nn.parallel.DistributedDataParallel | nn.DataParallel):
        return unwrap(net.module)
    inner = net._modules.get("_orig_mod")
    return net if inner is None else unwrap(inner)


def own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers of one module by name, without those of its children.

    The public iterators leave out a tensor that occurs twice.
    """
    for tensors in (module._parameters, module._buffers):
        yield from ((name, t) for name, t in tensors.items() if t is not None)


def has_plain_forward(module: nn.Module) -> bool:
    """Whether a call of a module runs the `forward` of its class: no hook, no replaced method."""
    hooks = module._forward_hooks or module._forward_pre_hooks
    return not hooks and "forward" not in vars(module)
