"""Modules that select or scale units, before a layer that reads fewer inputs or after a gate."""

from __future__ import annotations

from torch import Tensor, nn

from vardrop.gates.base import along


class Select(nn.Module):
    """Keep the units `index` along one axis.

    Args:
        index: which units, (K,) integers.
        axis: the axis of units, counted from the end.

    >>> import torch
    >>> Select(torch.tensor([0, 2]), axis=-1)(torch.tensor([[1.0, 2.0, 3.0]]))
    tensor([[1., 3.]])
    """

    index: Tensor

    def __init__(self, index: Tensor, axis: int) -> None:
        super().__init__()
        self.register_buffer("index", index)
        self.axis = axis

    def forward(self, input: Tensor) -> Tensor:
        """The kept units."""
        return input.index_select(self.axis, self.index)

    def extra_repr(self) -> str:
        return f"units={len(self.index)}, axis={self.axis}"


class Scale(nn.Module):
    """Multiply every unit along one axis by a constant: the mean of a gate between layers.

    Args:
        factor: one number per unit, (K,).
        axis: the axis of units, counted from the end.

    >>> import torch
    >>> Scale(torch.tensor([1.0, 0.5]), axis=-1)(torch.tensor([[4.0, 4.0]]))
    tensor([[4., 2.]])
    """

    factor: Tensor

    def __init__(self, factor: Tensor, axis: int) -> None:
        super().__init__()
        self.register_buffer("factor", factor)
        self.axis = axis

    def forward(self, input: Tensor) -> Tensor:
        """The scaled units."""
        return input * along(self.axis, input, self.factor)

    def extra_repr(self) -> str:
        return f"units={len(self.factor)}, axis={self.axis}"


def selection_of(module: nn.Module) -> Select | None:
    """The `Select`, if a module consists of it and its layer."""
    first = next(module.children(), None) if type(module) is nn.Sequential else None
    return first if isinstance(first, Select) else None
