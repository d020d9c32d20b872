"""Scores for predictive distributions: accuracy, calibration, ranking and regression.

Every function is pure: tensors in, a tensor or a named tuple of tensors out. Results keep the
precision of the input, and half precision input is scored in single precision.
"""

from vardrop.metrics.calibration import ReliabilityCurve as ReliabilityCurve, Scheme as Scheme
from vardrop.metrics.calibration import ece as ece, reliability_curve as reliability_curve
from vardrop.metrics.classification import accuracy as accuracy, brier as brier, nll as nll
from vardrop.metrics.classification import nll_from_log_probs as nll_from_log_probs
from vardrop.metrics.ranking import RiskCoverage as RiskCoverage, aurc as aurc, auroc as auroc
from vardrop.metrics.ranking import risk_coverage as risk_coverage
from vardrop.metrics.regression import crps_gaussian as crps_gaussian
from vardrop.metrics.regression import interval_coverage as interval_coverage
from vardrop.metrics.regression import interval_width as interval_width
