"""Tensors as flat blocks that stay in the cache while many operations pass over them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

BLOCK = 1 << 16


_PLAIN = (Tensor, nn.Parameter)


def can_block(*tensors: Tensor) -> bool:
    """Whether tensors may be worked on in blocks: plain float32 ones on a CPU, nothing traced.

    A trace wants one expression, transforms cannot write into scratch, float64 wants precision,
    and what is written into a view of a tensor subclass (a sharded one) may be lost.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    for x in tensors:  # a generator would cost more than what it asks
        if type(x) not in _PLAIN or x.dtype != torch.float32 or not x.is_cpu:
            return False
    return not in_forward_mode()


def in_forward_mode() -> bool:
    """Whether derivatives are carried forwards (`torch.func.jvp`).

    Functions with a gradient of their own then stand back: torch.compile takes none that has a rule
    for this direction too.
    """
    return forward_ad._current_level >= 0


def like_layout(x: Tensor, like: Tensor) -> Tensor:
    """x with its elements in memory in the order of those of `like`; x itself where they are."""
    return x.contiguous(memory_format=_layout(like))


def keep_layout(x: Tensor, like: Tensor) -> Tensor:
    """x, derived from `like`, in its layout: one channel fits two of them and torch forgets which.

    A convolution goes by the layout of its arguments, and sums of two layouts are slow.
    """
    if x.dim() == 4 and x.shape[1] == 1 and like.stride(1) == 1 != x.stride(1):
        return x.squeeze(1).unsqueeze(-1).permute(0, 3, 1, 2)
    return x


def blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Flat blocks of tensors of one shape, in the memory order of the first.

    A tensor is written through its blocks only if `like_layout` would leave it alone.
    """
    layout = _layout(tensors[0])
    flat = (_flat(x.contiguous(memory_format=layout), layout) for x in tensors)
    return zip(*(x.split(BLOCK) for x in flat), strict=True)


def scratch(like: Tensor, count: int) -> Tensor:
    """Room for `count` blocks of a tensor."""
    return like.new_empty(count, min(BLOCK, like.numel()))


def _layout(x: Tensor) -> torch.memory_format:
    last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last and not x.is_contiguous() else torch.contiguous_format


def _flat(x: Tensor, layout: torch.memory_format) -> Tensor:
    return (x.permute(0, 2, 3, 1) if layout == torch.channels_last else x).view(-1)
