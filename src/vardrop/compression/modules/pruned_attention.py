"""Plain attention with fewer heads."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vardrop.layers.attention import SEPARATE, Heads, Triple, averaged
from vardrop.layers.dense import dense


class SlimAttention(Heads, nn.Module):
    """Plain attention with separate projections and any number of heads.

    `shrink` replaces an `nn.MultiheadAttention` that loses heads by it, because torch ties the
    number of heads to the width. Arguments and shapes are the same as in torch. `need_weights`
    averages over the remaining heads.

    Args:
        layer: torch's attention, without `add_bias_kv`.

    >>> import torch
    >>> whole = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    >>> x = torch.randn(3, 5, 8)
    >>> torch.allclose(SlimAttention(whole)(x, x, x)[0], whole(x, x, x)[0], atol=1e-6)
    True
    """

    # Attributes that torch's encoder layers read before they choose the fast path.
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
        device = layer.out_proj.weight.device
        self.register_buffer("heads", torch.arange(layer.num_heads, device=device))
        self.train(layer.training)

    @property
    def num_heads(self) -> int:
        """The number of remaining heads."""
        return self.q_proj.out_features // self.head_dim

    def recompose(self) -> nn.MultiheadAttention | None:
        """Torch's layer with these weights, or None if a head or a unit is missing."""
        q, k, v, out = self.q_proj, self.k_proj, self.v_proj, self.out_proj
        if {q.in_features, q.out_features, k.out_features, out.out_features} != {self.embed_dim}:
            return None
        layer = nn.MultiheadAttention(
            *(self.embed_dim, self.num_heads, self.dropout),
            bias=any(part.bias is not None for part in (q, k, v)),
            add_zero_attn=self.add_zero_attn,
            batch_first=self.batch_first,
            kdim=k.in_features,
            vdim=v.in_features,
            device="meta",
        )
        joined: dict[str, list[Tensor]] = {}
        if layer.in_proj_weight is None:
            for name, part in zip(SEPARATE, (q, k, v), strict=True):
                setattr(layer, name, part.weight)
        else:
            joined["in_proj_weight"] = [q.weight, k.weight, v.weight]
        if layer.in_proj_bias is not None:
            zero = torch.zeros_like(q.weight[:, 0])
            joined["in_proj_bias"] = [zero if p.bias is None else p.bias for p in (q, k, v)]
        for name, tensors in joined.items():
            trained = any(t.requires_grad for t in tensors)
            setattr(layer, name, nn.Parameter(torch.cat([t.detach() for t in tensors]), trained))
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
        """Torch's attention, without the removed heads."""
        rate = self.dropout if self.training else 0.0
        y, weights = self._attended(
            (query, key, value), key_padding_mask, attn_mask, is_causal, need_weights, rate
        )
        return y, averaged(weights, average_attn_weights)

    def _projected(self, query: Tensor, key: Tensor, value: Tensor, noise: object) -> Triple:
        return self.q_proj(query), self.k_proj(key), self.v_proj(value)

    def _output(self, heads: Tensor, noise: object) -> Tensor:
        return self.out_proj(heads.transpose(1, 2).flatten(2))

    def _for_heads(self, masks: Tensor) -> Tensor:
        return masks.index_select(1, self.heads)

    def extra_repr(self) -> str:
        return f"heads={self.num_heads}, head_dim={self.head_dim}, embed_dim={self.embed_dim}"
