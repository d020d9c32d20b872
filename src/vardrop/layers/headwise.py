"""Plain attention by heads, of which some may be left out; what noisy attention shares with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from vardrop.errors import VardropError
from vardrop.layers.dense import dense

Triple = tuple[Tensor, Tensor, Tensor]
_PROJECTIONS = ("q_proj", "k_proj", "v_proj")
SEPARATE = tuple(f"{name}_weight" for name in _PROJECTIONS)


class Heads:
    """Attention of queries to keys, by heads; how it projects into heads and out is its own."""

    head_dim: int
    batch_first: bool
    add_zero_attn: bool
    bias_k: Tensor | None
    bias_v: Tensor | None

    def _projected(self, query: Tensor, key: Tensor, value: Tensor, noise: Any) -> Triple:
        """Queries, keys and values, (N, length, heads x width of a head)."""
        raise NotImplementedError

    def _output(self, heads: Tensor, noise: Any) -> Tensor:
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
        noise: Any = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The output, and the weights of every head where they are asked for."""
        batched, first = inputs[0].dim() == 3, self.batch_first
        if not batched:
            inputs = _mapped(lambda x: x.unsqueeze(0 if first else 1), *inputs)
        elif causal and attn is None:
            raise VardropError("Expected `attn_mask` where `is_causal` is True, but got None.")
        if not first:
            inputs = _mapped(lambda x: x.transpose(0, 1), *inputs)
        into, out = (None, None) if noise is None else noise
        q, k, v = (self._split(x) for x in self._projected(*inputs, into))
        mask = self._mask(q, k, attn, padding, batched)
        heads, weights = self._attend(q, *self._extended(k, v), mask, need_weights, rate)
        y = self._output(heads, out)
        if not first:
            y = y.transpose(0, 1)
        if not batched:
            y = y.squeeze(0 if first else 1)
            weights = None if weights is None else weights.squeeze(0)
        return y, weights

    def _split(self, x: Tensor) -> Tensor:
        """(N, length, width) as heads (N, heads, length, width of a head)."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _extended(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values with those that `add_bias_kv` and `add_zero_attn` append."""
        batch = k.shape[0]
        if self.bias_k is not None and self.bias_v is not None:
            more = (self._split(b.expand(batch, 1, -1)) for b in (self.bias_k, self.bias_v))
            k, v = (torch.cat([x, own.to(x.dtype)], 2) for x, own in zip((k, v), more, strict=True))
        if self.add_zero_attn:
            k, v = (functional.pad(x, (0, 0, 0, 1)) for x in (k, v))
        return k, v

    def _mask(
        self, q: Tensor, k: Tensor, attn: Tensor | None, padding: Tensor | None, batched: bool
    ) -> Tensor | None:
        """Both masks as one that is added to the scores, (N or 1, heads or 1, L or 1, S)."""
        total = None
        if attn is not None:
            attn = _additive(attn, q.dtype)
            total = (
                attn if attn.dim() == 2 else self._for_heads(attn.unflatten(0, (q.shape[0], -1)))
            )
        if padding is not None:
            padding = _additive(padding if batched else padding.unsqueeze(0), q.dtype)
            padding = padding[:, None, None, :]
            total = padding if total is None else total + padding
        extra = (self.bias_k is not None) + self.add_zero_attn
        return functional.pad(total, (0, extra)) if total is not None and extra else total

    def _for_heads(self, masks: Tensor) -> Tensor:
        """The masks (N, heads, L, S) of its heads, of those for all."""
        return masks

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        need_weights: bool,
        rate: float,
    ) -> tuple[Tensor, Tensor | None]:
        if not need_weights:
            heads = functional.scaled_dot_product_attention(q, k, v, mask, rate)
            return heads, None
        scores = q @ k.transpose(-2, -1) / self.head_dim**0.5
        weights = (scores if mask is None else scores + mask).softmax(-1)
        weights = functional.dropout(weights, rate) if rate else weights
        return weights @ v, weights


class SlimAttention(Heads, nn.Module):
    """Plain attention by separate projections, for as many heads as are left.

    What `shrink` puts in the place of an `nn.MultiheadAttention` that loses heads: torch ties the
    number of heads to the width. Arguments and shapes are torch's; `need_weights` averages over
    the heads that are left.

    Args:
        layer: the attention that it computes, without `add_bias_kv`.

    >>> import torch
    >>> whole = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    >>> x = torch.randn(3, 5, 8)
    >>> torch.allclose(SlimAttention(whole)(x, x, x)[0], whole(x, x, x)[0], atol=1e-6)
    True
    """

    # What torch's encoder layers ask for before they take their fused path.
    in_proj_weight = in_proj_bias = None
    _qkv_same_embed_dim = False
    bias_k = bias_v = None
    heads: Tensor

    def __init__(self, layer: nn.MultiheadAttention) -> None:
        super().__init__()
        self.embed_dim, self.head_dim = layer.embed_dim, layer.head_dim
        self.dropout, self.batch_first = layer.dropout, layer.batch_first
        self.add_zero_attn = layer.add_zero_attn
        packed, bias = layer.in_proj_weight, layer.in_proj_bias
        weights = [getattr(layer, n) for n in SEPARATE] if packed is None else packed.chunk(3)
        biases = [None] * 3 if bias is None else bias.chunk(3)
        self.q_proj, self.k_proj, self.v_proj = map(dense, weights, biases)
        self.out_proj = dense(layer.out_proj.weight, layer.out_proj.bias)
        heads = torch.arange(layer.num_heads, device=layer.out_proj.weight.device)
        self.register_buffer("heads", heads)
        self.train(layer.training)

    @property
    def num_heads(self) -> int:
        """How many heads are left."""
        return self.q_proj.out_features // self.head_dim

    def keep(self, units: Sequence[int]) -> None:
        """Note which heads stay, by the units of `q_proj` that do."""
        left = sorted({unit // self.head_dim for unit in units})
        self.heads = self.heads[left]

    def pairs(self, query: Tensor, key: Tensor, *_: Any, **__: Any) -> int:
        """How many pairs of a query and a key these arguments have, over all heads."""
        axis = 0 if query.dim() == 2 or not self.batch_first else 1
        return self.num_heads * (query.numel() // query.shape[-1]) * key.shape[axis]

    @torch.no_grad()
    def fold_constants(self) -> None:
        """Add the values that are biases alone to the output's bias: attention averages them."""
        bias = self.v_proj.bias
        constant = ~self.v_proj.weight.any(1)
        if bias is None or self.add_zero_attn or not bool((constant & bias.ne(0)).any()):
            return
        effect = self.out_proj.weight @ (bias * constant)
        if self.out_proj.bias is None:
            self.out_proj.bias = nn.Parameter(torch.zeros_like(effect))
        self.out_proj.bias.add_(effect)
        self.out_proj.weight[:, constant] = 0

    def origins(self) -> dict[str, tuple[str, int, int]]:
        """Of which tensor of torch's layer a weight is which of how many equal parts."""
        dims = self.q_proj.in_features, self.k_proj.in_features, self.v_proj.in_features
        packed = dims == (self.embed_dim,) * 3
        return {
            f"{name}.weight": ("in_proj_weight", i, 3) if packed else (f"{name}_weight", 0, 1)
            for i, name in enumerate(_PROJECTIONS)
        }

    def together(self) -> nn.MultiheadAttention | None:
        """Torch's layer with these weights, where no head and no unit around it is missing."""
        q, k, v, out = self.q_proj, self.k_proj, self.v_proj, self.out_proj
        sizes = q.in_features, q.out_features, k.out_features, out.out_features
        if sizes != (self.embed_dim,) * 4:
            return None
        layer = nn.MultiheadAttention(
            self.embed_dim,
            self.num_heads,
            self.dropout,
            add_zero_attn=self.add_zero_attn,
            kdim=k.in_features,
            vdim=v.in_features,
            batch_first=self.batch_first,
            device="meta",
        )
        parts = q, k, v
        if layer.in_proj_weight is None:
            for name, part in zip(SEPARATE, parts, strict=True):
                setattr(layer, name, part.weight)
        else:
            layer.in_proj_weight = joined([p.weight for p in parts])
        biases = [p.bias for p in parts]
        zero = torch.zeros_like(q.weight[:, 0])
        some = any(b is not None for b in biases)
        whole = joined([zero if b is None else b for b in biases]) if some else None
        layer.register_parameter("in_proj_bias", whole)
        layer.out_proj.weight, layer.out_proj.bias = out.weight, out.bias
        return layer.train(self.training)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Torch's attention, without the heads that went."""
        rate = self.dropout if self.training else 0.0
        y, weights = self._attended(
            (query, key, value), key_padding_mask, attn_mask, is_causal, need_weights, rate
        )
        return y, averaged(weights, average_attn_weights)

    def _projected(self, query: Tensor, key: Tensor, value: Tensor, noise: Any) -> Triple:
        return self.q_proj(query), self.k_proj(key), self.v_proj(value)

    def _output(self, heads: Tensor, noise: Any) -> Tensor:
        y: Tensor = self.out_proj(heads.transpose(1, 2).flatten(2))
        return y

    def _for_heads(self, masks: Tensor) -> Tensor:
        return masks.index_select(1, self.heads)

    def extra_repr(self) -> str:
        return f"heads={self.num_heads}, head_dim={self.head_dim}, embed_dim={self.embed_dim}"


def joined(tensors: Sequence[Tensor]) -> nn.Parameter:
    """One parameter of several, one after the other."""
    trained = any(t.requires_grad for t in tensors)
    return nn.Parameter(torch.cat([t.detach() for t in tensors]), trained)


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))


def averaged(weights: Tensor | None, average: bool) -> Tensor | None:
    """The weights of all heads, or their mean where it is asked for."""
    return weights.mean(-3) if weights is not None and average else weights


def _mapped(function: Any, q: Tensor, k: Tensor, v: Tensor) -> Triple:
    """A function of three tensors, once for those that are the same."""
    query = function(q)
    key = query if k is q else function(k)
    return query, key, key if v is k else function(v)
