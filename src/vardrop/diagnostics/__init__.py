"""Instruments to look inside noise: alphas, gradient variance, curvature, permutations."""

from vardrop.diagnostics.alpha import (
    AlphaSummary as AlphaSummary,
    Sparsity as Sparsity,
    alpha_summary as alpha_summary,
    sparsity as sparsity,
)
from vardrop.diagnostics.batch_variance import (
    LikelihoodCovariance as LikelihoodCovariance,
    gradient_variance as gradient_variance,
    likelihood_covariance as likelihood_covariance,
)
from vardrop.diagnostics.curvature import kappa as kappa
from vardrop.diagnostics.measuring import Estimate as Estimate
from vardrop.diagnostics.noise_level import (
    activation_alpha as activation_alpha,
    noise_level as noise_level,
)
from vardrop.diagnostics.permutation import (
    PermutationTest as PermutationTest,
    Permuted as Permuted,
    permutation_test as permutation_test,
    permute_variances as permute_variances,
)
from vardrop.diagnostics.transition import (
    Accuracies as Accuracies,
    Transition as Transition,
    accuracies as accuracies,
    transition as transition,
)
