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
    """The same beta throughout.

    >>> constant(0.5)(10)
    0.5
    """
    check_number("beta", beta, at_least=0)
    return lambda step: beta


def linear_warmup(start: float, end: float, beta: float = 1.0) -> Schedule:
    """0 until `start`, a straight line, `beta` from `end` on.

    Sparse VD's authors use epochs 5 and 20.

    >>> [linear_warmup(5, 20)(e) for e in (0, 5, 10, 20)]
    [0.0, 0.0, 0.3333333333333333, 1.0]

    Soenderby et al. 2016, "Ladder variational autoencoders", sec. 2.3.
    """
    check_number("start", start, at_least=0)
    check_number("end", end)
    if not start < end:
        raise VardropError(f"Expected 0 <= `start` < `end`, but got {start} and {end}.")
    check_number("beta", beta, at_least=0)
    return lambda step: beta * min(max((step - start) / (end - start), 0.0), 1.0)


def cyclical(period: float, rise: float = 0.5, beta: float = 1.0) -> Schedule:
    """Repeats a rise from 0 to `beta` over the first part `rise` of each period.

    >>> [cyclical(10)(s) for s in (0, 2.5, 5, 9, 10)]
    [0.0, 0.5, 1.0, 1.0, 0.0]

    Fu et al. 2019, "Cyclical annealing schedule", eq. 6.
    """
    check_number("period", period, above=0)
    check_number("rise", rise, above=0, at_most=1)
    check_number("beta", beta, at_least=0)
    return lambda step: beta * min(math.fmod(step, period) / (rise * period), 1.0)


def parameter_groups(
    module: nn.Module,
    lr: float | None = None,
    noise_lr: float | None = None,
    weight_decay: float = 0.0,
) -> list[dict[str, Any]]:
    """Split the parameters of a net or an ELBO into weights and noise, for any torch optimizer.

    Weight decay on log sigma^2 or log alpha would pull the noise up; the noise group has none.

    Args:
        module: the net, or the ELBO (then a learned likelihood is included).
        lr: learning rate of the weights; the optimizer's own where None.
        noise_lr: learning rate of the noise parameters; `lr` where None.
        weight_decay: of the weights only.

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
    weights = [p for p in module.parameters() if id(p) not in noise and p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": weights, "weight_decay": weight_decay},
        {"params": [p for p in noise.values() if p.requires_grad], "weight_decay": 0.0},
    ]
    for group, rate in zip(groups, (lr, noise_lr if noise_lr is not None else lr), strict=True):
        if rate is not None:
            group["lr"] = rate
    groups = [group for group in groups if group["params"]]
    if not groups:
        raise VardropError(
            f"Expected `module` to have parameters to train, but got {type(module).__name__} "
            "without any. Set `requires_grad` on those that are frozen."
        )
    return groups
