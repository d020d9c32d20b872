"""Instruments to look inside noise: alphas and curvature."""

from vardrop.diagnostics.alpha import (
    AlphaSummary as AlphaSummary,
    Sparsity as Sparsity,
    alpha_summary as alpha_summary,
    sparsity as sparsity,
)
from vardrop.diagnostics.curvature import kappa as kappa
