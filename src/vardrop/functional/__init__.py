"""Formulas on tensors, without modules. State, such as the noise source, belongs to a thread."""

from vardrop.functional import truncated_log_normal as truncated_log_normal
from vardrop.functional.elementwise import clamp_with_gradient as clamp_with_gradient
from vardrop.functional.elementwise import log1mexp as log1mexp, log_square as log_square
from vardrop.functional.elementwise import logit_from_log as logit_from_log
from vardrop.functional.elementwise import to_float32_or_wider as to_float32_or_wider
from vardrop.functional.fast.additive import AdditiveWeights as AdditiveWeights
from vardrop.functional.fast.blocked_kl import keep_layout as keep_layout
from vardrop.functional.fast.additive import share_in_step as share_in_step
from vardrop.functional.fast.additive import shared_weights as shared_weights
from vardrop.functional.log_uniform import ard_kl_additive as ard_kl_additive, dawson as dawson
from vardrop.functional.log_uniform import log_uniform_kl as log_uniform_kl
from vardrop.functional.log_uniform import log_uniform_kl_additive as log_uniform_kl_additive
from vardrop.functional.log_uniform import log_uniform_kl_bound as log_uniform_kl_bound
from vardrop.functional.log_uniform import log_uniform_kl_cubic as log_uniform_kl_cubic
from vardrop.functional.log_uniform import log_uniform_kl_of_log as log_uniform_kl_of_log
from vardrop.functional.log_uniform import log_uniform_kl_sigmoid as log_uniform_kl_sigmoid
from vardrop.functional.noise import gaussian_output as gaussian_output
from vardrop.functional.normal import expected_log1p_square as expected_log1p_square
from vardrop.functional.normal import function_moments as function_moments
from vardrop.functional.normal import max_moments as max_moments, normal_entropy as normal_entropy
from vardrop.functional.normal import normal_kl as normal_kl, relu_moments as relu_moments
from vardrop.functional.random import GeneratorNoise as GeneratorNoise, RandomOpMode as RandomOpMode
from vardrop.functional.random import TensorNoise as TensorNoise
from vardrop.functional.random import call_with_generator as call_with_generator
from vardrop.functional.random import draw_from as draw_from, generator as generator
from vardrop.functional.random import noise_is_given as noise_is_given, noise_source as noise_source
from vardrop.functional.random import normal_like as normal_like, random_signs as random_signs
from vardrop.functional.random import redirect_random_ops as redirect_random_ops
from vardrop.functional.random import restore_state_on_error as restore_state_on_error
from vardrop.functional.random import standard_normal as standard_normal, uniform as uniform
from vardrop.functional.unit_interval import bernoulli_entropy as bernoulli_entropy
from vardrop.functional.unit_interval import bernoulli_kl as bernoulli_kl, concrete as concrete
from vardrop.functional.unit_interval import concrete_logit as concrete_logit
from vardrop.functional.unit_interval import concrete_mean_ratio as concrete_mean_ratio
from vardrop.functional.unit_interval import kumaraswamy_beta_kl as kumaraswamy_beta_kl
from vardrop.functional.unit_interval import kumaraswamy_log_mean as kumaraswamy_log_mean
from vardrop.functional.unit_interval import kumaraswamy_log_sample as kumaraswamy_log_sample
