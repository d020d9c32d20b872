"""Linear, Bilinear and Embedding with noisy weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from vardrop._core.errors import VardropError
from vardrop.estimators import ExplicitNoise
from vardrop.functional.noise import linear
from vardrop.gates import FeatureNoise
from vardrop.layers.base import Variational
from vardrop.posteriors import Axes


class Affine(Variational):
    """A layer that is one product of one input, by default x w^T + b, with the gate on one side.

    Args:
        *args: the arguments of the torch layer.
        **kwargs: its keyword arguments.
    """

    axes: ClassVar[Axes] = Axes(input=(1,), output=(0,))

    @property
    def op(self) -> Callable[..., Tensor]:
        return linear

    def forward(self, input: Tensor, noise: ExplicitNoise | None = None) -> Tensor:
        """Return a draw while sampling or for given noise, else the output of the torch layer."""
        return self.product_with_gate(self.op, input, noise)

    def product_with_gate(
        self, op: Callable[..., Tensor], x: Tensor, noise: ExplicitNoise | None
    ) -> Tensor:
        """Apply `product` to one input, with the gate before or after it.

        The input may be a single example without a batch axis.

        Args:
            op: the product as a function of inputs, weight and bias.
            x: the input.
            noise: explicit noise, or None.

        Returns:
            The output of the layer.
        """
        x, single = self.apply_gate("input", x), x.dim() == self.spatial + 1
        y = self.product(op, (x.unsqueeze(0) if single else x,), noise)
        return self.apply_gate("output", y.squeeze(0) if single else y)


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

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        gate = None if self.gate is None else self.gate.noise
        if reason := self.unsupported_reason(self, gate):
            raise VardropError(f"A noisy Embedding does not support these arguments: {reason}.")

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
