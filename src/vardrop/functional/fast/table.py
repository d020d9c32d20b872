"""What each fast path replaces, and what it gains."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from vardrop.functional.fast import additive, blocked_kl, normal_table
from vardrop.functional.log_uniform import log_uniform_kl_additive, plain_kl_additive


class FastPath(NamedTuple):
    """One fast path with its measurement.

    Args:
        run: the fast path.
        reference: the plain expression that it replaces.
        benchmark: the case on which it was measured.
        factor: the time of the reference divided by the time of the fast path. Measured in 2026-11
            with torch 2.13 on one thread: processor time, median of 9 interleaved rounds.
    """

    run: Callable[..., Tensor | tuple[object, ...] | None]
    reference: Callable[..., Tensor | tuple[Tensor, ...]]
    benchmark: str
    factor: float


def _plain_weights(weight: Tensor, log_sigma2: Tensor) -> tuple[Tensor, Tensor]:
    return weight, log_sigma2.exp()


FAST_PATHS = {
    "weights shared by the draws and the KL of a step": FastPath(
        additive.additive_weights,
        _plain_weights,
        "train step with 8 draws: one layer of 1 M weights, sparse VD, batch 8",
        1.6,
    ),
    "blocked KL": FastPath(
        log_uniform_kl_additive, blocked_kl.compiled_kl, "kl(net) and gradient: 1 M weights", 5.2
    ),
    "gradient of the KL in a compiled graph": FastPath(
        blocked_kl.compiled_kl,
        plain_kl_additive,
        "train step with `compile` and `kl_value_every`: 1 M weights, compiled",
        3.7,
    ),
    "looked-up normals": FastPath(normal_table.look_up, torch.randn, "2^20 normal numbers", 1.54),
}
