"""Scores for predictive distributions: accuracy, calibration, ranking and regression.

Every function is pure: tensors in, a tensor or a named tuple of tensors out. Results keep the
precision of the input, and half precision input is scored in single precision.
"""

from vardrop.metrics.classification import ReliabilityCurve as ReliabilityCurve
from vardrop.metrics.classification import RiskCoverage as RiskCoverage, Scheme as Scheme
from vardrop.metrics.classification import accuracy as accuracy, aurc as aurc, auroc as auroc
from vardrop.metrics.classification import brier as brier, ece as ece, nll as nll
from vardrop.metrics.classification import nll_from_log_probs as nll_from_log_probs
from vardrop.metrics.classification import reliability_curve as reliability_curve
from vardrop.metrics.classification import risk_coverage as risk_coverage
from vardrop.metrics.regression import crps_gaussian as crps_gaussian
from vardrop.metrics.regression import interval_coverage as interval_coverage
from vardrop.metrics.regression import interval_width as interval_width
