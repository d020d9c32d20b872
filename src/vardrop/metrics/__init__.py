"""Scores for predictive distributions: accuracy, calibration, ranking and regression.

Every function is pure: tensors in, a tensor or a named tuple of tensors out. Results keep the
precision of the input, and half precision input is scored in single precision.
"""

from vardrop.metrics.calibration import (
    ECEInterval as ECEInterval,
    ReliabilityCurve as ReliabilityCurve,
    Scheme as Scheme,
    classwise_ece as classwise_ece,
    ece as ece,
    ece_interval as ece_interval,
    reliability_curve as reliability_curve,
)
from vardrop.metrics.classification import (
    BrierDecomposition as BrierDecomposition,
    accuracy as accuracy,
    brier as brier,
    brier_decomposition as brier_decomposition,
    nll as nll,
    nll_from_log_probs as nll_from_log_probs,
)
from vardrop.metrics.ranking import (
    RiskCoverage as RiskCoverage,
    aupr as aupr,
    aurc as aurc,
    auroc as auroc,
    fpr95 as fpr95,
    risk_coverage as risk_coverage,
)
from vardrop.metrics.regression import (
    crps as crps,
    crps_gaussian as crps_gaussian,
    interval_coverage as interval_coverage,
    interval_width as interval_width,
    pinball_loss as pinball_loss,
)
