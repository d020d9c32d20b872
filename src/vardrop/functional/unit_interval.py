"""Distributions on (0, 1) in log space: relaxed Bernoulli and Kumaraswamy, with their KLs."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from vardrop.functional.elementwise import log1mexp

_NEGLIGIBLE = 1e-12
_EULER = 0.5772156649015329


def concrete_logit(logit: Tensor, noise: Tensor, temperature: float) -> Tensor:
    """The logit of a relaxed Bernoulli draw, (logit + logit(u)) / temperature for uniform u.

    Args:
        logit: the logit of the probability.
        noise: uniform numbers in (0, 1).
        temperature: of the relaxation.

    Returns:
        The logits of the draws.

    >>> import torch
    >>> concrete_logit(torch.tensor(1.0), torch.tensor(0.5), 0.1)
    tensor(10.)
    """
    return (logit + torch.logit(noise)) / temperature


def concrete(logit: Tensor, noise: Tensor, temperature: float) -> Tensor:
    """A relaxed Bernoulli draw in [0, 1], sigmoid((logit + logit(u)) / temperature).

    It tends to a Bernoulli(sigmoid(logit)) draw as the temperature falls, and the probability of
    exceeding 1/2 is sigmoid(logit) at every temperature. Draws below 1e-12 are exactly zero.
    They change no sum, but denormal numbers make a matrix product many times slower.

    Args:
        logit: the logit of the probability.
        noise: uniform numbers in (0, 1).
        temperature: of the relaxation.

    Returns:
        The draws.

    >>> import torch
    >>> concrete(torch.tensor(0.0), torch.tensor(0.5), 0.1)
    tensor(0.5000)

    Maddison, Mnih & Teh 2017, "The concrete distribution", app. B; Jang et al. 2017.
    """
    draw = torch.sigmoid(concrete_logit(logit, noise, temperature))
    return functional.threshold(draw, _NEGLIGIBLE, 0.0)


def concrete_mean_ratio(logit: Tensor, temperature: float) -> Tensor:
    """The mean of a relaxed Bernoulli draw divided by sigmoid(logit), the mean of a binary draw.

    With logistic y and y', E sigmoid((logit + y) / t) = P(t y' < logit + y) = E sigmoid(logit -
    t y'). The integrand is analytic in a strip, so the trapezoidal rule converges exponentially.

    Args:
        logit: the logit of the probability.
        temperature: of the relaxation.

    Returns:
        The ratios, in the shape of the logit.

    >>> import torch
    >>> concrete_mean_ratio(torch.tensor([0.0, 2.1972]), 2 / 3)
    tensor([1.0000, 0.9497])
    """
    step = 0.5 / max(1.0, temperature)
    # Beyond 120 the integrand is under 1e-17.
    nodes = torch.arange(-120, 120 + step, step, dtype=torch.float64, device=logit.device)
    density = torch.exp(functional.logsigmoid(nodes) + functional.logsigmoid(-nodes)) * step
    wide = logit.double().unsqueeze(-1)
    ratio = functional.logsigmoid(wide - temperature * nodes) - functional.logsigmoid(wide)
    return (ratio.exp() * density).sum(-1).to(logit.dtype)


def bernoulli_kl(logit_q: Tensor, logit_p: Tensor) -> Tensor:
    """KL(Bernoulli(sigmoid(logit_q)) || Bernoulli(sigmoid(logit_p))), elementwise.

    Finite for logits of any finite size.

    Args:
        logit_q: the logit of q.
        logit_p: the logit of p.

    Returns:
        The KLs in nats.

    >>> import torch
    >>> bernoulli_kl(torch.tensor([0.0, 1e4]), torch.tensor([0.0, -1e4]))
    tensor([    0., 10000.])
    """
    retained = functional.logsigmoid(logit_q) - functional.logsigmoid(logit_p)
    dropped = functional.logsigmoid(-logit_q) - functional.logsigmoid(-logit_p)
    return torch.sigmoid(logit_q) * retained + torch.sigmoid(-logit_q) * dropped


def bernoulli_entropy(logit: Tensor) -> Tensor:
    """Entropy of Bernoulli(sigmoid(logit)) in nats, elementwise.

    Args:
        logit: the logit of the probability.

    Returns:
        The entropies in nats.

    >>> import torch
    >>> bernoulli_entropy(torch.tensor([0.0, 2.0]))
    tensor([0.6931, 0.3653])
    """
    retained = torch.sigmoid(logit) * functional.logsigmoid(logit)
    dropped = torch.sigmoid(-logit) * functional.logsigmoid(-logit)
    return -(retained + dropped)


def kumaraswamy_log_sample(a: Tensor, b: Tensor, noise: Tensor) -> Tensor:
    """log pi for pi = (1 - u^(1/b))^(1/a) and uniform u, without underflow for small a.

    Args:
        a: positive.
        b: positive.
        noise: uniform numbers in (0, 1).

    Returns:
        The logarithms of the draws.

    >>> import torch
    >>> kumaraswamy_log_sample(torch.tensor(1.0), torch.tensor(1.0), torch.tensor(0.5))
    tensor(-0.6931)

    Nalisnick & Smyth 2017, "Stick-breaking variational autoencoders", eq. 5.
    """
    # u^(1/b) below one rounding step of 1 keeps the inner logarithm and its gradient finite.
    return log1mexp((noise.log() / b).clamp(max=-torch.finfo(noise.dtype).tiny)) / a


def kumaraswamy_log_mean(a: Tensor, b: Tensor) -> Tensor:
    """log E pi = log b + log B(1 + 1/a, b), elementwise, computed in double precision.

    Args:
        a: positive.
        b: positive.

    Returns:
        The logarithms of the means.

    >>> import torch
    >>> kumaraswamy_log_mean(torch.tensor(1.0), torch.tensor(1.0)).exp()
    tensor(0.5000)
    """
    inverse, wide_b = 1 / a.double(), b.double()
    beta = torch.lgamma(1 + inverse) + torch.lgamma(wide_b) - torch.lgamma(1 + inverse + wide_b)
    return (wide_b.log() + beta).to(a.dtype)


def kumaraswamy_beta_kl(a: Tensor, b: Tensor, alpha: float) -> Tensor:
    """KL(Kumaraswamy(a, b) || Beta(alpha, 1)), elementwise. It is zero for a = alpha, b = 1.

    (alpha/a - 1) (gamma + psi(b + 1)) + log(a b / alpha) - (b - 1) / b. The paper has psi(b) +
    1/b instead of psi(b + 1), which cancels for small b.

    Args:
        a: positive.
        b: positive.
        alpha: of the prior.

    Returns:
        The KLs in nats.

    >>> import torch
    >>> kumaraswamy_beta_kl(torch.tensor(0.5), torch.tensor(1.0), 0.5)
    tensor(0.)

    Lee et al. 2018, "Adaptive network sparsification with dependent variational beta-Bernoulli
    dropout", eq. 15.
    """
    digamma = _EULER + torch.digamma(b + 1)
    return (alpha / a - 1) * digamma + a.log() + b.log() - math.log(alpha) - 1 + 1 / b
