"""Pure numerics: formulas on tensors, without modules and without state."""

from vardrop.functional.additive import AdditiveWeights, shared_weights, sharing
from vardrop.functional.blocks import keep_layout
from vardrop.functional.concrete import (
    bernoulli_entropy,
    bernoulli_kl,
    concrete,
    concrete_logit,
    concrete_mean_ratio,
    log1mexp,
    logit_from_log,
)
from vardrop.functional.drawing import (
    NoiseCalls,
    drawing,
    drawn_from_own,
    generator,
    normal_like,
    own_noise,
    random_signs,
    standard_normal,
    uniform,
)
from vardrop.functional.fused import Convolution, Dense, Product, can_fuse, fused_output
from vardrop.functional.kumaraswamy import (
    kumaraswamy_beta_kl,
    kumaraswamy_log_mean,
    kumaraswamy_log_sample,
)
from vardrop.functional.log_uniform import (
    ard_kl_additive,
    dawson,
    log_uniform_kl,
    log_uniform_kl_additive,
    log_uniform_kl_of_log,
)
from vardrop.functional.log_uniform_fits import (
    log_uniform_kl_bound,
    log_uniform_kl_cubic,
    log_uniform_kl_sigmoid,
)
from vardrop.functional.noise import gaussian_output, log_square, square, wide
from vardrop.functional.normal import (
    expected_log1p_square,
    function_moments,
    max_moments,
    normal_entropy,
    normal_kl,
    relu_moments,
)
from vardrop.functional.projection import project
from vardrop.functional.truncated_log_normal import (
    log_normal_mass,
    truncated_log_normal_kl,
    truncated_log_normal_log_moment,
    truncated_log_normal_log_sample,
    truncated_log_normal_snr,
)

__all__ = [
    "AdditiveWeights",
    "Convolution",
    "Dense",
    "NoiseCalls",
    "Product",
    "ard_kl_additive",
    "bernoulli_entropy",
    "bernoulli_kl",
    "can_fuse",
    "concrete",
    "concrete_logit",
    "concrete_mean_ratio",
    "dawson",
    "drawing",
    "drawn_from_own",
    "expected_log1p_square",
    "function_moments",
    "fused_output",
    "gaussian_output",
    "generator",
    "keep_layout",
    "kumaraswamy_beta_kl",
    "kumaraswamy_log_mean",
    "kumaraswamy_log_sample",
    "log1mexp",
    "log_normal_mass",
    "log_square",
    "log_uniform_kl",
    "log_uniform_kl_additive",
    "log_uniform_kl_bound",
    "log_uniform_kl_cubic",
    "log_uniform_kl_of_log",
    "log_uniform_kl_sigmoid",
    "logit_from_log",
    "max_moments",
    "normal_entropy",
    "normal_kl",
    "normal_like",
    "own_noise",
    "project",
    "random_signs",
    "relu_moments",
    "shared_weights",
    "sharing",
    "square",
    "standard_normal",
    "truncated_log_normal_kl",
    "truncated_log_normal_log_moment",
    "truncated_log_normal_log_sample",
    "truncated_log_normal_snr",
    "uniform",
    "wide",
]
