"""What a draw costs, from shapes: which way of drawing is cheaper, and how many draws at once.

Nanoseconds on one core of a recent CPU; only their ratios matter, and they vary little. A choice
from shapes is the same in every run, so that a seed gives the same numbers again.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from vardrop.layers import Variational
from vardrop.noisy import Noisy
from vardrop.prediction.modes import drops, prepared
from vardrop.prediction.shapes import links, output_shape

_NORMAL = 5.0  # one normal number, multiplied and added
_WEIGHT = 6.0  # one weight drawn and written
_READ = 0.3  # one weight read from memory
_PRODUCT = 0.02  # one multiply-add of a dense layer
_CONVOLUTION = 0.06  # one multiply-add of a convolution, channels last
_CONVOLUTION_FIRST = 0.11  # and with the channels first, as vmap needs them
_ELEMENT = 1.0  # one element through an activation or pooling
_CALL = 25_000.0  # one module called
_BATCHED_CALL = 70_000.0  # and under vmap
_WORKING_SET = 2**24  # bytes beyond which fresh pages cost more than a repeated call
_TENSORS = 6  # of the largest activation's size that live at once


class Call(NamedTuple):
    """One module called once: what it does for a single row."""

    module: nn.Module
    elements: int  # of the output
    products: int  # multiply-adds
    weights: int
    noisy: bool


def calls(net: nn.Module, x: Tensor) -> list[Call]:
    """The modules that do the work, in the order of a forward pass on one row."""
    if known := _known_calls(net, x):
        return known
    found: list[Call] = []

    def record(module: nn.Module, _: object, output: object) -> None:
        if isinstance(output, Tensor):
            found.append(_call(module, output.numel()))

    with ExitStack() as hooks, prepared(net, noise=False), torch.no_grad():
        for module in net.modules():
            if isinstance(module, Noisy) or not any(True for _ in module.children()):
                hooks.callback(module.register_forward_hook(record).remove)
        net(x[:1])
    return found


def _known_calls(net: nn.Module, x: Tensor) -> list[Call]:
    """Those of a chain of well-known modules, without a pass; empty for any other net."""
    found: list[Call] = []
    shape = tuple(x.shape[1:])
    for module in links(net):
        behind = output_shape(module, shape)
        if behind is None or (isinstance(module, Noisy) and getattr(module, "gate", None)):
            return []
        shape, elements = behind, math.prod(behind)
        weighted = isinstance(module, nn.Linear | nn.Conv2d)
        found.append(_call(module, elements) if weighted else Call(module, elements, 0, 0, False))
    return found


def _call(module: nn.Module, elements: int) -> Call:
    weight = getattr(module, "weight", None)
    products, weights = 0, weight.numel() if isinstance(weight, Tensor) else 0
    if isinstance(weight, Tensor) and weight.dim() > 1 and not isinstance(module, nn.Embedding):
        products = weight.numel() * max(1, elements // max(1, _outputs(module, weight)))
    noisy = drops(module) or (
        isinstance(module, Noisy)
        and not (isinstance(module, Variational) and module.posterior is None)
    )
    return Call(module, elements, products, weights, noisy)


def _outputs(module: nn.Module, weight: Tensor) -> int:
    transposed = isinstance(module, nn.modules.conv._ConvTransposeNd)
    return weight.shape[1] * module.groups if transposed else weight.shape[0]  # type: ignore[operator, return-value]


def first_noisy(found: list[Call]) -> nn.Module | None:
    """The module whose input is the same for all draws: the first noisy one, if called once."""
    first = next((c.module for c in found if c.noisy), None)
    return first if sum(c.module is first for c in found) == 1 else None


def chunk_size(found: list[Call], rows: int, samples: int, memory: int) -> int:
    """How many draws fit into the working set, and into `memory` bytes."""
    start = next((i for i, c in enumerate(found) if c.noisy), 0)
    largest = max((c.elements for c in found[start:]), default=1)
    one = largest * rows * _TENSORS * torch.get_default_dtype().itemsize
    return max(1, min(samples, min(memory, _WORKING_SET) // one))


def row_limit(found: list[Call], memory: int) -> int:
    """How many rows one draw can hold within `memory` bytes."""
    largest = max((c.elements for c in found), default=1)
    return max(1, memory // (largest * _TENSORS * torch.get_default_dtype().itemsize))


def cheaper(
    found: list[Call], rows: int, samples: int, chunk: int, chained: bool
) -> Literal["local", "weights"]:
    """The way to draw that costs less; `local` where noise sits on features or classes.

    `chained` says that local noise needs no vmap.
    """
    if any(c.noisy and not _can_draw_weights(c.module) for c in found):
        return "local"
    weights = samples * sum(_weight_cost(c, rows) for c in found)
    convolution = _CONVOLUTION if chained else _CONVOLUTION_FIRST
    local, seen = 0.0, False
    for c in found:
        repeats = samples if seen else 1
        local += _local_cost(c, rows, repeats, samples, convolution)
        seen = seen or c.noisy
    local += -(-samples // chunk) * (_CALL if chained else _BATCHED_CALL) * len(found)
    return "local" if local <= weights else "weights"


def _can_draw_weights(module: nn.Module) -> bool:
    return isinstance(module, Variational) and module.posterior is not None


def _product(c: Call, rows: int, convolution: float) -> float:
    if not c.products:
        return rows * c.elements * _ELEMENT
    each = _PRODUCT if c.products == c.weights else convolution
    return max(rows * c.products * each, c.weights * _READ)


def _weight_cost(c: Call, rows: int) -> float:
    drawn = c.weights * _WEIGHT if c.noisy else 0.0
    return drawn + _product(c, rows, _CONVOLUTION) + _CALL


def _local_cost(c: Call, rows: int, repeats: int, samples: int, convolution: float) -> float:
    once = _product(c, rows * repeats, convolution)
    return 2 * once + samples * rows * c.elements * _NORMAL if c.noisy else once
