"""Models of transformers: their `Conv1D` as a noisy layer.

`plan` and `convert` import this file where a net has modules of transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import pytorch_utils

from vardrop.layers import Variational, register_layer
from vardrop.posteriors import Axes


class Conv1D(Variational, pytorch_utils.Conv1D):
    """`Conv1D` of transformers, the dense layer of GPT-2, with a posterior on its weight.

    y = x w + b, w ~ q of shape (inputs, outputs). Input (*, inputs), output (*, outputs).

    >>> import torch, vardrop as vd
    >>> from transformers.pytorch_utils import Conv1D
    >>> layer = vd.convert(Conv1D(3, 4), vd.sparse_vd())
    >>> layer(torch.zeros(2, 5, 4)).shape, tuple(vd.log_alpha(layer)[""].shape)
    (torch.Size([2, 5, 3]), (4, 3))
    """

    nx: int
    nf: int
    axes: ClassVar[Axes] = Axes(input=(0,), output=(1,))

    @property
    def inputs(self) -> int:
        return self.nx

    @property
    def outputs(self) -> int:
        return self.nf

    @property
    def op(self) -> Callable[..., Tensor] | None:
        return _product

    def forward(self, x: Tensor, noise: Any = None) -> Tensor:
        """The noisy output while sampling (or with explicit noise), else the plain layer's."""
        x = self.gated("input", x)
        rows = x.unsqueeze(0) if x.dim() == 1 else x
        y = self.product(_product, (rows,), noise)
        return self.gated("output", y.squeeze(0) if x.dim() == 1 else y)

    def _reset_means(self) -> None:
        nn.init.normal_(self.weight, std=0.02)
        nn.init.zeros_(self.bias)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    y = rows @ weight if bias is None else torch.addmm(bias, rows, weight)
    return y.view(*x.shape[:-1], weight.shape[-1])


register_layer(pytorch_utils.Conv1D, Conv1D)
