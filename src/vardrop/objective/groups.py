"""Parameter groups: noise parameters apart from weights, so that no decay pulls at them."""

from __future__ import annotations

from typing import Any

from torch import nn

from vardrop.checks import check_net, check_number
from vardrop.errors import VardropError
from vardrop.noisy import Noisy


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
    found = [g for g in groups if g["params"]]
    if not found:
        raise VardropError(
            f"Expected `module` to have parameters to train, but got {type(module).__name__} "
            "without any. Set `requires_grad` on those that are frozen."
        )
    return found
