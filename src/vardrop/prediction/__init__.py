"""Prediction: samples, means and moments of a noisy net, function draws, calibration."""

from vardrop.prediction.calibration import (
    Conformal as Conformal,
    apply_temperature as apply_temperature,
    calibrate as calibrate,
    conformal as conformal,
    fit_log_scale as fit_log_scale,
    fit_temperature as fit_temperature,
)
from vardrop.prediction.frozen import (
    Predictor as Predictor,
    freeze as freeze,
)
from vardrop.prediction.functions import (
    Selected as Selected,
    draw as draw,
    draws as draws,
    select as select,
    unlabelled_kappa as unlabelled_kappa,
)
from vardrop.prediction.predictor import (
    predict as predict,
    predict_batches as predict_batches,
)
from vardrop.prediction.result import (
    Interval as Interval,
    Prediction as Prediction,
)
