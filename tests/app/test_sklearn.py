"""The estimators among scikit-learn's own: its checks, its tools, its files."""

import json
import pickle
import tempfile

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.datasets import load_breast_cancer, load_diabetes, load_iris
from sklearn.inspection import permutation_importance
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks
from torch import nn

import vardrop as vd
from tests.refusals import assert_refused
from tests.running import python
from vardrop._core.files import read_tensors, write_tensors
from vardrop.sklearn import VardropClassifier, VardropRegressor

FAST = {"epochs": 8, "folds": 1, "beta": 0.3, "lr": 0.02, "batch_size": 8, "random_state": 0}
# scikit-learn says the same of its own estimators that draw or split rows, such as SGDRegressor and
# HistGradientBoostingRegressor.
EXPECTED = {
    "check_sample_weight_equivalence_on_dense_data": "rows are shuffled into batches and held out "
    "by chance, so that a repeated row meets other noise than a weighted one"
}


ESTIMATORS = [VardropRegressor(**FAST), VardropClassifier(**FAST)]


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@parametrize_with_checks(ESTIMATORS, expected_failed_checks=lambda estimator: EXPECTED)
def test_the_checks_of_scikit_learn(estimator, check):
    check(estimator)


@pytest.fixture(scope="module")
def diabetes():
    X, y = load_diabetes(return_X_y=True, as_frame=True)
    return X, y, VardropRegressor(**(FAST | {"epochs": 30})).fit(X[:300], y[:300])


@pytest.fixture(scope="module")
def iris():
    X, y = load_iris(return_X_y=True)
    names = np.array(["setosa", "versicolor", "virginica"])[y]
    return X, names, VardropClassifier(**(FAST | {"epochs": 20})).fit(X, names)


def test_numbers_come_with_their_doubt(diabetes):
    X, y, model = diabetes
    mean, std = model.predict(X[300:], return_std=True)
    assert mean.shape == std.shape == (142,)
    assert bool((std > 0).all())
    assert bool((np.diff(model.predict_quantiles(X[300:], (0.1, 0.5, 0.9)), axis=1) > 0).all())
    wide, narrow = (np.subtract(*model.predict_interval(X[300:], c)[::-1]) for c in (0.9, 0.5))
    assert bool((wide > narrow).all() and (narrow > 0).all())
    drawn = model.sample(X[300:], 4000, random_state=1)
    assert drawn.shape == (142, 4000)
    error = np.abs(drawn.mean(1) - mean) / (std / np.sqrt(4000))
    assert error.max() < 6.0  # Gaussian tails: 1e-7 over all rows
    assert torch.equal(model.predict_dist(X[300:]).mean.flatten(), torch.tensor(mean))
    assert model.score(X[300:], y[300:]) > 0.2


def test_classes_come_with_sets(iris):
    X, names, model = iris
    assert model.classes_.tolist() == ["setosa", "versicolor", "virginica"]
    assert model.score(X, names) > 0.85
    sets = model.predict_set(X, coverage=0.9)
    assert sets.dtype == bool
    assert sets[np.arange(150), np.searchsorted(model.classes_, names)].mean() > 0.8
    share = (model.sample(X[:2], 3000, random_state=0)[0] == "setosa").mean()
    assert abs(share - model.predict_proba(X[:1])[0, 0]) < 5 * 0.5 / np.sqrt(3000)


def test_tables_with_texts_and_holes(tmp_path):
    generator = np.random.default_rng(0)
    X = pd.DataFrame({"size": generator.standard_normal(80), "town": ["a", "b"] * 40})
    y = X["size"] + (X["town"] == "a")
    X.loc[3, "size"] = np.nan
    model = VardropRegressor(**(FAST | {"epochs": 60})).fit(X, y)
    assert model.feature_names_in_.tolist() == ["size", "town"]
    first, second = model.predict(pd.DataFrame({"size": [0.0, 0.0], "town": ["a", "b"]}))
    assert first - second > 0.4


def test_the_tools_of_scikit_learn():
    X, y = load_breast_cancer(return_X_y=True)
    X, y = X[:120], y[:120]
    piped = make_pipeline(StandardScaler(), VardropClassifier(**FAST))
    assert cross_val_score(piped, X, y, cv=2).min() > 0.8
    search = GridSearchCV(VardropClassifier(**FAST), {"lr": [0.01, 0.02]}, cv=2).fit(X, y)
    assert search.best_params_["lr"] in (0.01, 0.02)
    calibrated = CalibratedClassifierCV(VardropClassifier(**FAST), cv=2).fit(X, y)
    assert calibrated.predict_proba(X[:3]).shape == (3, 2)
    found = permutation_importance(search.best_estimator_, X[:40], y[:40], n_repeats=1)
    assert found.importances_mean.shape == (30,)


def test_metadata_is_routed():
    from sklearn import config_context

    X, y = load_diabetes(return_X_y=True)
    with config_context(enable_metadata_routing=True):
        model = VardropRegressor(**FAST).set_fit_request(sample_weight=True)
        piped = make_pipeline(StandardScaler().set_fit_request(sample_weight=False), model)
        piped.fit(X[:60], y[:60], sample_weight=np.r_[np.zeros(30), np.ones(30)])
    assert piped[-1].model_.config.data.weight == "weight"


# As in a preforking server, children predict and end with sys.exit, which runs atexit. The parent
# keeps its model.
FRESH_PROCESS = """
import os, pickle, sys, pandas
from vardrop.sklearn import VardropRegressor
model = VardropRegressor.load(sys.argv[1] + "/model.safetensors")
X = pandas.read_csv(sys.argv[1] + "/x.csv")
print(model.predict(X)[:5].tolist(), flush=True)
model = pickle.loads(pickle.dumps(model))
for _ in range(2 if hasattr(os, "fork") else 0):
    if (child := os.fork()) == 0:
        sys.exit(0 if len(model.predict(X[:2])) == 2 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert len(pickle.loads(pickle.dumps(model)).predict_interval(X[:2])[0]) == 2
"""


def test_files_without_pickle_and_pickles(diabetes, iris, tmp_path):
    X, _, model = diabetes
    expected = model.predict(X)
    model.save(tmp_path / "model.safetensors")
    X.to_csv(tmp_path / "x.csv", index=False)
    done = python("-c", FRESH_PROCESS, tmp_path)
    assert done.returncode == 0, done.stderr
    assert np.allclose(json.loads(done.stdout), expected[:5], rtol=1e-12)
    Xi, _, classes = iris
    classes.save(tmp_path / "classes.safetensors")
    again = VardropClassifier.load(tmp_path / "classes.safetensors")
    assert np.array_equal(again.predict(Xi), classes.predict(Xi))
    told, path = "to hold a VardropRegressor", tmp_path / "classes.safetensors"
    assert_refused(told, VardropRegressor.load, path)
    assert np.array_equal(clone(model).fit(X[:300], diabetes[1][:300]).predict(X), expected)


def test_nets_and_methods_of_ones_own():
    X, y = load_diabetes(return_X_y=True)
    net = nn.Sequential(nn.Linear(10, 7), nn.Tanh(), nn.Linear(7, 1))
    before = net[0].weight.clone()
    model = VardropRegressor(net, vd.sparse_vd(), **FAST).fit(X[:80], y[:80])
    assert torch.equal(net[0].weight, before)
    assert model.model_.net[0].weight.shape == (7, 10)
    wide = VardropRegressor((12, 5), "bayes_by_backprop", **FAST).fit(X[:80], y[:80])
    layers = [m for m in wide.model_.net.modules() if hasattr(m, "out_features")]
    assert [m.out_features for m in layers] == [12, 5, 1]
    assert len(VardropRegressor(recipe=None, **FAST).fit(X[:80], y[:80]).predict(X[:3])) == 3
    small, plan = model.compress(max_drop=0.5)
    assert plan.total("weights")[1] <= plan.total("weights")[0]
    assert isinstance(small, nn.Module)
    assert_refused("Unknown method", VardropRegressor(recipe="sparse", **FAST).fit, X[:80], y[:80])


def test_a_warm_start_begins_with_the_last_weights():
    X, y = load_diabetes(return_X_y=True)
    cold = VardropRegressor(**(FAST | {"epochs": 1, "lr": 1e-9})).fit(X[:80], y[:80])
    warm = VardropRegressor(**FAST, warm_start=True).fit(X[:80], y[:80])
    learned = warm.predict(X)
    warm.set_params(epochs=1, lr=1e-9).fit(X[:80], y[:80])
    assert np.abs(warm.predict(X) - learned).mean() < 0.3 * np.abs(cold.predict(X) - learned).mean()


def test_the_global_generators_are_left_alone():
    X, y = load_iris(return_X_y=True)
    before = torch.get_rng_state().clone(), np.random.get_state()[1].copy()  # noqa: NPY002
    VardropClassifier(**(FAST | {"random_state": None})).fit(X, y).predict(X)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])  # noqa: NPY002


def files_below(folder):
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_names_in_a_file_never_become_paths(diabetes, tmp_path, monkeypatch):
    """Neither in a file nor in a pickle: a fitted estimator writes nothing when it is read."""
    model = diabetes[2]
    (tmp_path / "tmp").mkdir()
    (tmp_path / "victim.txt").write_text("precious")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    model.save(tmp_path / "model.safetensors")
    tensors, values = read_tensors(tmp_path / "model.safetensors")
    payload = torch.tensor(list(b"print('code')"), dtype=torch.uint8)
    names = {str(tmp_path / "victim.txt"): "the unknown", "../../probe.py": "the unknown"}
    names |= {"elbo.../../probe.py": "Unexpected key", "choice.rows.a": "choices of held-out rows"}
    names |= {"choice.other": "the unknown tensor 'other'"}
    for name, told in names.items():
        write_tensors(tmp_path / "forged.safetensors", {**tensors, name: payload}, values)
        before = files_below(tmp_path)
        assert_refused(told, VardropRegressor.load, tmp_path / "forged.safetensors")
        assert files_below(tmp_path) == before
        state = model.__getstate__()

        state["model_"] = ({**state["model_"][0], name: payload}, state["model_"][1])
        assert_refused(told, VardropRegressor().__setstate__, state)
        assert files_below(tmp_path) == before


def test_a_fitted_estimator_needs_no_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    X, y = load_diabetes(return_X_y=True)
    model = VardropRegressor(recipe=vd.sparse_vd(), **FAST).fit(X[:80], y[:80])
    assert list(tmp_path.iterdir()) == []
    again = pickle.loads(pickle.dumps(model))
    assert list(tmp_path.iterdir()) == []
    assert np.array_equal(again.predict(X), model.predict(X))
    assert np.array_equal(again.predict_interval(X)[0], model.predict_interval(X)[0])
    assert isinstance(model.compress(0.5)[0], nn.Module)
    assert_refused("which are not saved or copied", again.compress, 0.5)


def test_a_generator_as_random_state_can_be_saved(tmp_path):
    X, y = load_diabetes(return_X_y=True)
    given = FAST | {"random_state": np.random.RandomState(3)}
    model = VardropRegressor(**given).fit(X[:60], y[:60])
    model.save(tmp_path / "m.safetensors")
    again = VardropRegressor.load(tmp_path / "m.safetensors")
    assert np.array_equal(again.predict(X), model.predict(X))
