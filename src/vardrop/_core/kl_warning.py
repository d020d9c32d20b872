"""The warning about training without the KL."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import nn

from vardrop._core.sharding import is_sharded
from vardrop._core.torch_private import in_transform

# A layer is being trained if its parameters change in the second half of this many passes.
# Gradient accumulation, or several draws per step, do not change parameters in between.
_PASSES = 100
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element
_NO_KL = (
    f"A noisy model is being trained, but its KL was not used in {_PASSES} passes. Without the KL "
    "the noise vanishes. Minimise vardrop.ELBO(net, likelihood, num_data)(x, y).loss, "
    "or add vardrop.kl(net) / num_data to the loss. ELBO(..., beta=0) trains without it."
)


class _Noisy(Protocol):
    training: bool

    def owes_kl(self) -> bool: ...
    def parameters(self) -> Iterator[nn.Parameter]: ...


def count_pass(module: _Noisy) -> None:
    """Count a noisy pass in training, and warn once if parameters are trained without the KL.

    Using the KL sets `passes_without_kl` of the module to 0.

    Args:
        module: a noisy module.
    """
    traced = torch.compiler.is_compiling() or in_transform()
    if traced or not module.training or not torch.is_grad_enabled():
        return
    state = vars(module)  # nn.Module.__setattr__ is slow
    state["passes_without_kl"] = passes = state.get("passes_without_kl", 0) + 1
    if passes == _PASSES // 2:  # not reached by steps that use the KL
        state["_checksums"] = _parameter_checksums(module)
    elif passes == _PASSES:
        state["passes_without_kl"] = 0
        if _parameter_checksums(module) != state.get("_checksums") and module.owes_kl():
            state["passes_without_kl"] = -math.inf  # once
            warnings.warn(_NO_KL, stacklevel=3)


def _parameter_checksums(module: _Noisy) -> tuple[int, ...]:
    """The sum of the bits of every trained parameter, which any update changes.

    A fused optimizer does not raise the version of a tensor.
    """
    trained = (p.detach() for p in module.parameters() if p.requires_grad)
    local = (p.to_local() if is_sharded(p) else p for p in trained)
    return tuple(int(p.view(_BITS[p.element_size()]).sum()) for p in local)
