"""Prediction: samples, means and moments of a noisy net, function draws, calibration."""

from vardrop.prediction.calibration import (
    Conformal,
    apply_temperature,
    conformal,
    fit_temperature,
)
from vardrop.prediction.distillation import distil
from vardrop.prediction.ensemble import predict
from vardrop.prediction.functions import draw, draws
from vardrop.prediction.result import Interval, Prediction

__all__ = [
    "Conformal",
    "Interval",
    "Prediction",
    "apply_temperature",
    "conformal",
    "distil",
    "draw",
    "draws",
    "fit_temperature",
    "predict",
]
