"""Dense layers of other libraries that compute what `nn.Linear` computes."""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional
from torch.nn.parameter import UninitializedParameter

from vardrop._core.integrations import package_of
from vardrop.layers.dense import Affine

_SIZES = (("in_features", "out_features"), ("in_channels", "out_channels"))


class LinearLike(Affine):
    """A layer of another class than `nn.Linear` that computes x w^T + b.

    Args:
        *args: the arguments of the plain class.
        **kwargs: its keyword arguments.
    """

    plain: ClassVar[type[nn.Module]]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _new, (self.plain, self.sizes), self.__getstate__()


@cache
def linear_like_class(plain: type[nn.Module], sizes: tuple[str, str]) -> type[LinearLike]:
    """The noisy class of a dense layer of another library, the same for every call.

    Args:
        plain: the type of the plain layer.
        sizes: the names of its attributes with the numbers of inputs and outputs.

    Returns:
        The class.
    """
    members = {"plain": plain, "sizes": sizes, "__module__": __name__, "__doc__": plain.__doc__}
    return type(f"Noisy{plain.__name__}", (LinearLike, plain), members)


def _new(plain: type[nn.Module], sizes: tuple[str, str]) -> LinearLike:
    return object.__new__(linear_like_class(plain, sizes))


def linear_sizes(module: nn.Module) -> tuple[str, str] | None:
    """The attributes with the sizes of a module that computes what `nn.Linear` computes.

    Its class is named after it, it has a weight (outputs, inputs) and perhaps a bias, and its
    outputs for random inputs are equal.

    Args:
        module: any module.

    Returns:
        The names of the attributes, or None for other modules.

    >>> linear_sizes(nn.Conv1d(2, 2, 1)) is None
    True
    """
    weight, bias = (module._parameters.get(name) for name in ("weight", "bias"))
    foreign = package_of(type(module)) not in ("torch", "vardrop")
    if not foreign or "Linear" not in type(module).__name__ or isinstance(module, nn.Linear):
        return None
    if weight is None or isinstance(weight, UninitializedParameter) or weight.dim() != 2:
        return None
    if len(module.state_dict()) != 1 + (bias is not None):
        return None
    shape = tuple(weight.shape)[::-1]
    sizes = next((s for s in _SIZES if tuple(getattr(module, n, None) for n in s) == shape), None)
    if sizes is None or weight.is_meta:
        return None
    x = torch.linspace(-1, 1, 3 * shape[0], dtype=weight.dtype, device=weight.device).view(3, -1)
    with torch.no_grad():
        is_equal = torch.equal(module(x), functional.linear(x, weight, bias))
    return sizes if is_equal else None
