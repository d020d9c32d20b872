"""Dense layers of other libraries that compute what `nn.Linear` computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parameter import UninitializedParameter

from vardrop._core.integrations import package_of
from vardrop.estimators import ExplicitNoise
from vardrop.functional.noise import linear
from vardrop.layers.base import Variational
from vardrop.layers.dense import Linear
from vardrop.posteriors import Axes

_SIZES = (("in_features", "out_features"), ("in_channels", "out_channels"))


class LinearLike(Variational):
    """A layer of another class than `nn.Linear` that computes x w^T + b.

    Args:
        *args: the arguments of the plain class.
        **kwargs: its keyword arguments.
    """

    axes: ClassVar[Axes] = Linear.axes
    plain: ClassVar[type[nn.Module]]

    @property
    def op(self) -> Callable[..., Tensor] | None:
        return linear

    def forward(self, input: Tensor, noise: ExplicitNoise | None = None) -> Tensor:
        """Return a draw while sampling or for given noise, else the output of the plain layer."""
        return self.product_with_gate(linear, input, noise)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _new, (self.plain, self.sizes), self.__getstate__()


_MADE: dict[type[nn.Module], type[LinearLike]] = {}


def linear_like_class(plain: type[nn.Module], sizes: tuple[str, str]) -> type[LinearLike]:
    """The noisy class of a dense layer of another library, the same for every call.

    Args:
        plain: the type of the plain layer.
        sizes: the names of its attributes with the numbers of inputs and outputs.

    Returns:
        The class.
    """
    if plain not in _MADE:
        members = {"plain": plain, "sizes": sizes, "__module__": __name__, "__doc__": plain.__doc__}
        _MADE[plain] = type(f"Noisy{plain.__name__}", (LinearLike, plain), members)
    return _MADE[plain]


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
    named = "Linear" in type(module).__name__ and package_of(type(module)) not in (
        "torch",
        "vardrop",
    )
    if (
        not named
        or isinstance(module, nn.Linear)
        or len(module.state_dict()) != 1 + (bias is not None)
    ):
        return None
    if weight is None or isinstance(weight, UninitializedParameter) or weight.dim() != 2:
        return None
    shape = tuple(weight.shape)[::-1]
    sizes = next((s for s in _SIZES if tuple(getattr(module, n, None) for n in s) == shape), None)
    if sizes is None or weight.is_meta:
        return None
    x = torch.linspace(-1, 1, 3 * shape[0], dtype=weight.dtype, device=weight.device)
    with torch.no_grad():
        rows = x.view(3, shape[0])
        is_equal = torch.equal(module(rows), functional.linear(rows, weight, bias))
    return sizes if is_equal else None
