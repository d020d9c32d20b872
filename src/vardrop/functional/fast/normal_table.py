"""Normal numbers from a table of quantiles, for large draws on a CPU."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vardrop._core.torch_private import in_transform
from vardrop.functional.fast import switch

MIN_COUNT = 1 << 18  # below it `torch.randn` is as fast
_PIECE = 1 << 16  # numbers that are looked up at once
_TAIL = 2.0**-12  # fraction of normal numbers beyond the table, 3.49 standard deviations and more


def _quantiles(count: int) -> Tensor:
    """The means of a standard normal in `count` equally likely bins between its two tails."""
    half = _TAIL / 2
    below = torch.linspace(half, 1 - half, count + 1, dtype=torch.float64, device="cpu")
    edges = torch.special.ndtri(below)
    density = torch.exp(-0.5 * edges.square()) / math.sqrt(2 * math.pi)
    return ((density[:-1] - density[1:]) * (count / (1 - _TAIL))).float()


_NORMALS = _quantiles(1 << 16)


def can_look_up(like: Tensor) -> bool:
    """Whether numbers for a tensor may be looked up: not in an exported graph or under vmap."""
    return (
        like.dtype == torch.float32
        and like.device.type == "cpu"
        and not torch.compiler.is_exporting()
        and not in_transform()
        and switch.enabled
    )


def look_up(count: int, generator: torch.Generator | None = None) -> Tensor:
    """Standard normal numbers, 16 random bits each.

    They are 2^16 equally likely values, whose distribution function is within 2^-16 of the normal
    one. One in 4096, at random places, is drawn exactly from beyond the table instead, so that the
    tails are those of `torch.randn` for any count.
    """
    if torch.compiler.is_compiling():
        return torch.ops.vardrop.look_up_normals(count)
    return _look_up(count, generator)


def _look_up(count: int, generator: torch.Generator | None = None) -> Tensor:
    """Numbers of the table, piece by piece: bits and places stay in the cache."""
    numbers = torch.empty(count, dtype=torch.float32, device="cpu")
    words = -(-count // (4 * -(-count // _PIECE)))  # of 64 bits, in pieces of one size
    bits = torch.empty(words, dtype=torch.int64, device="cpu")
    places = torch.empty(4 * words, dtype=torch.int32, device="cpu")
    for piece in numbers.split(4 * words):
        bits.random_(-(2**63), None, generator=generator)
        places.copy_(bits.view(torch.uint16))
        torch.index_select(_NORMALS, 0, places[: piece.numel()], out=piece)
    # A few of the numbers are drawn again, from beyond the table. The distances of their places are
    # geometric. Sixteen, and eight standard deviations, more than expected are enough for all of
    # them but once in 1e15 calls.
    most = int(count * _TAIL + 8 * math.sqrt(count * _TAIL)) + 16
    distances = torch.empty(most, dtype=torch.float64, device="cpu")
    tail_places = distances.geometric_(_TAIL, generator=generator).cumsum_(0)
    inside = int((tail_places <= count).sum())
    u = torch.rand(inside, dtype=torch.float64, device="cpu", generator=generator).sub_(0.5)
    tails = torch.special.ndtri(u.abs() * _TAIL).copysign_(u).float()
    return numbers.index_copy_(0, tail_places[:inside].long().sub_(1), tails)


# A compiler that saw the look-up would put it into loops over weights, which it then runs one
# element at a time. As an operator it stays separate, and its numbers are the same.
_OPERATOR = "vardrop::look_up_normals"
torch.library.define(_OPERATOR, "(int count) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
torch.library.impl(_OPERATOR, "default")(_look_up)
torch.library.register_fake(_OPERATOR)(lambda count: torch.empty(count, device="cpu"))
