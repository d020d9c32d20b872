"""Schedules of the KL weight, and the parameter groups of weights and noise."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import nn

from vardrop._core.checks import check_net, check_number
from vardrop._core.errors import VardropError
from vardrop.noisy import Noisy

Schedule = Callable[[float], float]


def constant(beta: float = 1.0) -> Schedule:
    """The same beta in every epoch.

    Args:
        beta: the weight of the KL.

    Returns:
        A function of the epoch.

    >>> constant(0.5)(10)
    0.5
    """
    check_number("beta", beta, at_least=0)
    return lambda epoch: beta


def linear_warmup(start: float, end: float, beta: float = 1.0) -> Schedule:
    """0 until `start`, then a linear increase to `beta` at `end`.

    The authors of sparse VD use epochs 5 and 20.

    Args:
        start: the epoch at which the increase starts.
        end: the epoch at which beta is reached.
        beta: the weight of the KL from then on.

    Returns:
        A function of the epoch.

    >>> [linear_warmup(5, 20)(e) for e in (0, 5, 10, 20)]
    [0.0, 0.0, 0.3333333333333333, 1.0]

    Soenderby et al. 2016, "Ladder variational autoencoders", sec. 2.3.
    """
    check_number("start", start, at_least=0)
    check_number("end", end)
    if not start < end:
        raise VardropError(f"Expected 0 <= `start` < `end`, but got {start} and {end}.")
    check_number("beta", beta, at_least=0)
    return lambda epoch: beta * min(max((epoch - start) / (end - start), 0.0), 1.0)


def cyclical(period: float, rise: float = 0.5, beta: float = 1.0) -> Schedule:
    """An increase from 0 to `beta` in the first part of every period.

    Args:
        period: the number of epochs per cycle.
        rise: the fraction of a period in which beta increases.
        beta: the weight of the KL in the rest of the period.

    Returns:
        A function of the epoch.

    >>> [cyclical(10)(e) for e in (0, 2.5, 5, 9, 10)]
    [0.0, 0.5, 1.0, 1.0, 0.0]

    Fu et al. 2019, "Cyclical annealing schedule", eq. 6.
    """
    check_number("period", period, above=0)
    check_number("rise", rise, above=0, at_most=1)
    check_number("beta", beta, at_least=0)
    return lambda epoch: beta * min(math.fmod(epoch, period) / (rise * period), 1.0)


def parameter_groups(
    module: nn.Module,
    lr: float | None = None,
    noise_lr: float | None = None,
    weight_decay: float = 0.0,
) -> list[dict[str, Any]]:
    """Split the parameters of a model or an ELBO into weights and noise, for any torch optimizer.

    Weight decay on log sigma^2 or log alpha would increase the noise, so the noise group has none.

    Args:
        module: the model, or the ELBO with the parameters of a learned likelihood.
        lr: learning rate of the weights. None uses the default of the optimizer.
        noise_lr: learning rate of the noise parameters. None uses `lr`.
        weight_decay: of the weights only.

    Returns:
        One parameter group for the weights and one for the noise, without empty groups.

    >>> import torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Linear(4, 3), vd.sparse_vd())
    >>> [len(g["params"]) for g in vd.parameter_groups(net, weight_decay=1e-4)]
    [2, 1]
    """
    check_net(module, "module")
    for name, rate in (("lr", lr), ("noise_lr", noise_lr)):
        if rate is not None:
            check_number(name, rate, at_least=0)
    check_number("weight_decay", weight_decay, at_least=0)
    noise = {id(t): t for m in module.modules() if isinstance(m, Noisy) for t in m.noise_tensors()}
    weights = [p for p in module.parameters() if id(p) not in noise]
    noise_lr = lr if noise_lr is None else noise_lr
    groups: list[dict[str, Any]] = []
    for parameters, decay, rate in ((weights, weight_decay, lr), (noise.values(), 0.0, noise_lr)):
        if trained := [p for p in parameters if p.requires_grad]:
            group = {"params": trained, "weight_decay": decay}
            groups.append(group if rate is None else {**group, "lr": rate})
    if not groups:
        raise VardropError(
            f"Expected `module` to have parameters to train, but got {type(module).__name__} "
            "without any. Set `requires_grad` on those that are frozen."
        )
    return groups
