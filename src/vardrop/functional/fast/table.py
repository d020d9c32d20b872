"""What each fast path replaces, and what it gains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vardrop.functional.fast import additive, normal
from vardrop.functional.log_uniform import plain_kl_additive
from vardrop.functional.noise import GaussianOutput, plain_gaussian_output


@dataclass(frozen=True)
class FastPath:
    """One fast path with its receipt.

    Args:
        applies: whether it may be used, from the arguments of `run`.
        run: the fast path.
        reference: the plain expression that it replaces.
        benchmark: the case on which it was measured.
        factor: the time of the reference over its own time.
        measured: when and how.
    """

    applies: Callable[..., bool]
    run: Callable[..., Any]
    reference: Callable[..., Any]
    benchmark: str
    factor: float
    measured: str


def _plain_weights(weight: Tensor, log_sigma2: Tensor) -> tuple[Tensor, Tensor]:
    return weight, log_sigma2.exp()


_HOW = "2026-11, torch 2.13, one thread, processor time, median of 9 interleaved rounds"
FAST_PATHS = {
    "weights shared by the draws and the KL of a step": FastPath(
        additive.can_share,
        additive.additive_weights,
        _plain_weights,
        "train step with 8 draws: one layer of 1 M weights, sparse VD, batch 8",
        1.6,
        _HOW,
    ),
    "blocked KL": FastPath(
        additive.can_share,
        additive.blocked_kl,
        plain_kl_additive,
        "kl(net) and gradient: 1 M weights",
        5.2,
        _HOW,
    ),
    "gradient of the KL in a compiled graph": FastPath(
        lambda *tensors: torch.compiler.is_compiling(),
        additive.traced_kl,
        plain_kl_additive,
        "train step with `compile` and `kl_value_every`: 1 M weights, compiled",
        3.7,
        _HOW,
    ),
    "Gaussian output": FastPath(
        lambda *tensors: torch.is_grad_enabled(),
        GaussianOutput.apply,
        plain_gaussian_output,
        "train step: the first layer of LeNet-5-Caffe b128, channels-last",
        1.6,
        _HOW,
    ),
    "looked-up normals": FastPath(
        lambda count: count >= normal.MIN_COUNT,
        normal.look_up,
        torch.randn,
        "2^20 normal numbers",
        1.54,
        _HOW,
    ),
}
