"""Pure numerics: formulas on tensors, without modules and without state."""

from vardrop.functional.log_uniform import (
    dawson,
    log_uniform_kl,
    log_uniform_kl_additive,
    log_uniform_kl_bound,
    log_uniform_kl_cubic,
    log_uniform_kl_sigmoid,
)
from vardrop.functional.noise import clamp_max, gaussian_output, random_signs
from vardrop.functional.normal import expected_log1p_square, normal_entropy, normal_kl

__all__ = [
    "clamp_max",
    "dawson",
    "expected_log1p_square",
    "gaussian_output",
    "log_uniform_kl",
    "log_uniform_kl_additive",
    "log_uniform_kl_bound",
    "log_uniform_kl_cubic",
    "log_uniform_kl_sigmoid",
    "normal_entropy",
    "normal_kl",
    "random_signs",
]
