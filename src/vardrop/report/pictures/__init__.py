"""Pictures: each is a function on data that returns a matplotlib Axes, also in a notebook.

Without `ax` a picture is drawn on a figure of its own, which `ax.figure` shows in a notebook.
"""

from vardrop.report.pictures.certainty import (
    regression_band,
    reliability_diagram,
    risk_coverage_curve,
    uncertainty_histograms,
)
from vardrop.report.pictures.maps import certain_examples, weight_maps
from vardrop.report.pictures.sparsity import alpha_histograms, layer_sparsity, sparsity_curve
from vardrop.report.pictures.training import training_curves

__all__ = [
    "alpha_histograms",
    "certain_examples",
    "layer_sparsity",
    "regression_band",
    "reliability_diagram",
    "risk_coverage_curve",
    "sparsity_curve",
    "training_curves",
    "uncertainty_histograms",
    "weight_maps",
]
