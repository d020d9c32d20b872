"""scikit-learn estimators with predictive uncertainty, for pipelines and searches."""

from __future__ import annotations

from vardrop._core.errors import VardropError, import_optional

for _package in ("sklearn", "pandas"):
    import_optional(_package)

import copy
import math
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_array, check_consistent_length, check_random_state, column_or_1d
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import (
    _check_n_features,
    _check_sample_weight,
    check_is_fitted,
    validate_data,
)
from torch import nn

from vardrop._core.checks import check_integer, check_number
from vardrop._core.files import read_tensors, write_tensors
from vardrop.app.data import Part
from vardrop.app.runs import fit
from vardrop.app.runs.callbacks import ProgressBar, RunCallback
from vardrop.app.runs.compress import shrink_model
from vardrop.app.runs.run import Model
from vardrop.app.store import reading
from vardrop.compression import Shrunk
from vardrop.conversion import revert
from vardrop.noisy import has_noise
from vardrop.prediction import Prediction, predict
from vardrop.prediction.prediction import mixture_quantile
from vardrop.recipes import BaseRecipe

_TYPES = r"object|bool|u?int\d+|float\d+|<U\d{1,6}"  # of classes
_ROWS, _FEWEST = 4096, 3  # predicted at once; to train on and to hold out


class _Estimator(BaseEstimator):
    """What both estimators share: the model of a run of `vardrop.fit` on all rows, in memory.

    Predictions are whole functions drawn with the seed of the fit, in double precision: a row is
    predicted alike alone and among others, in any order.
    """

    _task: Any
    _held_out: Part | None = None

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.input_tags.string = True
        tags.input_tags.categorical = True
        tags.non_deterministic = False
        return tags

    def _fit(self, frame: pandas.DataFrame, y: Any, weight: Any, **options: Any) -> None:
        seed = int(_generator(self.random_state).randint(2**31 - 1))
        names = ("epochs", "batch_size", "lr", "beta", "folds")
        settings = {n: getattr(self, n) for n in names if getattr(self, n) is not None}
        table, column = frame.assign(**{_free("target", frame): y}), _free("target", frame)
        if weight is not None and not bool((weight == 1).all()):
            options["weight"] = _free("weight", table)
            table = table.assign(**{options["weight"]: weight})
        directory = tempfile.mkdtemp(prefix="vardrop-")
        try:
            run = fit(
                table,
                self._net(),
                self.recipe,
                out=directory,
                target=column,
                task=self._task,
                test=False,
                callback=ProgressBar() if self.verbose else RunCallback(),
                seed=seed,
                compare=False,
                device=self.device,
                **settings,
                **options,
            )
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        self.model_ = Model(run.config, run.elbo, run.choice)
        self._held_out = run.data.validation

    def _net(self) -> nn.Module | str:
        if self.warm_start and hasattr(self, "model_"):
            before = copy.deepcopy(self.model_.net)
            return revert(before) if has_noise(before) else before
        if self.module is None:
            return "auto"
        if isinstance(self.module, nn.Module):
            return copy.deepcopy(self.module)
        return "-".join(["dense", *map(str, self.module)])

    def _rows(self, X: Any, y: Any, y_numeric: bool) -> tuple[pandas.DataFrame, Any]:
        """Inputs and targets of a fit, checked as scikit-learn does."""
        if _mixed(X):
            frame = self._frame(X, reset=True)
            kind = "numeric" if y_numeric else None
            y = check_array(column_or_1d(y, warn=True), ensure_2d=False, dtype=kind)
            check_consistent_length(frame, y)
            return frame, y
        if y is None:
            raise ValueError(
                f"{type(self).__name__} requires y to be passed, but the target y is None."
            )
        options = {"ensure_all_finite": "allow-nan", "ensure_min_samples": _FEWEST}
        checked, y = validate_data(self, X, y, y_numeric=y_numeric, **options)
        return self._table(checked), y

    def _frame(self, X: Any, reset: bool = False) -> pandas.DataFrame:
        """Inputs as a table; a DataFrame may have columns of texts."""
        if not _mixed(X):
            return self._table(validate_data(self, X, reset=reset, ensure_all_finite="allow-nan"))
        validate_data(self, X, reset=reset, skip_check_array=True)
        _check_n_features(self, X, reset=reset)
        return pandas.DataFrame({name: list(X[name]) for name in self.feature_names_in_})

    def _table(self, checked: Any) -> pandas.DataFrame:
        if bool(np.isinf(checked).any()):
            raise ValueError("Input X contains infinity or a value too large for its type.")
        features = getattr(self, "feature_names_in_", None)
        names = [f"x{i}" for i in range(checked.shape[1])] if features is None else list(features)
        return pandas.DataFrame(checked, columns=names)

    def predict_dist(self, X: Any) -> Prediction:
        """The predictive distribution of rows, in the units of the target."""
        check_is_fitted(self, "model_")
        model = self.model_
        x = model.inputs(self._frame(X)).double()
        elbo = copy.deepcopy(model.elbo).double()
        noisy = has_noise(elbo.net)
        p = predict(
            elbo,
            x.split(_ROWS),
            self.samples if noisy else 1,
            mode="sample" if noisy else "mean",
            draw="functions" if noisy else "estimator",
            seed=model.config.settings.seed,
        )
        if model.choice is not None:
            p = p.rescale(math.exp(model.choice.log_scale))
        return model.in_units(p)

    def compress(self, max_drop: float | None = None) -> Shrunk:
        """A plain, smaller net without what the method calls dead, and the plan it was made by.

        Args:
            max_drop: what may be lost on held-out rows: of accuracy, or as a fraction of the RMSE.
        """
        check_is_fitted(self, "model_")
        if self._held_out is None:
            raise VardropError(
                "Expected the held-out rows of the fit, but this estimator was loaded or copied "
                "without them. Compress it where it was fitted, or fit it again."
            )
        return shrink_model(self.model_, self._held_out, max_drop)[1]

    def save(self, path: str | Path) -> None:
        """Write the fitted estimator to one file with a checksum; no pickle is in it."""
        check_is_fitted(self, "model_")
        tensors, model = self.model_.state()
        params = {k: v for k, v in self.get_params().items() if k not in ("module", "recipe")}
        if not isinstance(self.random_state, int):  # a generator is no part of the fit
            params["random_state"] = None
        names, classes = getattr(self, "feature_names_in_", None), getattr(self, "classes_", None)
        values = {
            "class": type(self).__name__,
            "params": params,
            "features": None if names is None else names.tolist(),
            "classes": None if classes is None else [classes.tolist(), str(classes.dtype)],
            "model": model,
        }
        write_tensors(Path(path), tensors, values)

    @classmethod
    def load(cls, path: str | Path, module: nn.Module | None = None) -> Any:
        """Read what `save` wrote; with a fresh `module` if it was fitted with one."""
        tensors, values = read_tensors(Path(path))
        if not isinstance(values, dict) or values.get("class") != cls.__name__:
            raise VardropError(f"Expected {path} to hold a {cls.__name__}, but it does not.")
        with reading(path, f"a {cls.__name__}"):
            estimator = cls(module, **values["params"])
            custom = copy.deepcopy(module)
            estimator.model_ = Model.from_state(tensors, values["model"], Path(path), custom)
            estimator._set_fitted(values["features"], values["classes"])
        return estimator

    def _set_fitted(self, features: Any, classes: Any) -> None:
        """Set what a file says of the fit, if that is what the model was fitted to."""
        about = self.model_.about
        if about.preprocessing is None or about.task != self._task:
            raise VardropError(f"a model of {about.kind}s for {about.task}. It is damaged.")
        names = [column.name for column in about.preprocessing.columns]
        names += [name for name, _ in about.preprocessing.dropped]
        self.n_features_in_ = len(names)
        if features is not None:
            self.feature_names_in_ = np.array(list(features), object)
        expected = [f"x{i}" for i in range(len(names))] if features is None else list(features)
        if about.classes:
            values, kind = classes
            self.classes_ = np.array(values, kind if re.fullmatch(_TYPES, kind) else "no type")
            classes = self.classes_.tolist() == values and len(values) == len(about.classes)
        if sorted(expected) != sorted(names) or classes is False:
            raise VardropError("columns or classes of another model. It is damaged.")
        check_integer("samples", self.samples)

    def __getstate__(self) -> dict[str, Any]:
        """With the model as tensors and plain values, and without the rows of the fit."""
        state = {k: v for k, v in super().__getstate__().items() if k != "_held_out"}
        if "model_" in state:
            state["model_"] = state["model_"].state()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "model_" in state:
            custom = copy.deepcopy(self.module) if isinstance(self.module, nn.Module) else None
            tensors, values = state["model_"]
            self.model_ = Model.from_state(tensors, values, Path("the pickle"), custom)


class VardropRegressor(RegressorMixin, _Estimator):
    """Regression with a Bayesian neural network and predictive uncertainty.

    A tenth of the rows, or all in turn below 2000, are held out to choose the KL weight, the scale
    of the noise and the width of intervals; what is not given follows from the data, as in
    `vardrop.fit`.

    Args:
        module: a custom network, or hidden widths such as (64, 32).
        recipe: a method by name or by value, such as `vardrop.sparse_vd()`; None for a plain net.
        heteroscedastic: learn the width of the noise row by row.
        epochs, batch_size, lr, beta, folds: see `vardrop.app.runs.Settings`.
        samples: draws of a prediction.
        device: where to train.
        random_state: seed, or a generator of numpy.
        warm_start: start with the weights of the last fit.
        verbose: show a progress bar.

    >>> from sklearn.datasets import load_diabetes
    >>> X, y = load_diabetes(return_X_y=True)
    >>> model = VardropRegressor(epochs=20, folds=1, random_state=0).fit(X, y)
    >>> mean, std = model.predict(X[:3], return_std=True)
    >>> lower, upper = model.predict_interval(X[:3], coverage=0.9)
    """

    _task = "regression"

    def __init__(
        self,
        module: nn.Module | Sequence[int] | None = None,
        recipe: BaseRecipe | str | None = "auto",
        *,
        heteroscedastic: bool = False,
        epochs: int | None = None,
        batch_size: int | None = None,
        lr: float | None = None,
        beta: float | None = None,
        folds: int | None = None,
        samples: int = 32,
        device: str = "cpu",
        random_state: Any = None,
        warm_start: bool = False,
        verbose: bool = False,
    ) -> None:
        _assign(self, locals())

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> VardropRegressor:
        """Fit to rows and values; a row of weight 2 counts as two."""
        frame, y = self._rows(X, y, y_numeric=True)
        weight = _weights(sample_weight, frame)
        self._fit(frame, np.asarray(y, float), weight, heteroscedastic=self.heteroscedastic)
        return self

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """The predictive mean of rows, and the standard deviation if requested."""
        p = self.predict_dist(X)
        mean = p.mean.flatten().numpy()
        return (mean, p.std.flatten().numpy()) if return_std else mean

    def predict_interval(self, X: Any, coverage: float = 0.9) -> tuple[Any, Any]:
        """Lower and upper ends of intervals that cover new values at this rate, conformal."""
        lower, upper = self.model_.interval(self.predict_dist(X), coverage)
        return lower.flatten().numpy(), upper.flatten().numpy()

    def predict_quantiles(self, X: Any, quantiles: Sequence[float] = (0.05, 0.5, 0.95)) -> Any:
        """Quantiles of the predictive distribution, (N, quantiles)."""
        p = self.predict_dist(X)
        parts = p.likelihood.parts(p.draws)
        std = parts.aleatoric.sqrt()
        for level in quantiles:
            check_number("quantiles", level, above=0, below=1)
        columns = [mixture_quantile(parts.location, std, level).flatten() for level in quantiles]
        return torch.stack(columns, 1).numpy()

    def sample(self, X: Any, n_samples: int = 1, random_state: Any = None) -> Any:
        """Values drawn from the predictive distribution, (N, n_samples)."""
        p, generator = self.predict_dist(X), _generator(random_state)
        parts = p.likelihood.parts(p.draws)
        which = generator.randint(len(p.draws), size=n_samples)
        location, std = (
            t.flatten(1).numpy()[which].T for t in (parts.location, parts.aleatoric.sqrt())
        )
        return location + std * generator.standard_normal(location.shape)


class VardropClassifier(ClassifierMixin, _Estimator):
    """Classification with a Bayesian neural network; see `VardropRegressor`.

    Args:
        class_weight: "balanced", or weights by class: rows of a class count so often. The
            probabilities are then valid for data with these frequencies.

    >>> from sklearn.datasets import load_iris
    >>> X, y = load_iris(return_X_y=True)
    >>> model = VardropClassifier(epochs=20, folds=1, random_state=0).fit(X, y)
    >>> model.predict_proba(X[:2]).shape, model.predict_set(X[:2]).shape
    ((2, 3), (2, 3))
    """

    _task = "classification"

    def __init__(
        self,
        module: nn.Module | Sequence[int] | None = None,
        recipe: BaseRecipe | str | None = "auto",
        *,
        class_weight: Any = None,
        epochs: int | None = None,
        batch_size: int | None = None,
        lr: float | None = None,
        beta: float | None = None,
        folds: int | None = None,
        samples: int = 32,
        device: str = "cpu",
        random_state: Any = None,
        warm_start: bool = False,
        verbose: bool = False,
    ) -> None:
        _assign(self, locals())

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> VardropClassifier:
        """Fit to rows and classes; a row of weight 2 counts as two."""
        frame, y = self._rows(X, y, y_numeric=False)
        check_classification_targets(y)
        self.classes_, numbers = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"Expected at least 2 classes, but got the class {y[0]!r} alone.")
        weight = _weights(sample_weight, frame)
        if weight is not None and len(np.unique(numbers[np.asarray(weight) > 0])) < 2:
            raise ValueError("Expected at least 2 classes with a positive weight, but got fewer.")
        if self.class_weight is not None:
            class_weights = compute_sample_weight(self.class_weight, y)
            weight = class_weights if weight is None else weight * class_weights
        self._fit(frame, numbers, weight)
        return self

    def predict_proba(self, X: Any) -> Any:
        """The probabilities of the classes, (N, classes), averaged over the draws."""
        probs = self.predict_dist(X).probs.numpy()
        return probs / probs.sum(1, keepdims=True)

    def predict(self, X: Any) -> Any:
        """The most probable class of rows."""
        check_is_fitted(self, "model_")
        return self.classes_[self.predict_proba(X).argmax(1)]

    def predict_set(self, X: Any, coverage: float = 0.9) -> Any:
        """Sets of classes, (N, classes) True inside, that hold the true one at this rate."""
        return self.model_.sets(self.predict_dist(X), coverage).numpy()

    def sample(self, X: Any, n_samples: int = 1, random_state: Any = None) -> Any:
        """Classes drawn from the predictive distribution, (N, n_samples)."""
        generator, cumulated = _generator(random_state), self.predict_proba(X).cumsum(1)
        u = generator.random_sample((len(cumulated), n_samples))
        which = (u[:, :, None] > cumulated[:, None, :-1]).sum(2)
        return self.classes_[which]


def _assign(estimator: _Estimator, arguments: dict[str, Any]) -> None:
    """Store the arguments of a constructor unchanged, as scikit-learn requires."""
    estimator.__dict__.update({k: v for k, v in arguments.items() if k != "self"})


def _generator(random_state: Any) -> np.random.RandomState:
    """Numpy's, from a seed; without one a fresh one, so that the global one is left alone."""
    if random_state is None:
        return np.random.RandomState()
    generator: np.random.RandomState = check_random_state(random_state)
    return generator


def _free(name: str, frame: pandas.DataFrame) -> str:
    """A name for a column that the table does not have."""
    while name in frame.columns:
        name += "_"
    return name


def _mixed(X: Any) -> bool:
    """Whether it is a DataFrame with columns that are no numbers, or one of another library."""
    if not hasattr(X, "columns"):
        return False
    kinds = getattr(X, "dtypes", ())
    return not all(getattr(kind, "kind", "O") in "biuf" for kind in kinds)


def _weights(sample_weight: Any, frame: pandas.DataFrame) -> Any:
    if sample_weight is None:
        return None
    weights = _check_sample_weight(
        sample_weight, frame.to_numpy(), dtype=float, ensure_non_negative=True
    )
    if not weights.any():
        raise ValueError("Sample weights must contain at least one non-zero number.")
    return weights
