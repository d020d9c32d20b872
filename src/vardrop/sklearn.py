"""scikit-learn estimators; see `vardrop.app.sklearn`."""

from vardrop.app.sklearn import (
    VardropClassifier as VardropClassifier,
    VardropRegressor as VardropRegressor,
)
