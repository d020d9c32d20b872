"""Prediction: predictors, function draws, calibration and conformal sets."""

from vardrop.prediction.calibrate import (
    apply_temperature as apply_temperature,
    calibrate as calibrate,
    fit_log_scale as fit_log_scale,
    fit_temperature as fit_temperature,
)
from vardrop.prediction.conformal import Conformal as Conformal, conformal as conformal
from vardrop.prediction.ensemble import Ensemble as Ensemble
from vardrop.prediction.feature_distance import FeatureDistance as FeatureDistance
from vardrop.prediction.functions import draw as draw, draws as draws
from vardrop.prediction.predict import (
    freeze as freeze,
    predict as predict,
    predict_batches as predict_batches,
)
from vardrop.prediction.prediction import Interval as Interval, Prediction as Prediction
from vardrop.prediction.predictor import Predictor as Predictor
