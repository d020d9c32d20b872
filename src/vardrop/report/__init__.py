"""Pictures and the report: they read what a run wrote, and never run a model."""

from vardrop.errors import needed

for _package in ("jinja2", "matplotlib"):
    needed(_package)

from vardrop.report.page import report  # noqa: E402
from vardrop.report.pictures import (  # noqa: E402
    alpha_histograms,
    certain_examples,
    layer_sparsity,
    regression_band,
    reliability_diagram,
    risk_coverage_curve,
    sparsity_curve,
    training_curves,
    uncertainty_histograms,
    weight_maps,
)
from vardrop.report.run import Run, read_run  # noqa: E402

__all__ = [
    "Run",
    "alpha_histograms",
    "certain_examples",
    "layer_sparsity",
    "read_run",
    "regression_band",
    "reliability_diagram",
    "report",
    "risk_coverage_curve",
    "sparsity_curve",
    "training_curves",
    "uncertainty_histograms",
    "weight_maps",
]
