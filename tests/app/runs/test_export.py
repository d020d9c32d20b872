"""A run as one ONNX file: raw rows in onnxruntime are answered as `Run.predict` answers them."""

import functools
import json
import warnings
from importlib.metadata import version

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import vardrop as vd
from tests.app.cli.calling import call
from tests.nets import Parts
from tests.refusals import assert_refused
from vardrop.app.data.onnx_graph import with_preprocessing
from vardrop.app.data.preprocessing import CategoryColumn, DateColumn, NumberColumn, to_days
from vardrop.app.runs import compress, export_run, fit, load_run

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    onnx = pytest.importorskip("onnx")
    onnxruntime = pytest.importorskip("onnxruntime")

QUICK = {"epochs": 4, "folds": 1, "beta": 0.1, "compare": False}


def table(rows=400, seed=0):
    """Every kind of column, with and without missing values; names that a graph has too."""
    g = np.random.default_rng(seed)
    frame = pd.DataFrame({
        "mean": 1.7e9 + 1e6 * g.normal(size=rows),
        "size (m²)": g.normal(size=rows),
        "owned": g.integers(0, 2, rows).astype(bool),
        "town": g.choice(["Ulm", "Bern", "Zürich"], rows),
        "street": g.choice([f"street {i}" for i in range(70)], rows),
        "day": pd.date_range("1990-02-27", periods=rows, freq="37D").astype(str),
        "when": pd.date_range("2019-12-30 05:07:11", periods=rows, freq="433min").astype(str),
    })  # fmt: skip
    frame["price"] = 3 * frame["size (m²)"] + (frame["town"] == "Ulm") + 0.1 * g.normal(size=rows)
    frame["kind"] = np.where(frame["price"] > 0, "high", "low")
    frame.loc[::7, "size (m²)"], frame.loc[::9, "town"], frame.loc[::11, "day"] = None, None, None
    return frame


def new_rows():
    """What the training did not show: categories, missing values, the other ways to write a date."""
    frame = table(40, seed=1)
    frame.loc[0, "town"], frame.loc[1, "street"] = "Oslo", "another street"
    frame.loc[2, "mean"], frame.loc[3, "street"], frame.loc[4, "when"] = None, None, None
    frame.loc[5, "when"], frame.loc[6, "when"] = "2020-02-29T23:59:59.5", "2020-12-31 07:30"
    frame.loc[7, "day"], frame.loc[8, "when"] = "2100-03-01", "2021-01-01"
    return frame


def fed(frame, columns):
    """Numbers, dates as days since 2000-01-01, and texts."""
    arrays = {
        NumberColumn: lambda c: frame[c.name].to_numpy(float),
        DateColumn: lambda c: to_days(frame[c.name], c.date_format, "new").numpy(),
        CategoryColumn: lambda c: frame[c.name].fillna("").astype(str).to_numpy(object),
    }
    return {c.name: arrays[type(c)](c) for c in columns}


def answered(path, frame, columns):
    session = onnxruntime.InferenceSession(path)
    found = session.run(None, fed(frame, columns))
    return dict(zip((o.name for o in session.get_outputs()), found, strict=True))


@pytest.fixture(scope="module")
def numbers(tmp_path_factory):
    base = tmp_path_factory.mktemp("export")
    return fit(table(), target="price", drop=["kind"], out=base / "run", **QUICK)


@pytest.mark.parametrize("samples", [0, 3])
def test_numbers_of_raw_rows_are_those_of_the_run(numbers, tmp_path, samples):
    run, columns = numbers, numbers.about.preprocessing.columns
    assert {type(c) for c in columns} == {NumberColumn, CategoryColumn, DateColumn}
    assert {c.name for c in columns if getattr(c, "embedded", False)} == {"street"}
    assert export_run(run, tmp_path / "m.onnx", samples) == (tmp_path / "m.onnx").stat().st_size
    for rows in (table().tail(50), new_rows(), new_rows().head(1)):
        found = answered(tmp_path / "m.onnx", rows, columns)
        p = run.predict(rows, samples, draw="functions")
        lower, upper = run.interval(p, 0.95)
        expected = {"mean_": p.mean, "std": p.std, "lower": lower, "upper": upper}
        expected |= {"aleatoric": p.aleatoric, "epistemic": p.epistemic}
        assert found.keys() == expected.keys()
        for name, values in expected.items():
            assert np.allclose(found[name], values.numpy(), rtol=0, atol=1e-5), name
    assert (samples > 0) == bool(found["epistemic"].max() > 0)


def test_classes_of_raw_rows_are_those_of_the_run(tmp_path):
    run = fit(table(), target="kind", drop=["price"], out=tmp_path / "run", **QUICK)
    assert call("export", tmp_path / "run", "--onnx", tmp_path / "m.onnx", "--samples", 4) == 0
    rows = new_rows()
    found = answered(tmp_path / "m.onnx", rows, run.about.preprocessing.columns)
    p = run.predict(rows, 4, draw="functions")
    for name in ("probs", "entropy", "aleatoric", "epistemic"):
        assert np.allclose(found[name], getattr(p, name).numpy(), rtol=0, atol=1e-5), name
    told = onnxruntime.InferenceSession(tmp_path / "m.onnx").get_modelmeta().custom_metadata_map
    assert json.loads(told["classes"]) == ["high", "low"]
    assert (told["target"], told["task"], told["samples"]) == ("kind", "classification", "4")
    assert told["method"].startswith("Recipe")
    assert (told["likelihood"], told["vardrop"]) == ("Categorical()", version("vardrop"))
    assert json.loads(told["columns"])["street"] == "CategoryColumn"


def test_functions_with_noise_of_the_target_that_depends_on_the_row(tmp_path):
    frame = table()[["size (m²)", "mean", "price"]]
    run = fit(frame, target="price", heteroscedastic=True, out=tmp_path / "run", **QUICK)
    export_run(run, tmp_path / "m.onnx", 5)
    found = answered(tmp_path / "m.onnx", new_rows(), run.about.preprocessing.columns)
    p = run.predict(new_rows(), 5, draw="functions")
    assert np.allclose(found["mean_"], p.mean.numpy(), rtol=0, atol=1e-5)
    assert np.allclose(found["std"], p.std.numpy(), rtol=0, atol=1e-5)


def test_a_compressed_table_carries_its_preprocessing(tmp_path):
    frame = table()[["size (m²)", "town", "price"]]
    run = fit(frame, "mlp50", vd.sparse_vd(), target="price", out=tmp_path / "run", **QUICK)
    small, _ = compress(run, sparsity=0.5, onnx=tmp_path / "small.onnx")
    rows, found = new_rows(), run.about.preprocessing
    mean = small(run.inputs(rows)).detach() * found.target_std + found.target_mean
    given = answered(tmp_path / "small.onnx", rows, found.columns)
    assert np.allclose(given["mean"], mean.numpy(), rtol=0, atol=1e-5)


def test_images_are_taken_as_they_are(tmp_path):
    run = fit("digits", "mlp", out=tmp_path / "run", epochs=1, compare=False)
    export_run(run, tmp_path / "m.onnx", 0)
    session, x = onnxruntime.InferenceSession(tmp_path / "m.onnx"), run.data.test.x[:5]
    probs = session.run(["probs"], {session.get_inputs()[0].name: x.numpy()})[0]
    assert np.allclose(probs, run.predict(x, 0).probs.numpy(), rtol=0, atol=1e-5)


def doubled(features, name="x", opset=18):
    """A graph of an older version that returns twice its input."""
    shape = ["batch", features]
    value, kind = onnx.helper.make_tensor_value_info, onnx.TensorProto.FLOAT
    x, y = (value(n, kind, shape) for n in (name, "y"))
    node = onnx.helper.make_node("Add", [name, name], ["y"])
    graph = onnx.helper.make_graph([node], "g", [x], [y])
    versions = {"opset_imports": [onnx.helper.make_opsetid("", opset)], "ir_version": 10}
    return onnx.helper.make_model(graph, **versions)


def test_it_goes_in_front_of_any_graph():
    """Of an older version too, and whose names are those of columns."""
    frame = table().rename(columns={"town": "x", "owned": "y"})
    found = vd.load_dataset(frame, target="price", drop=["kind"]).preprocessing
    made = with_preprocessing(doubled(found.features), found)
    session = onnxruntime.InferenceSession(made.SerializeToString())
    rows = new_rows().rename(columns={"town": "x", "owned": "y"})
    given = session.run(["y_"], fed(rows, found.columns))[0]
    assert np.allclose(given, 2 * found.inputs(rows, "rows").numpy(), rtol=0, atol=1e-6)


def test_it_goes_in_front_of_a_frozen_predictor(tmp_path):
    """With the noise as an input, which stays the last one."""
    frame = table()[["size (m²)", "town", "day", "kind"]]
    run = fit(frame, target="kind", out=tmp_path / "run", **QUICK)
    predictor, found = vd.freeze(run.elbo.eval(), samples=3), run.about.preprocessing
    rows = new_rows()
    x = run.inputs(rows)
    vd.export_onnx(predictor, x[:2], tmp_path / "m.onnx", outputs=["probs"], noise="input")
    made = with_preprocessing(onnx.load(tmp_path / "m.onnx"), found)
    session = onnxruntime.InferenceSession(made.SerializeToString())
    assert [i.name for i in session.get_inputs()] == ["size (m²)", "town", "day", "noise"]
    graph = predictor.graph(x[:2], ["probs"], noise="input")
    noise = graph.noise_like(x)
    given = {**fed(rows, found.columns), "noise": noise.numpy()}
    expected = graph(x, noise)[0].detach().numpy()
    assert np.allclose(session.run(["probs"], given)[0], expected, rtol=0, atol=1e-5)


def test_a_graph_of_another_width_is_refused():
    found = vd.load_dataset(table(), target="price", drop=["kind"]).preprocessing
    told = rf"to be \(batch, {found.features}\), but got 'x' with"
    assert_refused(told, with_preprocessing, doubled(3), found)


def test_what_cannot_be_written_is_told(numbers, tmp_path):
    assert_refused("not found: .*nowhere", export_run, numbers, tmp_path / "nowhere" / "m.onnx")
    assert_refused("which is in use", export_run, numbers, numbers.directory / "config.json")
    export = functools.partial(export_run, numbers, tmp_path / "m.onnx")
    assert_refused("`samples` to be", export, -1)
    assert_refused("one of 'functions'", export, mode="mean")
    told = r"known moments, but got '0.tables.0' \(Embedding\)"
    assert_refused(told, export, mode="moments", outputs=["mean"])
    for mode in ("functions", "sample"):
        told = "`outputs` to be one of .*, but got 'probs'"
        assert_refused(told, export, 2, mode=mode, outputs=["probs"])
    assert not list(tmp_path.iterdir())


def test_a_net_that_cannot_be_exported_is_told(tmp_path):
    def reading():
        return Parts(lambda n, x: n.line(x) + float(x.sum()) * 0, line=nn.Linear(2, 1))

    frame = table()[["size (m²)", "price"]]
    run = fit(frame, reading(), None, target="price", out=tmp_path / "run", **QUICK)
    with pytest.raises(vd.VardropError, match="to be exportable by torch.export"):
        export_run(load_run(tmp_path / "run", reading()), tmp_path / "m.onnx")
    assert run.net.line.weight.shape == torch.Size([1, 2])


def test_moments_answer_with_what_is_asked_for(tmp_path):
    frame = table()[["size (m²)", "town", "price"]]
    run = fit(frame, target="price", out=tmp_path / "run", **QUICK)
    options = ("--onnx", tmp_path / "m.onnx", "--mode", "moments")
    assert call("export", run.directory, *options, "--outputs", "epistemic, mean,lower") == 0
    rows, unit = new_rows(), run.about.preprocessing.target_std
    found = answered(tmp_path / "m.onnx", rows, run.about.preprocessing.columns)
    assert list(found) == ["epistemic", "mean", "lower"]
    likelihood = run.elbo.likelihood.scaled(np.exp(run.choice.log_scale))
    x = run.inputs(rows)
    p = run.in_units(vd.predict(run.net, x, 32, mode="moments", likelihood=likelihood))
    assert np.allclose(found["mean"], p.mean, rtol=0, atol=1e-5 * unit)
    assert np.allclose(found["epistemic"], p.epistemic, rtol=0, atol=1e-5 * unit**2)
    assert np.allclose(found["lower"], p.interval(0.95).lower, rtol=0, atol=1e-5 * unit)


@pytest.mark.parametrize("low, high, modes", [
    pytest.param(104.0, 106.0, ("functions", "moments"), marks=pytest.mark.slow),
    (1.6e9, 1.6e9 + 40, ("functions", "sample")),
])  # fmt: skip
def test_targets_of_any_mean_and_unit_are_answered_in_full(tmp_path, low, high, modes):
    """A standard deviation of exactly 1 does not leave the mean out; timestamps keep their digits."""
    rows = np.arange(100)
    frame = pd.DataFrame({"a": np.sin(rows), "y": np.where(rows % 2, low, high)})
    frame["part"] = np.repeat(["train", "validation", "test"], [60, 20, 20])
    run = fit(frame, target="y", task="regression", split="part", out=tmp_path / "run", **QUICK)
    assert run.config.units == ((low + high) / 2, (high - low) / 2)
    new = pd.DataFrame({"a": [0.1, 0.9]})
    for mode in modes:
        export_run(run, tmp_path / "m.onnx", 16, mode=mode)
        found = answered(tmp_path / "m.onnx", new, run.about.preprocessing.columns)
        expected = run.predict(new, 16, draw="functions").mean.numpy()
        assert np.allclose(found["mean"], expected, rtol=0, atol=0.2 * (high - low)), mode
        middle = (found["lower"] + found["upper"]) / 2
        assert np.allclose(middle, found["mean"], rtol=0, atol=0.05 * (high - low)), mode
        assert (found["upper"] - found["lower"]).min() > 0.1 * (high - low), mode
