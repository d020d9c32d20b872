"""Prediction: samples, means and moments of a noisy net, function draws, calibration."""

from vardrop.prediction.calibration import (
    Conformal,
    apply_temperature,
    conformal,
    distil,
    fit_temperature,
)
from vardrop.prediction.functions import Selected, draw, draws, select, unlabelled_kappa
from vardrop.prediction.predictor import predict
from vardrop.prediction.result import Interval, Prediction

__all__ = [
    "Conformal",
    "Interval",
    "Prediction",
    "Selected",
    "apply_temperature",
    "conformal",
    "distil",
    "draw",
    "draws",
    "fit_temperature",
    "predict",
    "select",
    "unlabelled_kappa",
]
