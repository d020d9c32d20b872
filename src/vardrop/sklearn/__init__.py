"""Estimators with the manners of scikit-learn; see `vardrop.integrations.sklearn`."""

from vardrop.integrations.sklearn import (
    VardropClassifier as VardropClassifier,
    VardropRegressor as VardropRegressor,
)
