"""Multi-head attention, computed head by head: with noisy projections and gates on whole heads."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from vardrop._core.errors import VardropError
from vardrop._core.kl_warning import count_pass
from vardrop._core.torch_private import in_transform
from vardrop.estimators import AffineMap, Estimator, ExplicitNoise, local_reparameterization
from vardrop.functional.noise import linear
from vardrop.gates import FeatureNoise, Gate
from vardrop.layers.base import Ties, Variational
from vardrop.layers.dense import Linear
from vardrop.noisy import KLTerms
from vardrop.posteriors import Axes, Posterior
from vardrop.priors import Prior

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
            total = self._for_heads(attn.unflatten(0, (len(q), -1))) if per_head else attn
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


class Projection(Linear, NonDynamicallyQuantizableLinear):
    """The noisy output projection of an attention layer."""


class MultiheadAttention(Heads, Variational, nn.MultiheadAttention):
    """`nn.MultiheadAttention` with posteriors on its projections, or with gates on its heads.

    q, k, v = x W^T + b with W ~ q, heads = softmax(q k^T / sqrt(d)) v, each times its gate. The
    output is their projection, which has its own posterior. Arguments and shapes are as in torch.

    If query, key and value are the same tensor, they come from one draw of the packed weights. Rows
    of packed weights with different inputs are drawn separately, with the same distribution. With
    sampling off and without a gate it runs torch's layer, including its fast path.

    Args:
        *args: the arguments of `nn.MultiheadAttention`.
        **kwargs: its keyword arguments, and `posterior`, `prior`, `estimator`, `gate` and
            `noisy_bias`, as in `Variational`.

    >>> import torch, vardrop as vd
    >>> layer = vd.convert(torch.nn.MultiheadAttention(8, 2, batch_first=True), vd.sparse_vd())
    >>> x = torch.zeros(3, 5, 8)
    >>> layer(x, x, x)[0].shape
    torch.Size([3, 5, 8])
    """

    out_proj: Any

    @classmethod
    def weights_of(cls, layer: nn.Module) -> Mapping[str, Axes]:
        packed = layer.in_proj_weight is not None
        return dict.fromkeys(("in_proj_weight",) if packed else SEPARATE, cls.axes)

    axes: ClassVar[Axes] = Linear.axes
    sizes: ClassVar[tuple[str, str]] = ("num_heads", "embed_dim")
    bias_names = ("in_proj_bias",)

    def add_noise(
        self,
        posterior: Posterior | None = None,
        prior: Prior | None = None,
        estimator: Estimator = local_reparameterization,
        gate: FeatureNoise | None = None,
        noisy_bias: bool = False,
        tied: Ties | None = None,
    ) -> None:
        super().add_noise(posterior, prior, estimator, gate, noisy_bias, tied)
        self.out_proj.__class__ = Projection
        self.out_proj.add_noise(posterior, prior, estimator, None, noisy_bias, tied)

    def make_plain(self) -> None:
        super().make_plain()
        if isinstance(self.out_proj, Projection):
            self.out_proj.make_plain()
            self.out_proj.__class__ = NonDynamicallyQuantizableLinear  # type: ignore[assignment]

    def sublayers(self) -> dict[str, Variational]:
        return {"out_proj": self.out_proj} if isinstance(self.out_proj, Projection) else {}

    def kl_terms(self, value: bool = True, counted: Container[Hashable] = ()) -> KLTerms:
        """The terms of the KL of the inner products too."""
        terms = super().kl_terms(value, counted)
        for layer in self.sublayers().values():
            terms |= layer.kl_terms(value, counted)
        return terms

    def _reset_means(self) -> None:
        self.out_proj.reset_parameters()
        self._reset_parameters()

    def new_gate(self, noise: FeatureNoise) -> Gate:
        """Make a gate with one unit per head, for heads (N, heads, length, width)."""
        return Gate(noise, self.num_heads, -3, "input")

    def gated_weights(self) -> dict[str, Tensor]:
        return {"out_proj.weight": self.out_proj.weight}

    def per_feature(self, factor: Tensor, name: str) -> Tensor:
        return factor.repeat_interleave(self.head_dim)

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        noise: tuple[InputNoise, ExplicitNoise | None] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention as in torch, with noise while sampling or for given noise.

        `noise` is a pair: a tuple with the noise of each input projection, and the noise of the
        output projection.
        """
        if not self.add_zero_attn and self.bias_k is None:  # else there is always one more key
            _check_mask("key_padding_mask", key_padding_mask)
            _check_mask("attn_mask", attn_mask)
        drawing = self.is_sampling or self.out_proj.is_sampling or noise is not None
        if self.gate is None and not (drawing and (self.posterior is not None or self.dropout)):
            return super().forward(
                query, key, value, key_padding_mask, need_weights, attn_mask,
                average_attn_weights, is_causal,
            )  # fmt: skip
        rate = self.dropout if self.training or self.is_sampling else 0.0
        y, weights = self._attended(
            (query, key, value), key_padding_mask, attn_mask, is_causal, need_weights, rate, noise
        )
        return y, averaged(weights, average_attn_weights)

    def _output(self, heads: Tensor, noise: ExplicitNoise | None) -> Tensor:
        heads = heads if self.gate is None else self.gate(heads)
        return self.out_proj(heads.transpose(1, 2).flatten(2), noise)

    def _projected(
        self, query: Tensor, key: Tensor, value: Tensor, noise: InputNoise | None
    ) -> Triple:
        """Queries, keys and values, with one product for equal tensors."""
        packed, size = self.in_proj_weight is not None, self.embed_dim
        stops = [1, 2, 3]  # of the projections that each product computes
        if packed and key is value:
            stops = [3] if query is key else [1, 3]
        draws = self.posterior is not None and (self.is_sampling or noise is not None)
        if draws and self.prior is not None:
            count_pass(self)
        views = self.noisy_tensors() if draws else {}
        projected: list[Tensor] = []
        for i, stop in enumerate(stops):
            start = len(projected)
            x, biases = (query, key, value)[start], (start * size, stop * size)
            name, rows = ("in_proj_weight", biases) if packed else (SEPARATE[i], (0, size))
            bias = None if self.in_proj_bias is None else self.in_proj_bias[slice(*biases)]
            if draws:
                noisy_bias = views.get("in_proj_bias")
                affine = AffineMap(
                    op=linear,
                    weight=views[name].with_shared_variance(self.training).rows(*rows),
                    bias=bias if noisy_bias is None else noisy_bias.rows(*biases),
                    outputs=rows[1] - rows[0],
                    trailing=0,
                )
                y = self.estimator(affine, (x,), None if noise is None else noise[i])
            else:
                y = functional.linear(x, getattr(self, name)[slice(*rows)], bias)
            projected += y.chunk(stop - start, -1)
        q, k, v = projected
        return q, k, v


def _check_mask(name: str, mask: Tensor | None) -> None:
    """Raise an error for a mask that hides all keys of a query: its softmax is not defined."""
    if mask is None or torch.compiler.is_compiling() or in_transform() or not mask.is_cpu:
        return  # reading values breaks a graph, or waits for a device
    hidden = (mask if mask.dtype == torch.bool else mask == float("-inf")).all(-1)
    if bool(hidden.any()):
        row = tuple(hidden.nonzero()[0].tolist())
        raise VardropError(
            f"Expected `{name}` to leave a key in every sequence, but got one that hides all of "
            f"row {row[0] if len(row) == 1 else row}. Leave out empty sequences."
        )
