"""Linear, Bilinear and Embedding with noisy weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from vardrop._core.errors import VardropError
from vardrop.gates import FeatureNoise
from vardrop.layers.base import Variational
from vardrop.posteriors import Axes


class Linear(Variational, nn.Linear):
    """`nn.Linear` with a posterior on its weight.

    y = x w^T + b, w ~ q. Input (*, in_features), output (*, out_features).

    >>> import torch, vardrop as vd
    >>> layer = vd.Linear(4, 2, posterior=vd.AdditiveGaussian(), prior=vd.LogUniform())
    >>> layer(torch.zeros(3, 4)).shape
    torch.Size([3, 2])
    """

    axes: ClassVar[Axes] = Axes(input=(1,), output=(0,))

    @property
    def inputs(self) -> int:
        return self.in_features

    @property
    def outputs(self) -> int:
        return self.out_features

    @property
    def op(self) -> Callable[..., Tensor] | None:
        return functional.linear

    def forward(self, input: Tensor, noise: Any = None) -> Tensor:
        """The noisy output while sampling (or with explicit noise), else the torch layer's."""
        input = self.gated("input", input)
        if input.dim() == 1:
            y = self.product(functional.linear, (input.unsqueeze(0),), noise).squeeze(0)
        else:
            y = self.product(functional.linear, (input,), noise)
        return self.gated("output", y)


class Bilinear(Variational, nn.Bilinear):
    """`nn.Bilinear` with a posterior on its weight: y = x1^T w x2 + b."""

    axes: ClassVar[Axes] = Axes(input=(1, 2), output=(0,))

    @property
    def inputs(self) -> int:
        return self.in1_features

    @property
    def outputs(self) -> int:
        return self.out_features

    def forward(self, input1: Tensor, input2: Tensor, noise: Any = None) -> Tensor:
        """The noisy output while sampling (or with explicit noise), else the torch layer's."""
        input1 = self.gated("input", input1)
        noisy = self.is_sampling or noise is not None
        y = self.product(_bilinear if noisy else functional.bilinear, (input1, input2), noise)
        return self.gated("output", y)


def _bilinear(x1: Tensor, x2: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # torch's own bilinear has no batching rule, which vmap over draws needs.
    y = torch.einsum("...i,oij,...j->...o", x1, weight, x2)
    return y if bias is None else y + bias


class Embedding(Variational, nn.Embedding):
    """`nn.Embedding` with a posterior on its table; the row of `padding_idx` stays without noise.

    Under local reparameterisation every look-up draws for itself.
    """

    axes: ClassVar[Axes] = Axes(input=(0,), output=(1,))
    bias: None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name, wrong in (("max_norm", self.max_norm is not None), ("sparse", self.sparse)):
            if wrong:
                raise VardropError(
                    f"Expected `{name}` to be left out of a noisy embedding, but got "
                    f"{getattr(self, name)}: it does not go with a KL over all weights."
                )
        if self.gate is not None:
            raise VardropError(
                f"Expected no `gate` on an embedding, but got {self.gate.noise!r}: an index has no "
                "features to gate. Give a posterior, or put a Gate after it."
            )

    @classmethod
    def refuse(cls, layer: nn.Module, gate: FeatureNoise | None) -> str:
        if layer.max_norm is not None:
            return "max_norm rewrites its weights in the forward pass"
        if layer.sparse:
            return "sparse gradients do not go with a KL over all weights"
        if gate is not None:
            return "an index has no features to gate (Embedding takes posteriors only)"
        return ""

    @property
    def inputs(self) -> int:
        return self.num_embeddings

    @property
    def outputs(self) -> int:
        return self.embedding_dim

    def _look_up(self, index: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows = functional.embedding(
            index, weight, self.padding_idx, scale_grad_by_freq=self.scale_grad_by_freq
        )
        return rows if bias is None else rows + bias

    def forward(self, input: Tensor, noise: Any = None) -> Tensor:
        """The noisy output while sampling (or with explicit noise), else the torch layer's."""
        y = self.product(self._look_up, (input,), noise)
        if self.padding_idx is None or self.posterior is None:
            return y
        mean = functional.embedding(input, self.weight, self.padding_idx)
        return torch.where((input == self.padding_idx).unsqueeze(-1), mean, y)


def dense(weight: Tensor, bias: Tensor | None, kind: type[nn.Linear] = nn.Linear) -> nn.Linear:
    """A plain dense layer with copies of these tensors."""
    layer = kind(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.detach().clone(), weight.requires_grad)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach().clone(), bias.requires_grad)
    return layer
