"""Reports and pictures from the files of runs; no model is run."""

from vardrop._core.errors import import_optional

for _package in ("jinja2", "matplotlib"):
    import_optional(_package)

from vardrop.app.report.comparison import Comparison as Comparison, compare_runs as compare_runs
from vardrop.app.report.page import report as report
from vardrop.app.report.pictures import (
    layer_sparsity as layer_sparsity,
    regression_band as regression_band,
    reliability_diagram as reliability_diagram,
    risk_coverage_curve as risk_coverage_curve,
    score_intervals as score_intervals,
    training_curves as training_curves,
    uncertainty_histograms as uncertainty_histograms,
)
from vardrop.app.store import StoredRun as StoredRun, read_run as read_run
