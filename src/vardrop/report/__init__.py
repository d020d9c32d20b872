"""Pictures and the report: they read what a run wrote, and never run a model."""

import warnings
from typing import Any

from vardrop.errors import needed

for _package in ("jinja2", "matplotlib"):
    needed(_package)

from vardrop.report.comparison import Comparison as Comparison, compare_runs as compare_runs
from vardrop.report.page import report as report
from vardrop.report.pictures.certainty import (
    regression_band as regression_band,
    reliability_diagram as reliability_diagram,
    risk_coverage_curve as risk_coverage_curve,
    uncertainty_histograms as uncertainty_histograms,
)
from vardrop.report.pictures.comparison import score_intervals as score_intervals
from vardrop.report.pictures.maps import (
    certain_examples as certain_examples,
    weight_maps as weight_maps,
)
from vardrop.report.pictures.sparsity import (
    alpha_histograms as alpha_histograms,
    layer_sparsity as layer_sparsity,
    sparsity_curve as sparsity_curve,
)
from vardrop.report.pictures.training import training_curves as training_curves
from vardrop.report.run import (
    StoredRun as StoredRun,
    read_run as read_run,
)


def __getattr__(name: str) -> Any:
    if name != "Run":
        raise AttributeError(f"module 'vardrop.report' has no attribute {name!r}")
    text = "vardrop.report.Run is vardrop.report.StoredRun now; the name goes with the next version"
    warnings.warn(text, DeprecationWarning, stacklevel=2)
    return StoredRun
