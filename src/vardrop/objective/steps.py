"""What a training step needs beside the objective: beta by step, parameter groups, compilation."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from vardrop._core.checks import check_net, check_number, check_type
from vardrop._core.errors import VardropError
from vardrop._core.torch_private import tree_map_only
from vardrop.noisy import Noisy
from vardrop.objective.elbo import ELBO, ELBOParts

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
    found = [g for g in groups if g["params"]]
    if not found:
        raise VardropError(
            f"Expected `module` to have parameters to train, but got {type(module).__name__} "
            "without any. Set `requires_grad` on those that are frozen."
        )
    return found


def compile(elbo: ELBO, optimizer: torch.optim.Optimizer) -> Callable[[Any, Any], ELBOParts]:
    """A training step `step(x, y)`: the gradient of a batch, one update, and the parts of the loss.

    The objective goes through `torch.compile`, which needs a C++ compiler on a CPU and Triton on a
    GPU; where there is none, the same step runs as it is. The first call compiles, for half a
    minute or so, and a batch of another size compiles once more: drop the last, shorter batch.
    Noise comes from torch's own generator, so the numbers are those of the plain step. On a CPU
    this pays for dense nets; convolutions are faster as they are, in `torch.channels_last`.

    Args:
        elbo: the objective; `beta` may change between steps. With `kl_value_every` above 1 two
            forms are compiled, with and without the value of the KL.
        optimizer: over its parameters; a fused one (`fused=True`) is fastest.

    >>> import torch, vardrop as vd
    >>> elbo = vd.ELBO(vd.convert(torch.nn.Linear(4, 3), vd.sparse_vd()), vd.Categorical(), 100)
    >>> step = compile(elbo, torch.optim.Adam(elbo.parameters()))  # doctest: +SKIP
    >>> out = step(torch.randn(8, 4), torch.zeros(8, dtype=torch.long))  # doctest: +SKIP
    """
    check_type("elbo", elbo, ELBO, "a vardrop.ELBO")
    check_type("optimizer", optimizer, torch.optim.Optimizer, "an optimizer of torch.optim")

    def parts(x: Any, y: Any, latest: Tensor | None) -> ELBOParts:
        return elbo.parts(x, y, latest)

    forward: Callable[[Any, Any], ELBOParts] = elbo
    if _has_compiler(elbo.beta.device):
        _check_budget()
        # The compiler bounds how many versions of one code object it keeps: each net has its own.
        parts.__code__ = parts.__code__.replace(co_name=f"parts_{id(elbo)}")
        # Inductor's own normal numbers are ten times slower on a CPU.
        forward = partial(elbo.counted, torch.compile(parts, options={"fallback_random": True}))

    def step(x: Any, y: Any) -> ELBOParts:
        optimizer.zero_grad(set_to_none=True)
        out = forward(x, y)
        out.loss.backward()
        optimizer.step()
        return tree_map_only(torch.Tensor, torch.Tensor.detach, out)

    return step


def _check_budget() -> None:
    """Refuse a budget below which torch computes activations again, with other noise."""
    from torch._functorch import config

    budget = config.activation_memory_budget
    if budget < 1:
        raise VardropError(
            "Expected torch._functorch.config.activation_memory_budget to be 1, but got "
            f"{budget}: torch would draw the noise of a step a second time for its gradient, and "
            "other numbers than the first. Set it to 1, or train without vardrop.compile."
        )


def _has_compiler(device: torch.device) -> bool:
    if device.type != "cpu":
        return find_spec("triton") is not None
    return any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "clang++"))
