"""One optimizer step, and a training step that passes the objective through `torch.compile`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from vardrop._core.checks import check_type
from vardrop._core.errors import VardropError
from vardrop._core.torch_private import tree_map_only
from vardrop.objective.elbo import ELBO, ELBOParts

# The normal numbers of Inductor are ten times slower on a CPU.
COMPILE_OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {"fallback_random": True}


def descend(loss: Tensor, optimizer: torch.optim.Optimizer, max_norm: float | None = None) -> None:
    """Update the parameters of an optimizer by the gradient of a loss.

    Args:
        loss: a scalar.
        optimizer: over the parameters.
        max_norm: the largest norm of the gradient of all parameters; None for no limit.
    """
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    if max_norm is not None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(parameters, max_norm)
    optimizer.step()


def compile(elbo: ELBO, optimizer: torch.optim.Optimizer) -> Callable[[Any, Any], ELBOParts]:
    """A training step `step(x, y)` that passes the objective through `torch.compile`.

    A step computes the gradient of a batch, updates the parameters and returns the parts of the
    loss. `torch.compile` needs a C++ compiler on a CPU and Triton on a GPU. Without it the same
    step runs uncompiled. The first call compiles for about half a minute. A batch of another size
    compiles again, so drop the last, shorter batch. Noise comes from torch's global generator, so
    the numbers are the same as without compilation. On a CPU dense models become faster.
    Convolutions are faster uncompiled, in `torch.channels_last`.

    Args:
        elbo: the objective. `beta` may change between steps. With `kl_value_every` above 1 two
            graphs are compiled, with and without the value of the KL.
        optimizer: over its parameters. A fused optimizer (`fused=True`) is fastest.

    Returns:
        The step.

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
        from torch._functorch import config

        if (budget := config.activation_memory_budget) < 1:  # computes activations again
            raise VardropError(
                "Expected torch._functorch.config.activation_memory_budget to be 1, but got "
                f"{budget}: torch would draw the noise of a step a second time for its gradient, "
                "with other numbers. Set it to 1, or train without vardrop.compile."
            )
        # The compiler limits how many versions of one code object it keeps: each model has its own.
        parts.__code__ = parts.__code__.replace(co_name=f"parts_{id(elbo)}")
        compiled = torch.compile(parts, options=COMPILE_OPTIONS)
        forward = partial(elbo.with_cached_kl, compiled)

    def step(x: Any, y: Any) -> ELBOParts:
        loss_parts = forward(x, y)
        descend(loss_parts.loss, optimizer)
        return tree_map_only(torch.Tensor, torch.Tensor.detach, loss_parts)

    return step


def _has_compiler(device: torch.device) -> bool:
    if device.type != "cpu":
        return find_spec("triton") is not None
    return any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "clang++"))
