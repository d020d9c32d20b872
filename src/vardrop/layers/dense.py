"""Linear, Bilinear and Embedding with noisy weights, and dense layers of other libraries."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parameter import UninitializedParameter

from vardrop._core.integrations import package_of
from vardrop.estimators import ExplicitNoise
from vardrop.functional.noise import linear
from vardrop.gates import FeatureNoise
from vardrop.gates.switchable_dropout import make_empty
from vardrop.layers.base import Variational
from vardrop.posteriors import Axes


class Affine(Variational):
    """A layer that is one product of one input, by default x w^T + b, with the gate on one side.

    Args:
        *args: the arguments of the torch layer.
        **kwargs: its keyword arguments.
    """

    axes: ClassVar[Axes] = Axes(input=(1,), output=(0,))

    op: Callable[..., Tensor] = staticmethod(linear)  # type: ignore[assignment]

    def forward(self, input: Tensor, noise: ExplicitNoise | None = None) -> Tensor:
        """Return a draw while sampling or for given noise, else the output of the torch layer."""
        return self.product_with_gate(self.op, input, noise)


class Linear(Affine, nn.Linear):
    """`nn.Linear` with a posterior on its weight.

    y = x w^T + b, w ~ q. Input (*, in_features), output (*, out_features).

    Args:
        *args: the arguments of `nn.Linear`.
        **kwargs: its keyword arguments, and `posterior`, `prior`, `estimator`, `gate` and
            `noisy_bias`, as in `Variational`.

    >>> import torch, vardrop as vd
    >>> layer = vd.Linear(4, 2, posterior=vd.AdditiveGaussian(), prior=vd.LogUniform())
    >>> layer(torch.zeros(3, 4)).shape
    torch.Size([3, 2])
    """

    sizes: ClassVar[tuple[str, str]] = ("in_features", "out_features")


class Bilinear(Variational, nn.Bilinear):
    """`nn.Bilinear` with a posterior on its weight: y = x1^T w x2 + b.

    Args:
        *args: the arguments of `nn.Bilinear`.
        **kwargs: its keyword arguments, and `posterior`, `prior`, `estimator`, `gate` and
            `noisy_bias`, as in `Variational`.
    """

    axes: ClassVar[Axes] = Axes(input=(1, 2), output=(0,))
    sizes: ClassVar[tuple[str, str]] = ("in1_features", "out_features")

    def forward(self, input1: Tensor, input2: Tensor, noise: ExplicitNoise | None = None) -> Tensor:
        """Return a draw while sampling or for given noise, else the output of the torch layer."""
        input1 = self.apply_gate("input", input1)
        noisy = self.is_sampling or noise is not None
        y = self.product(_bilinear if noisy else functional.bilinear, (input1, input2), noise)
        return self.apply_gate("output", y)


def _bilinear(x1: Tensor, x2: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # torch's own bilinear has no batching rule, which vmap over draws needs.
    y = torch.einsum("...i,oij,...j->...o", x1, weight, x2)
    return y if bias is None else y + bias


class Embedding(Variational, nn.Embedding):
    """`nn.Embedding` with a posterior on its table. The row of `padding_idx` has no noise.

    Under local reparameterisation each look-up has its own draw.

    Args:
        *args: the arguments of `nn.Embedding`.
        **kwargs: its keyword arguments, and `posterior`, `prior`, `estimator`, `gate` and
            `noisy_bias`, as in `Variational`.
    """

    axes: ClassVar[Axes] = Axes(input=(0,), output=(1,))
    sizes: ClassVar[tuple[str, str]] = ("num_embeddings", "embedding_dim")
    bias: None = None

    @classmethod
    def unsupported_reason(cls, layer: nn.Module, gate: FeatureNoise | None) -> str:
        if layer.max_norm is not None:
            return "max_norm rewrites its weights in the forward pass"
        if layer.sparse:
            return "sparse gradients cannot be combined with a KL over all weights"
        if gate is not None:
            return "an index has no features to gate (Embedding takes posteriors only)"
        return ""

    def _look_up(self, index: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows = functional.embedding(
            index, weight, self.padding_idx, scale_grad_by_freq=self.scale_grad_by_freq
        )
        return rows if bias is None else rows + bias

    def forward(self, input: Tensor, noise: ExplicitNoise | None = None) -> Tensor:
        """Return a draw while sampling or for given noise, else the output of the torch layer."""
        y = self.product(self._look_up, (input,), noise)
        if self.padding_idx is None or self.posterior is None:
            return y
        mean = functional.embedding(input, self.weight, self.padding_idx)
        return torch.where((input == self.padding_idx).unsqueeze(-1), mean, y)


def dense(weight: Tensor, bias: Tensor | None, kind: type[nn.Linear] = nn.Linear) -> nn.Linear:
    """Make a plain dense layer with copies of these tensors."""
    layer = kind(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.detach().clone(), weight.requires_grad)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach().clone(), bias.requires_grad)
    return layer


_SIZES = (("in_features", "out_features"), ("in_channels", "out_channels"))


class LinearLike(Affine):
    """A layer of another class than `nn.Linear` that computes x w^T + b.

    Args:
        *args: the arguments of the plain class.
        **kwargs: its keyword arguments.
    """

    plain: ClassVar[type[nn.Module]]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return make_empty, (linear_like_class, self.plain, self.sizes), self.__getstate__()


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
    shape = tuple(weight.shape)[::-1]
    sizes = next((s for s in _SIZES if tuple(getattr(module, n, None) for n in s) == shape), None)
    others = len(module.state_dict()) - 1 - (bias is not None)
    if sizes is None or weight.is_meta or others:
        return None
    x = torch.linspace(-1, 1, 3 * shape[0], dtype=weight.dtype, device=weight.device).view(3, -1)
    with torch.no_grad():
        is_equal = torch.equal(module(x), functional.linear(x, weight, bias))
    return sizes if is_equal else None
