"""Attention computed head by head, for noisy and for shrunken attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from vardrop._core.errors import VardropError
from vardrop.estimators import ExplicitNoise

Triple = tuple[Tensor, Tensor, Tensor]
InputNoise = Sequence[ExplicitNoise | None]  # of each input projection
SEPARATE = ("q_proj_weight", "k_proj_weight", "v_proj_weight")


class Heads:
    """Attention of queries to keys, by heads. Subclasses define the projections."""

    head_dim: int
    batch_first: bool
    add_zero_attn: bool
    bias_k: Tensor | None
    bias_v: Tensor | None

    def _projected(
        self, query: Tensor, key: Tensor, value: Tensor, noise: InputNoise | None
    ) -> Triple:
        """Queries, keys and values, (N, length, heads x width of a head)."""
        raise NotImplementedError

    def _output(self, heads: Tensor, noise: ExplicitNoise | None) -> Tensor:
        """The output of heads (N, heads, length, width of a head)."""
        raise NotImplementedError

    def _attended(
        self,
        inputs: Triple,
        padding: Tensor | None,
        attn: Tensor | None,
        causal: bool,
        need_weights: bool,
        rate: float,
        noise: tuple[InputNoise, ExplicitNoise | None] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The output, and the weights of every head if `need_weights`."""
        batched, first = inputs[0].dim() == 3, self.batch_first
        if causal and attn is None:
            raise VardropError("Expected `attn_mask` where `is_causal` is True, but got None.")
        if not batched:
            inputs = _mapped(lambda x: x.unsqueeze(0), *inputs)
        elif not first:
            inputs = _mapped(lambda x: x.transpose(0, 1), *inputs)
        into, out = (None, None) if noise is None else noise
        q, k, v = (self._split(x) for x in self._projected(*inputs, into))
        mask = self._mask(q, attn, padding, batched)
        if self.bias_k is not None and self.bias_v is not None:
            biases = (self._split(b.expand(len(q), 1, -1)) for b in (self.bias_k, self.bias_v))
            k, v = (torch.cat([x, b.to(x.dtype)], 2) for x, b in zip((k, v), biases, strict=True))
        if self.add_zero_attn:
            k, v = (functional.pad(x, (0, 0, 0, 1)) for x in (k, v))
        weights = None
        if need_weights:
            scores = q @ k.transpose(-2, -1) / self.head_dim**0.5
            weights = (scores if mask is None else scores + mask).softmax(-1)
            weights = functional.dropout(weights, rate) if rate else weights
            heads = weights @ v
        else:
            heads = functional.scaled_dot_product_attention(q, k, v, mask, rate)
        y = self._output(heads, out)
        if not batched:
            return y.squeeze(0), None if weights is None else weights.squeeze(0)
        return y if first else y.transpose(0, 1), weights

    def _split(self, x: Tensor) -> Tensor:
        """(N, length, width) as heads (N, heads, length, width of a head)."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _mask(
        self, q: Tensor, attn: Tensor | None, padding: Tensor | None, batched: bool
    ) -> Tensor | None:
        """Both masks as one mask to add to the scores, (N or 1, heads or 1, L or 1, S)."""
        total = None
        if attn is not None:
            attn = _additive(attn, q.dtype)
            per_head = attn.dim() > 2
            total = self._for_heads(attn.unflatten(0, (q.shape[0], -1))) if per_head else attn
        if padding is not None:
            padding = _additive(padding if batched else padding.unsqueeze(0), q.dtype)
            padding = padding[:, None, None, :]
            total = padding if total is None else total + padding
        extra = (self.bias_k is not None) + self.add_zero_attn
        return functional.pad(total, (0, extra)) if total is not None and extra else total

    def _for_heads(self, masks: Tensor) -> Tensor:
        """Select the masks (N, heads, L, S) of the heads."""
        return masks


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))


def averaged(weights: Tensor | None, average: bool) -> Tensor | None:
    """The weights of all heads, or their mean if `average`."""
    return weights.mean(-3) if weights is not None and average else weights


def _mapped(function: Callable[[Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor) -> Triple:
    """Apply a function to three tensors, once for equal tensors."""
    query = function(q)
    key = query if k is q else function(k)
    return query, key, key if v is k else function(v)
