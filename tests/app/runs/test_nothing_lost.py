"""Runs keep what was trained: no mixed data, no lost or stale results, no silent damage."""

import copy
import json
import math
import shutil

import pandas as pd
import pytest
import torch

import vardrop as vd
from tests.app.sealed import reseal
from tests.nets import is_same_state
from tests.refusals import assert_refused
from vardrop._core.files import read_tensors
from vardrop.app import runs
from vardrop.app.data import datasets as catalog, splits
from vardrop.app.runs import compress, fit, load_run, resume
from vardrop.app.runs.config import working
from vardrop.app.runs.run_callbacks import RunCallback
from vardrop.tuning import NotFiniteError

QUICK = {"epochs": 2, "batch_size": 32, "lr": 1e-2, "folds": 2, "compare": False}


def table(rows=80):
    return pd.DataFrame({
        "a": [math.sin(3 * i) for i in range(rows)],
        "b": ["x" if i % 3 else "y" for i in range(rows)],
        "t": ["u" if i % 4 else "v" for i in range(rows)],
        "price": [5.0 + 2 * math.sin(3 * i) + i % 5 for i in range(rows)],
    })  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A run on a table, with its data; tests work on copies."""
    folder = tmp_path_factory.mktemp("kept")
    table().drop(columns="price").to_csv(folder / "t.csv", index=False)
    fit(folder / "t.csv", "mlp", vd.sparse_vd(), target="t", out=folder / "run", **QUICK)
    return folder


@pytest.fixture
def run(base, tmp_path):
    shutil.copytree(base / "run", tmp_path / "run")
    return tmp_path / "run"


def same_tensors(a, b):
    return is_same_state(read_tensors(a)[0], read_tensors(b)[0])


# What defines the data is part of the run.


def test_a_seed_that_would_mix_the_rows_and_a_later_pretraining_are_refused(run):
    before = {p.name: p.read_bytes() for p in run.iterdir()}
    assert_refused("`seed` to stay 0, because it split the data of", resume, run, epochs=4, seed=5)
    told = "`pretrain` to stay 0, because .* is past its pretr"
    assert_refused(told, resume, run, epochs=5, pretrain=3)
    assert {p.name: p.read_bytes() for p in run.iterdir()} == before
    assert len(resume(run, epochs=3, seed=0).history) == 3


def test_rows_that_are_split_in_another_way_are_noticed(run, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(splits._FRACTIONS, "validation", 0.2)
        for call in (lambda: resume(run, epochs=4), lambda: runs.evaluate(load_run(run))):
            assert_refused("The sizes of the data of .* changed from .* start a new run", call)
    split_rows = catalog.split_rows
    monkeypatch.setattr(catalog, "split_rows", lambda n, seed, *more: split_rows(n, 9, *more))
    assert_refused("The rows of the data of .* changed", resume, run, epochs=4)


@pytest.mark.parametrize("given", [{"target": "x"}, {"drop": ["x"]}, {"task": "regression"}])
def test_named_data_take_no_columns(tmp_path, given):
    with pytest.raises(vd.VardropError, match="cannot be combined with the data iris"):
        fit("iris", "mlp", out=tmp_path / "r", **given, **QUICK)
    assert list(tmp_path.iterdir()) == []
    assert fit("iris", "mlp", out=tmp_path / "r", task="classification", **QUICK).results


# What was trained is kept.


def test_a_run_resumed_in_its_warm_up_is_one_that_never_stopped(tmp_path):
    settings = {**QUICK, "warmup": (2, 9)}
    fit("wine", "mlp", out=tmp_path / "parts", **{**settings, "epochs": 2})
    parts = resume(tmp_path / "parts", epochs=6)
    whole = fit("wine", "mlp", out=tmp_path / "whole", **{**settings, "epochs": 6, "rate": "late"})
    assert len(parts.history) == len(whole.history) == 6
    best = read_tensors(tmp_path / "parts" / "best.safetensors")
    last = read_tensors(tmp_path / "parts" / "checkpoint.safetensors")[0]
    assert best[1] == {"epoch": 5}
    assert all(torch.equal(t, last[f"elbo.{name}"]) for name, t in best[0].items())


def test_a_run_that_is_at_its_end_stays_as_it_is(run, base):
    compress(load_run(run), sparsity=0.5)
    names = ("results.json", "arrays.safetensors", "small.safetensors", "best.safetensors")
    before = {name: (run / name).read_bytes() for name in names}
    again = resume(run)
    assert {name: (run / name).read_bytes() for name in names} == before
    assert again.results["compression"]["sparsity"] >= 0.5
    resume(run, epochs=30, lr=0.03)
    assert not (run / "small.safetensors").exists()
    assert again.results["compression"] == {}


def test_one_at_a_time_works_on_a_run(run, tmp_path):
    loaded = load_run(run)
    with working(run):
        for call in (
            lambda: resume(run, epochs=4),
            lambda: fit("iris", "lenet300", out=run, force=True, **QUICK),
            lambda: runs.evaluate(loaded),
            lambda: compress(loaded, sparsity=0.5),
        ):
            assert_refused("another process is working in it", call)
        assert load_run(run).predict(table()).probs.shape == (80, 2)  # reading disturbs nobody
    assert len(load_run(run).history) == 2


def test_what_a_killed_write_left_is_removed(run):
    (run / ".checkpoint.safetensors.123.new").write_bytes(b"half")
    resume(run, epochs=3)
    assert not list(run.glob(".*.new"))


@pytest.mark.parametrize("name", ["dropmax", "deterministic_attention", "sampled_softmax", "l0"])
def test_the_seed_decides_and_the_callers_generator_is_left_alone(tmp_path, name):
    for state in (1, 2):
        torch.manual_seed(state)
        before, out = torch.get_rng_state(), tmp_path / str(state)
        fit("iris", "mlp", runs.method_named(name), out=out, **QUICK)
        load_run(out).predict(torch.zeros(1, 4))
        assert torch.equal(before, torch.get_rng_state())
    assert same_tensors(tmp_path / "1" / "best.safetensors", tmp_path / "2" / "best.safetensors")


def test_pretrained_heads_resume_to_the_same_net(tmp_path):
    class Stops(RunCallback):
        def record(self, record, elbo):
            if record["epoch"] == 1:  # the last of the pretraining
                raise KeyboardInterrupt

    settings = {**QUICK, "pretrain": 2}
    fit("iris", "mlp", vd.dropmax(), out=tmp_path / "whole", **settings)
    with pytest.raises(KeyboardInterrupt):
        fit("iris", "mlp", vd.dropmax(), out=tmp_path / "parts", **settings | {"callback": Stops()})
    torch.manual_seed(9)
    resume(tmp_path / "parts")
    for name in ("best.safetensors", "checkpoint.safetensors"):
        assert same_tensors(tmp_path / "whole" / name, tmp_path / "parts" / name)


# Damage is seen.


@pytest.mark.parametrize("place, hostile, message", [
    ("settings.lr", "x", "`lr` to be a finite number"),
    ("settings.folds", ..., r"fields \['folds'\] of Settings are miss"),
    ("data.more", 1, r"fields \['more'\] of Data are missing or unkn"),
    ("data.stratify", ..., r"fields \['stratify'\] of Data are"),
    ("method", vd.to_json(vd.LogUniform()), "`method` to be a recipe, or null"),
    ("data", None, "KeyError: 'data'"),
])  # fmt: skip
def test_a_sealed_value_that_no_run_has_is_told(run, place, hostile, message):
    part, _, key = place.partition(".")
    inner = {**json.loads((run / "config.json").read_text())[part], key: hostile}
    inner = {k: v for k, v in inner.items() if v is not ...}
    reseal(run / "config.json", **{part: inner if key else hostile})
    assert_refused(f"config.json and .* to hold the description of a run.*{message}", load_run, run)


# Nothing wrong is answered.


def test_a_net_that_is_not_finite_predicts_nothing(run):
    loaded = load_run(run)
    loaded.net[1].weight.data[0, 0] = math.nan
    good, rows = load_run(run).predict, torch.tensor([[0.0, 0.0, 0.0], [math.nan, 0.0, 0.0]])
    for call, x, told in (
        (loaded.predict, table(), "model, but got NaN or infinity in 'net.1.weight'"),
        (good, rows, "inputs, but got NaN or infinity in row 2"),
        (good, torch.full((1, 3), 1e38), "predictions, but got NaN or infinity in row"),
    ):
        with pytest.raises(NotFiniteError, match=f"Expected (a )?finite {told}"):
            call(x)


def test_scores_that_are_not_finite_are_null_with_a_note(run, monkeypatch):
    from vardrop.app.runs import scores as scoring

    scored = scoring.Scored({"accuracy": 1.0, "nll": math.inf})
    monkeypatch.setattr(scoring, "class_scores", lambda *given: scored)
    loaded = load_run(run)
    found = runs.evaluate(loaded)
    assert found["metrics"] == {"accuracy": 1.0, "nll": None}
    assert found["not_finite"] == {"metrics.nll": "inf", "baseline.nll": "inf"}
    json.loads((run / "results.json").read_text(), parse_constant=pytest.fail)
    assert "nll undefined" in repr(loaded)
    assert loaded.report().is_file()


def test_names_of_classes_are_no_formulas(tmp_path):
    names = ["=cmd|x", "-1", "+a", "@b", "plain"]
    frame = table(100).drop(columns=["price", "t"]).assign(t=[names[i % 5] for i in range(100)])
    frame.to_csv(tmp_path / "t.csv", index=False)
    run = fit(tmp_path / "t.csv", "mlp", target="t", out=tmp_path / "r", **QUICK)
    cells = {"=cmd|x": "'=cmd|x", "-1": "-1", "+a": "'+a", "@b": "'@b", "plain": "plain"}
    for name, cell in cells.items():
        run.net[5].bias.data.fill_(0.0)[run.about.classes.index(name)] = 100.0
        runs.write_predictions(run, tmp_path / "t.csv", tmp_path / "p.csv")
        found = pd.read_csv(tmp_path / "p.csv", dtype=str)
        assert set(found["class"]) == {cell}
    assert {f"p_{name}" for name in names} <= set(found)  # nor does a heading begin like one


def test_an_output_is_none_of_the_files_that_are_in_use(run, base):
    loaded = load_run(run)
    for out in (base / "t.csv", run / "config.json", run / "best.safetensors"):
        before = out.read_bytes()
        with pytest.raises(vd.VardropError, match="which is in use and would be lost"):
            runs.write_predictions(loaded, base / "t.csv", out)
        assert_refused("is in use and would be lost", compress, loaded, sparsity=0.5, onnx=out)
        assert out.read_bytes() == before


def test_what_compression_may_lose_does_not_depend_on_units(tmp_path):
    frame, given, found = table(120).drop(columns="t"), {**QUICK, "epochs": 15}, []
    for unit in (1.0, 1000.0):
        frame.assign(price=unit * frame.price).to_csv(tmp_path / "t.csv", index=False)
        run = fit(tmp_path / "t.csv", "mlp", target="price", out=tmp_path / str(unit), **given)
        (small, _), (x, y) = compress(run, max_drop=0.5), run.data.validation
        nets = (vd.revert(copy.deepcopy(run.net)), small)
        errors = [(net.eval()(x) - y).square().mean().sqrt() for net in nets]
        assert errors[1] <= 1.5 * errors[0] * (1 + 1e-4)
        found.append(run.results["compression"])
    one, thousand = found
    assert one["threshold"] == pytest.approx(thousand["threshold"], rel=1e-4)
    assert one["weights_after"] == thousand["weights_after"]
    assert thousand["test_score_before"] == pytest.approx(1000 * one["test_score_before"], rel=1e-3)
