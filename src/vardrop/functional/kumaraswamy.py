"""The Kumaraswamy distribution on (0, 1), in log space, and its KL to a beta prior."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vardrop.functional.concrete import log1mexp

_EULER = 0.5772156649015329


def kumaraswamy_log_sample(a: Tensor, b: Tensor, noise: Tensor) -> Tensor:
    """log pi for pi = (1 - u^(1/b))^(1/a) and uniform u; no underflow for small a.

    >>> import torch
    >>> kumaraswamy_log_sample(torch.tensor(1.0), torch.tensor(1.0), torch.tensor(0.5))
    tensor(-0.6931)

    Nalisnick & Smyth 2017, "Stick-breaking variational autoencoders", eq. 5.
    """
    # u^(1/b) below one rounding step of 1 keeps the inner logarithm and its gradient finite.
    power = (noise.log() / b).clamp(max=-torch.finfo(noise.dtype).tiny)
    return log1mexp(power) / a


def kumaraswamy_log_mean(a: Tensor, b: Tensor) -> Tensor:
    """log E pi = log b + log B(1 + 1/a, b), elementwise, in double precision inside.

    >>> import torch
    >>> kumaraswamy_log_mean(torch.tensor(1.0), torch.tensor(1.0)).exp()
    tensor(0.5000)
    """
    inverse, wide_b = 1 / a.double(), b.double()
    beta = torch.lgamma(1 + inverse) + torch.lgamma(wide_b) - torch.lgamma(1 + inverse + wide_b)
    return (wide_b.log() + beta).to(a.dtype)


def kumaraswamy_beta_kl(a: Tensor, b: Tensor, alpha: float) -> Tensor:
    """KL(Kumaraswamy(a, b) || Beta(alpha, 1)), elementwise; zero at a = alpha, b = 1.

    (alpha/a - 1) (gamma + psi(b + 1)) + log(a b / alpha) - (b - 1) / b, where psi(b + 1) stands
    for the psi(b) + 1/b of the paper, which cancels for small b.

    >>> import torch
    >>> kumaraswamy_beta_kl(torch.tensor(0.5), torch.tensor(1.0), 0.5)
    tensor(0.)

    Lee et al. 2018, "Adaptive network sparsification with dependent variational beta-Bernoulli
    dropout", eq. 15.
    """
    digamma = _EULER + torch.digamma(b + 1)
    return (alpha / a - 1) * digamma + a.log() + b.log() - math.log(alpha) - 1 + 1 / b
