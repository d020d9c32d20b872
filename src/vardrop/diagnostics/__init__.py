"""Instruments to look inside noise: alphas, gradient variance, curvature, permutations."""

from vardrop.diagnostics.alpha import AlphaSummary, Sparsity, alpha_summary, sparsity
from vardrop.diagnostics.curvature import kappa
from vardrop.diagnostics.estimate import Estimate
from vardrop.diagnostics.gradients import gradient_variance
from vardrop.diagnostics.likelihood import LikelihoodCovariance, likelihood_covariance
from vardrop.diagnostics.noise_level import activation_alpha, noise_level
from vardrop.diagnostics.permutation import (
    PermutationTest,
    Permuted,
    permutation_test,
    permute_variances,
)
from vardrop.diagnostics.transition import Accuracies, Transition, accuracies, transition

__all__ = [
    "Accuracies",
    "AlphaSummary",
    "Estimate",
    "LikelihoodCovariance",
    "PermutationTest",
    "Permuted",
    "Sparsity",
    "Transition",
    "accuracies",
    "activation_alpha",
    "alpha_summary",
    "gradient_variance",
    "kappa",
    "likelihood_covariance",
    "noise_level",
    "permutation_test",
    "permute_variances",
    "sparsity",
    "transition",
]
