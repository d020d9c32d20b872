"""Scores for predictive distributions: accuracy, calibration, ranking and regression.

Every function is pure: tensors in, a tensor or a named tuple of tensors out. Results keep the
precision of the input, and half precision input is scored in single precision.
"""

from vardrop.metrics.binning import Scheme
from vardrop.metrics.calibration import (
    ECEInterval,
    ReliabilityCurve,
    classwise_ece,
    ece,
    ece_interval,
    reliability_curve,
)
from vardrop.metrics.classification import (
    BrierDecomposition,
    accuracy,
    brier,
    brier_decomposition,
    nll,
    nll_from_log_probs,
)
from vardrop.metrics.ranking import RiskCoverage, aupr, aurc, auroc, fpr95, risk_coverage
from vardrop.metrics.regression import (
    crps,
    crps_gaussian,
    interval_coverage,
    interval_width,
    pinball_loss,
)

__all__ = [
    "BrierDecomposition",
    "ECEInterval",
    "ReliabilityCurve",
    "RiskCoverage",
    "Scheme",
    "accuracy",
    "aupr",
    "aurc",
    "auroc",
    "brier",
    "brier_decomposition",
    "classwise_ece",
    "crps",
    "crps_gaussian",
    "ece",
    "ece_interval",
    "fpr95",
    "interval_coverage",
    "interval_width",
    "nll",
    "nll_from_log_probs",
    "pinball_loss",
    "reliability_curve",
    "risk_coverage",
]
