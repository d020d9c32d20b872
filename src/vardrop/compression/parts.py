"""The two modules that a shrunken net may have beside torch's own: an index and a factor."""

from __future__ import annotations

from torch import Tensor, nn


class Select(nn.Module):
    """Keep the units `index` along one axis.

    Args:
        index: which units, (K,) integers.
        axis: where they run, counted from the end.

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


def is_selecting(module: nn.Module) -> bool:
    """Whether a module is a layer behind a `Select`."""
    return type(module) is nn.Sequential and len(module) == 2 and type(module[0]) is Select


class Scale(nn.Module):
    """Multiply every unit along one axis by a constant: what is left of a gate on its own.

    Args:
        factor: one number a unit, (K,).
        axis: where the units run, counted from the end.

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
        shape = [1] * input.dim()
        shape[self.axis] = len(self.factor)
        return input * self.factor.view(shape)

    def extra_repr(self) -> str:
        return f"units={len(self.factor)}, axis={self.axis}"


def replaced(net: nn.Module, name: str, module: nn.Module) -> nn.Module:
    """The net with one module put in place of another."""
    if not name:
        return module
    net.set_submodule(name, module)
    return net
