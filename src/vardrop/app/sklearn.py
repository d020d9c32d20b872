"""scikit-learn estimators with predictive uncertainty, for pipelines and searches."""

from __future__ import annotations

from vardrop._core.errors import VardropError, import_optional

for _package in ("sklearn", "pandas"):
    import_optional(_package)

import copy
import re
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

import numpy as np
import pandas
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_array, check_consistent_length, check_random_state, column_or_1d
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import nn

from vardrop._core.checks import check_integer, check_number
from vardrop._core.files import read_tensors, write_tensors
from vardrop.app.data import Part
from vardrop.app.data.inputs import free_name
from vardrop.app.data.preprocessing import Task
from vardrop.app.runs import fit
from vardrop.app.runs.run_callbacks import ProgressBar, RunCallback
from vardrop.app.runs.compress import shrink_model
from vardrop.app.runs.run import Model
from vardrop.app.store import reading
from vardrop.compression import Shrunk
from vardrop.conversion import revert
from vardrop.noisy import has_noise
from vardrop.prediction.prediction import Prediction, mixture_quantile
from vardrop.recipes import BaseRecipe

_TYPES = r"object|bool|u?int\d+|float\d+|<U\d{1,6}"  # of classes
_FEWEST = 3  # examples that a fit needs
_OPTIONS = ("epochs", "batch_size", "lr", "beta", "folds", "device", "heteroscedastic")
Table: TypeAlias = ArrayLike | pandas.DataFrame
Floats = NDArray[np.float64]
Targets = tuple[NDArray[Any], Floats | None]  # with the weights of the examples
Seed = int | np.random.RandomState | None


class _Estimator(BaseEstimator):
    """Base of both estimators: the model of a run of `vardrop.fit` on all examples, in memory.

    Predictions are functions drawn with the seed of the fit, in double precision. The prediction
    of an example does not depend on the other examples or their order.
    """

    _task: Task
    _held_out: Part | None = None

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.input_tags.string = True
        tags.input_tags.categorical = True
        return tags

    def fit(self, X: Table, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Fit to examples and their values or classes.

        Args:
            X: examples as an array or a DataFrame.
            y: one value or class for each.
            sample_weight: one weight for each. Weight 2 counts as two examples.

        Returns:
            The estimator itself.
        """
        frame, dtype = self._frame(X, reset=True), float if self._task == "regression" else None
        targets = check_array(column_or_1d(y, warn=True), ensure_2d=False, dtype=dtype)
        check_consistent_length(frame, targets)
        weight = None
        if sample_weight is not None:
            checks = {"dtype": float, "ensure_non_negative": True}
            weight = _check_sample_weight(sample_weight, frame.to_numpy(), **checks)
            if not weight.any():
                raise ValueError("Sample weights must contain at least one non-zero number.")
        targets, weight = self._prepare(targets, weight)
        params = self.get_params(deep=False).items()
        options = {k: v for k, v in params if k in _OPTIONS and v is not None}
        options["seed"] = int(_generator(self.random_state).randint(2**31 - 1))
        options["callback"] = ProgressBar() if self.verbose else RunCallback()
        if weight is not None and not bool((weight == 1).all()):
            options["weight"] = free_name("weight", frame.columns)
            frame = frame.assign(**{options["weight"]: weight})
        options |= {"task": self._task, "test": False, "compare": False}
        with tempfile.TemporaryDirectory(prefix="vardrop-", ignore_cleanup_errors=True) as folder:
            run = fit((frame, targets), self._net(), self.recipe, out=folder, **options)
            self._held_out = run.data.validation
        self.model_ = Model(run.config, run.elbo, run.choice)
        if run.choice is not None and "worse" in run.choice.verdicts().values():
            warnings.warn(run.choice.advice, ConvergenceWarning, stacklevel=2)
        return self

    def _prepare(self, y: NDArray[Any], weight: Floats | None) -> Targets:
        return y, weight

    def _net(self) -> nn.Module | str:
        if self.warm_start and hasattr(self, "model_"):
            before = copy.deepcopy(self.model_.net)
            return revert(before) if has_noise(before) else before
        if self.module is None:
            return "auto"
        if isinstance(self.module, nn.Module):
            return copy.deepcopy(self.module)
        return "-".join(["dense", *map(str, self.module)])

    def _frame(self, X: Any, reset: bool = False) -> pandas.DataFrame:
        """Inputs as a table. A DataFrame may have columns of texts, and be of another library."""
        if hasattr(X, "columns"):
            kinds = [getattr(kind, "kind", "O") for kind in getattr(X, "dtypes", ())]
            if not all(kind in "biuf" for kind in kinds):
                validate_data(self, X, reset=reset, skip_check_array=True)
                return pandas.DataFrame({name: list(X[name]) for name in self.feature_names_in_})
        options = {"ensure_all_finite": "allow-nan", "ensure_min_samples": _FEWEST if reset else 1}
        checked = validate_data(self, X, reset=reset, **options)
        names = getattr(self, "feature_names_in_", [f"x{i}" for i in range(checked.shape[1])])
        return pandas.DataFrame(checked, columns=list(names))

    def predict_dist(self, X: Table) -> Prediction:
        """The predictive distribution of examples, in the units of the target.

        Args:
            X: examples with the columns of the fit.
        """
        check_is_fitted(self, "model_")
        x = self.model_.inputs(self._frame(X)).double()
        model = replace(self.model_, elbo=copy.deepcopy(self.model_.elbo).double())
        return model.predict(x, self.samples, "functions")

    def compress(self, max_drop: float | None = None) -> Shrunk:
        """A smaller plain model without the weights or units that the method marks, and the plan.

        Args:
            max_drop: largest loss of accuracy on held-out examples, or fraction of the RMSE.
        """
        check_is_fitted(self, "model_")
        if self._held_out is None:
            text = "compress needs the held-out examples of the fit, which are not saved or copied."
            raise VardropError(f"{text} Call it on the fitted estimator, or fit it again.")
        return shrink_model(self.model_, self._held_out, max_drop)[1]

    def save(self, path: str | Path) -> None:
        """Write the fitted estimator to one file with a checksum and without pickle.

        Args:
            path: the file.
        """
        check_is_fitted(self, "model_")
        tensors, model = self.model_.state()
        params = {k: v for k, v in self.get_params().items() if k not in ("module", "recipe")}
        if not isinstance(self.random_state, int):  # a generator is no part of the fit
            params["random_state"] = None
        names, classes = getattr(self, "feature_names_in_", None), getattr(self, "classes_", None)
        content = {
            "class": type(self).__name__,
            "params": params,
            "features": None if names is None else names.tolist(),
            "classes": None if classes is None else [classes.tolist(), str(classes.dtype)],
            "model": model,
        }
        write_tensors(Path(path), tensors, content)

    @classmethod
    def load(cls, path: str | Path, module: nn.Module | None = None) -> Self:
        """Read a file that `save` wrote.

        Args:
            path: the file.
            module: a fresh network, if the estimator was fitted with one.
        """
        tensors, content = read_tensors(Path(path))
        if not isinstance(content, dict) or content.get("class") != cls.__name__:
            raise VardropError(f"Expected {path} to hold a {cls.__name__}, but it does not.")
        with reading(path, f"a {cls.__name__}"):
            estimator, net = cls(module, **content["params"]), copy.deepcopy(module)
            model = Model.from_state(tensors, content["model"], Path(path), net)
            about, features = model.about, content["features"]
            if about.preprocessing is None or about.task != cls._task:
                raise VardropError(f"a model of {about.kind}s for {about.task}. It is damaged.")
            names = [column.name for column in about.preprocessing.columns]
            names += [name for name, _ in about.preprocessing.dropped]
            estimator.model_, estimator.n_features_in_ = model, len(names)
            if features is not None:
                estimator.feature_names_in_ = np.array(list(features), object)
            expected = [f"x{i}" for i in range(len(names))] if features is None else list(features)
            fits = True
            if about.classes:
                labels, kind = content["classes"]
                kind = kind if re.fullmatch(_TYPES, kind) else "no type"
                estimator.classes_ = np.array(labels, kind)
                fits = estimator.classes_.tolist() == labels and len(labels) == len(about.classes)
            if sorted(expected) != sorted(names) or not fits:
                raise VardropError("columns or classes of another model. It is damaged.")
            check_integer("samples", estimator.samples)
        return estimator

    def __getstate__(self) -> dict[str, Any]:
        """The state with the model as tensors and plain values, without the examples of the fit."""
        state = {k: v for k, v in super().__getstate__().items() if k != "_held_out"}
        if "model_" in state:
            state["model_"] = state["model_"].state()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "model_" in state:
            custom = copy.deepcopy(self.module) if isinstance(self.module, nn.Module) else None
            tensors, stored = state["model_"]
            self.model_ = Model.from_state(tensors, stored, Path("the pickle"), custom)


class VardropRegressor(RegressorMixin, _Estimator):
    """Regression with a Bayesian neural network and predictive uncertainty.

    A tenth of the examples is held out to choose the KL weight, the scale of the noise and the
    width of intervals. Below 2000 examples, all are held out in turn. Arguments that are None
    follow from the data, as in `vardrop.fit`.

    Args:
        module: a custom network, or hidden widths such as (64, 32).
        recipe: a method or its name, such as `vardrop.sparse_vd()`. None is a plain model.
        heteroscedastic: learn a separate width of the noise for each example.
        epochs, batch_size, lr, beta, folds: see `vardrop.app.runs.Settings`.
        samples: draws of a prediction.
        device: the device to train on.
        random_state: seed, or a random state of numpy.
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
        random_state: Seed = None,
        warm_start: bool = False,
        verbose: bool = False,
    ) -> None:
        self.__dict__.update({k: v for k, v in locals().items() if k != "self"})

    def predict(self, X: Table, return_std: bool = False) -> Floats | tuple[Floats, Floats]:
        """The predictive mean of examples.

        Args:
            X: examples with the columns of the fit.
            return_std: also return the predictive standard deviation.

        Returns:
            The means, (N,), and with `return_std` the standard deviations.
        """
        p = self.predict_dist(X)
        mean = p.mean.flatten().numpy()
        return (mean, p.std.flatten().numpy()) if return_std else mean

    def predict_interval(self, X: Table, coverage: float = 0.9) -> tuple[Floats, Floats]:
        """Lower and upper ends of split-conformal intervals.

        Args:
            X: examples with the columns of the fit.
            coverage: the fraction of new values that the intervals contain.

        Returns:
            The lower ends and the upper ends, (N,) each.
        """
        p = self.predict_dist(X)  # raises NotFittedError before the model is asked for
        lower, upper = self.model_.interval(p, coverage)
        return lower.flatten().numpy(), upper.flatten().numpy()

    def predict_quantiles(self, X: Table, quantiles: Sequence[float] = (0.05, 0.5, 0.95)) -> Floats:
        """Quantiles of the predictive distribution, (N, quantiles).

        Args:
            X: examples with the columns of the fit.
            quantiles: levels above 0 and below 1.

        Returns:
            The quantiles.
        """
        p = self.predict_dist(X)
        parts = p.likelihood.parts(p.draws)
        std = parts.aleatoric.sqrt()
        for level in quantiles:
            check_number("quantiles", level, above=0, below=1)
        columns = [mixture_quantile(parts.location, std, level).flatten() for level in quantiles]
        return torch.stack(columns, 1).numpy()

    def sample(self, X: Table, n_samples: int = 1, random_state: Seed = None) -> Floats:
        """Values drawn from the predictive distribution, (N, n_samples).

        Args:
            X: examples with the columns of the fit.
            n_samples: values per example.
            random_state: seed, or a random state of numpy.

        Returns:
            The values.
        """
        p, generator = self.predict_dist(X), _generator(random_state)
        parts = p.likelihood.parts(p.draws)
        which = generator.randint(len(p.draws), size=n_samples)
        location = parts.location.flatten(1).numpy()[which].T
        std = parts.aleatoric.sqrt().flatten(1).numpy()[which].T
        return location + std * generator.standard_normal(location.shape)


class VardropClassifier(ClassifierMixin, _Estimator):
    """Classification with a Bayesian neural network; see `VardropRegressor`.

    Args:
        class_weight: "balanced", or weights by class, which multiply the weights of examples. The
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
        class_weight: Literal["balanced"] | dict[Any, float] | None = None,
        epochs: int | None = None,
        batch_size: int | None = None,
        lr: float | None = None,
        beta: float | None = None,
        folds: int | None = None,
        samples: int = 32,
        device: str = "cpu",
        random_state: Seed = None,
        warm_start: bool = False,
        verbose: bool = False,
    ) -> None:
        self.__dict__.update({k: v for k, v in locals().items() if k != "self"})

    def _prepare(self, y: NDArray[Any], weight: Floats | None) -> Targets:
        check_classification_targets(y)
        self.classes_, numbers = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"Expected at least 2 classes, but got the class {y[0]!r} alone.")
        if weight is not None and len(np.unique(numbers[weight > 0])) < 2:
            raise ValueError("Expected at least 2 classes with a positive weight, but got fewer.")
        if self.class_weight is not None:
            class_weights = compute_sample_weight(self.class_weight, y)
            weight = class_weights if weight is None else weight * class_weights
        return numbers, weight

    def predict_proba(self, X: Table) -> Floats:
        """The probabilities of the classes, (N, classes), averaged over the draws.

        Args:
            X: examples with the columns of the fit.

        Returns:
            The probabilities.
        """
        probs = self.predict_dist(X).probs.numpy()
        return probs / probs.sum(1, keepdims=True)

    def predict(self, X: Table) -> NDArray[Any]:
        """The most probable class of examples.

        Args:
            X: examples with the columns of the fit.

        Returns:
            The classes, (N,).
        """
        check_is_fitted(self, "model_")
        return self.classes_[self.predict_proba(X).argmax(1)]

    def predict_set(self, X: Table, coverage: float = 0.9) -> NDArray[np.bool_]:
        """Conformal sets of classes, (N, classes), True for the classes inside.

        Args:
            X: examples with the columns of the fit.
            coverage: the fraction of new examples whose class is inside.

        Returns:
            The sets.
        """
        p = self.predict_dist(X)
        return self.model_.sets(p, coverage).numpy()

    def sample(self, X: Table, n_samples: int = 1, random_state: Seed = None) -> NDArray[Any]:
        """Classes drawn from the predictive distribution, (N, n_samples).

        Args:
            X: examples with the columns of the fit.
            n_samples: classes per example.
            random_state: seed, or a random state of numpy.

        Returns:
            The classes.
        """
        generator, cumulated = _generator(random_state), self.predict_proba(X).cumsum(1)
        u = generator.random_sample((len(cumulated), n_samples))
        return self.classes_[(u[:, :, None] > cumulated[:, None, :-1]).sum(2)]


def _generator(random_state: Seed) -> np.random.RandomState:
    """A random state of numpy. Without a seed it is a new one, and not numpy's global one."""
    return np.random.RandomState() if random_state is None else check_random_state(random_state)
