"""The concrete relaxation of binary noise, in log space, and the numbers it needs."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

_LOG_HALF = -0.6931471805599453
_NEGLIGIBLE = 1e-12


def log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x < 0, accurate near 0 and far from it.

    >>> import torch
    >>> log1mexp(torch.tensor([-1e-6, -1.0, -10.0]))
    tensor([-1.3816e+01, -4.5868e-01, -4.5401e-05])

    Maechler 2012, "Accurately computing log(1 - exp(-|a|))".
    """
    near = x > _LOG_HALF
    # Each branch sees only arguments where it and its gradient are finite.
    by_expm1 = torch.log(-torch.expm1(torch.where(near, x, _LOG_HALF)))
    by_log1p = torch.log1p(-torch.exp(torch.where(near, _LOG_HALF, x)))
    return torch.where(near, by_expm1, by_log1p)


def logit_from_log(log_probability: Tensor) -> Tensor:
    """logit(p) from log p, for probabilities that would underflow.

    log p is kept one rounding step below 0, so that p = 1 has a finite logit.

    >>> import torch
    >>> logit_from_log(torch.tensor([0.0, -1e5]))
    tensor([ 1.5942e+01, -1.0000e+05])
    """
    below = log_probability.clamp(max=-torch.finfo(log_probability.dtype).eps)
    return below - log1mexp(below)


def concrete_logit(logit: Tensor, noise: Tensor, temperature: float) -> Tensor:
    """The logit of a relaxed Bernoulli draw, (logit + logit(u)) / temperature for uniform u.

    >>> import torch
    >>> concrete_logit(torch.tensor(1.0), torch.tensor(0.5), 0.1)
    tensor(10.)
    """
    return (logit + torch.logit(noise)) / temperature


def concrete(logit: Tensor, noise: Tensor, temperature: float) -> Tensor:
    """A relaxed Bernoulli draw in [0, 1], sigmoid((logit + logit(u)) / temperature).

    It tends to a Bernoulli(sigmoid(logit)) draw as the temperature falls, and the probability of
    exceeding 1/2 is sigmoid(logit) at every temperature. Draws below 1e-12 are exactly zero: they
    change no sum, but the denormal numbers that they lead to slow a matrix product many times.

    >>> import torch
    >>> concrete(torch.tensor(0.0), torch.tensor(0.5), 0.1)
    tensor(0.5000)

    Maddison, Mnih & Teh 2017, "The concrete distribution", app. B; Jang et al. 2017.
    """
    draw = torch.sigmoid(concrete_logit(logit, noise, temperature))
    return functional.threshold(draw, _NEGLIGIBLE, 0.0)


def concrete_mean_ratio(logit: Tensor, temperature: float) -> Tensor:
    """The mean of a relaxed Bernoulli draw over that of the binary one, sigmoid(logit).

    With logistic y and y', E sigmoid((logit + y) / t) = P(t y' < logit + y) = E sigmoid(logit -
    t y'), whose integrand is analytic in a strip: the trapezoidal rule converges exponentially.

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

    >>> import torch
    >>> bernoulli_kl(torch.tensor([0.0, 1e4]), torch.tensor([0.0, -1e4]))
    tensor([    0., 10000.])
    """
    kept = functional.logsigmoid(logit_q) - functional.logsigmoid(logit_p)
    dropped = functional.logsigmoid(-logit_q) - functional.logsigmoid(-logit_p)
    return torch.sigmoid(logit_q) * kept + torch.sigmoid(-logit_q) * dropped


def bernoulli_entropy(logit: Tensor) -> Tensor:
    """Entropy of Bernoulli(sigmoid(logit)) in nats, elementwise.

    >>> import torch
    >>> bernoulli_entropy(torch.tensor([0.0, 2.0]))
    tensor([0.6931, 0.3653])
    """
    kept = torch.sigmoid(logit) * functional.logsigmoid(logit)
    dropped = torch.sigmoid(-logit) * functional.logsigmoid(-logit)
    return -(kept + dropped)
