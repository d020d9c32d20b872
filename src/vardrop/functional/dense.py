"""The local-reparameterisation output of a dense layer as one function of its tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from vardrop.functional.blocks import can_block

_Gradients = tuple[Tensor | None, ...]


class _DenseOutput(torch.autograd.Function):
    """Two products forwards and up to four backwards, with little between them."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, variance: Tensor,
        variance_bias: Tensor, noise: Tensor,
    ) -> Tensor:  # fmt: skip
        squares = x * x
        spread = functional.linear(squares, variance, variance_bias)
        scaled = noise / spread.sqrt()
        ctx.save_for_backward(x, squares, weight, variance, variance_bias, scaled)
        return functional.linear(x, weight, bias).addcmul_(spread, scaled)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> _Gradients:
        x, squares, weight, variance, variance_bias, scaled = ctx.saved_tensors
        if torch.is_grad_enabled():  # for a second derivative these are functions of the inputs
            squares = x * x
            spread = functional.linear(squares, variance, variance_bias)
            scaled = scaled * (spread.detach() / spread).sqrt()
        to_spread = (grad * scaled) * 0.5
        needed = ctx.needs_input_grad
        return (
            torch.addcmul(grad @ weight, to_spread @ variance, x, value=2) if needed[0] else None,
            grad.t() @ x if needed[1] else None,
            grad.sum(0) if needed[2] else None,
            to_spread.t() @ squares if needed[3] else None,
            to_spread.sum(0) if needed[4] else None,
            None,
        )


def can_fuse(x: Tensor, noise: Tensor | None) -> bool:
    """Whether `dense_output` may take the place of its parts: rows of float32, nothing traced."""
    same = noise is None or (noise.dtype == x.dtype and noise.dim() == 2)
    return same and can_block(x) and x.dim() == 2 and not torch.is_autocast_enabled("cpu")


def dense_output(
    x: Tensor, weight: Tensor, bias: Tensor | None, variance: Tensor, variance_bias: Tensor,
    noise: Tensor,
) -> Tensor:  # fmt: skip
    """m + sqrt(v) noise with m = x weight^T + bias and v = x^2 variance^T + variance_bias.

    v must be positive; noise gets no gradient.

    >>> import torch
    >>> x, one = torch.tensor([[2.0]]), torch.ones(1, 1)
    >>> dense_output(x, one, None, one, torch.zeros(1), one)
    tensor([[4.]])

    Kingma, Salimans & Welling 2015, eq. 6.
    """
    return _DenseOutput.apply(x, weight, bias, variance, variance_bias, noise)
