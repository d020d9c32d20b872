"""fit, resume, evaluate, compress: from data to a run in a directory and back."""

import json
import math
import re

import pandas as pd
import pytest
import torch
from torch import nn

import vardrop as vd
from tests.refusals import assert_refused
from vardrop._core.files import read_tensors, with_checksum
from vardrop.app import runs
from vardrop.app.runs import Settings, build_net, compress, fit, load_run, resume
from vardrop.app.runs.config import command
from vardrop.app.runs.distributed import resolve_device
from vardrop.app.runs.run_callbacks import RunCallback
from vardrop.app.store import read_run
from vardrop.testing import RECURRENT
from vardrop.tuning import NotFiniteError

QUICK = {"epochs": 2, "batch_size": 32, "folds": 2, "compare": False}
# Dropout that the named nets do not have, and gates that need a trained net, take options.
OPTIONS = {"mc_dropout": {"drop_rate": 0.1}, "dependent_beta_bernoulli": {"joint": True}}


@pytest.fixture(scope="module")
def regression(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "diabetes"
    options = {"lr": 5e-3, "epochs": 25, "folds": 2, "compare": False}
    return fit("diabetes", "mlp", vd.bayes_by_backprop(), out=out, **options)


@pytest.fixture(scope="module")
def classes(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "iris"
    return fit("iris", "mlp", vd.sparse_vd(), out=out, lr=1e-2, epochs=40, batch_size=16, folds=1,
               beta=1.0, compare=False)  # fmt: skip


@pytest.mark.parametrize("name", [*(m for m in runs.METHODS if m not in RECURRENT), "none"])
def test_every_method_fits_and_loads_again(tmp_path, name):
    recipe = runs.method_named(name, OPTIONS.get(name))
    run = fit("iris", "mlp", recipe, out=tmp_path / "run", **QUICK)
    again, x = load_run(tmp_path / "run"), run.data.test.x
    assert torch.equal(run.predict(x).probs, again.predict(x).probs)
    assert set(run.results["metrics"]) > {"accuracy", "nll", "brier", "ece"}
    assert len(run.history) == 2


def test_a_run_holds_what_the_report_reads(classes):
    files = {p.name for p in classes.directory.iterdir()}
    assert files >= {
        "config.json", "history.jsonl", "checkpoint.safetensors", "checkpoint.json",
        "best.safetensors", "preprocessing.json", "results.json", "arrays.safetensors",
    }  # fmt: skip
    config = json.loads((classes.directory / "config.json").read_text())
    assert vd.from_json(config["method"]) == vd.sparse_vd()
    assert config["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert (config["seed"], config["net"], config["data"]["name"]) == (0, "mlp", "iris")
    assert config["checksum"] == vd.load_dataset("iris").checksum
    assert config["sizes"] == {"train": 105, "validation": 15, "test": 30}
    arrays, _ = read_tensors(classes.directory / "arrays.safetensors")
    assert arrays["probs"].shape == (30, 3)
    assert {"labels", "entropy_in", "epistemic_in"} <= set(arrays)
    assert classes.report().name == "report.html"
    assert "mlp on iris, accuracy" in repr(classes)


def test_it_learns_and_prunes_without_loss(classes):
    assert classes.results["metrics"]["accuracy"] >= 0.9
    (small, plan), found = compress(classes, max_drop=0.0), classes.results["compression"]
    assert found["sparsity"] > 0.9
    assert found["weights_after"] == plan.total("weights")[1]
    assert found["test_score_after"] >= found["test_score_before"] - 0.07  # two of thirty
    loaded = vd.load(classes.directory / "small.safetensors", into=build_net("mlp", (4,), 3))
    x = classes.data.test.x
    assert torch.equal(loaded(x), small(x))
    assert runs.evaluate(classes)["compression"] == found


def test_verbs_are_methods_of_a_run(classes, tmp_path):
    shrunk = classes.compress(max_drop=0.0)
    removed = read_run(classes.directory).fractions()
    assert removed == classes.results["compression"]["removed"]
    dead = sum(removed[layer.name] * layer.before.weights for layer in shrunk.plan.layers)
    before, after = shrunk.plan.total("weights")
    assert round(dead) == before - after
    assert classes.evaluate(samples=4)["metrics"] == classes.results["metrics"]
    assert classes.export(tmp_path / "a.onnx", 2, outputs=["probs"]) > 1000


def test_a_fit_says_what_it_will_do_without_changing_the_result(tmp_path):
    options = {**QUICK, "net": "mlp", "recipe": "sparse_vd"}
    watch, texts = RunCallback(), []
    watch.describe = texts.append
    told = fit("iris", out=tmp_path / "a", **{**options, "callback": watch})
    silent = fit("iris", out=tmp_path / "b", **{**options, "callback": None, "progress": False})
    assert told.results["metrics"] == silent.results["metrics"]
    lines = dict(line.split(maxsplit=1) for line in texts[0].splitlines()[:6])
    assert lines["data"] == "iris, examples: 105 train, 15 validation, 30 test"
    assert lines["task"] == "classification, 3 classes"
    assert lines["model"] == "mlp, 10,903 parameters"
    assert (lines["method"], lines["output"]) == ("sparse_vd", str(tmp_path / "a"))
    assert re.fullmatch(r"about \d+ (s|min) for 2 epochs on cpu, trials included", lines["time"])


def test_few_rows_take_out_no_more_than_the_method_would(classes):
    compress(classes, max_drop=0.1)
    assert classes.results["compression"]["threshold"] < 3.0  # by request
    compress(classes)
    assert classes.results["compression"]["threshold"] == 3.0  # log alpha, the paper's rule
    assert classes.results["compression"]["packed_bytes"] < classes.results["compression"]["bytes"]
    assert (classes.directory / "small.vdp").is_file()


def test_regression_speaks_in_the_units_of_the_target(regression):
    found, p = regression.data.preprocessing, regression.predict(regression.data.test.x, samples=64)
    y = regression.data.test.y * found.target_std + found.target_mean
    rmse = float((p.mean - y).square().mean().sqrt())
    assert rmse == pytest.approx(regression.results["metrics"]["rmse"], rel=0.05)
    assert rmse < 0.9 * float(y.std())
    assert 0.8 <= regression.results["metrics"]["coverage95"] <= 1.0
    assert (-float(regression.in_units(p).log_prob(y).mean())) > 0
    lower, upper = p.interval(0.95)
    assert bool((lower < p.mean).all() and (p.mean < upper).all())


def test_density_in_units_is_the_scaled_one_over_the_scale(regression):
    from vardrop.app.runs.run import predict_tensor

    x, scaled = regression.data.test
    found, p = regression.data.preprocessing, predict_tensor(regression.elbo, x, 16, seed=0)
    units, y = regression.in_units(p), scaled * found.target_std + found.target_mean
    expected = p.log_prob(scaled).double() - math.log(found.target_std)
    assert torch.allclose(units.log_prob(y), expected, atol=1e-3)


def test_predictions_of_a_file(regression, classes, tmp_path):
    from sklearn.datasets import load_diabetes, load_iris

    load_diabetes(as_frame=True).frame.head(5).to_csv(tmp_path / "new.csv", index=False)
    runs.write_predictions(regression, tmp_path / "new.csv", tmp_path / "out.csv")
    table = pd.read_csv(tmp_path / "out.csv")
    assert list(table) == ["mean", "lower", "upper", "aleatoric", "epistemic"]
    assert len(table) == 5
    assert (table.lower < table["mean"]).all()
    assert (table.epistemic > 0).all()
    frame = load_iris(as_frame=True).frame.iloc[[0, 60, 120]]
    table = runs.prediction_table(classes, classes.predict(frame))
    assert list(table["class"]) == ["setosa", "versicolor", "virginica"]
    assert table[["p_setosa", "p_versicolor", "p_virginica"]].sum(axis=1).round(4).eq(1).all()


def test_a_net_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def own():
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))

    net = own()
    run = fit("digits", net, vd.sparse_vd(), exclude="3", **QUICK)
    assert run.net is net
    assert run.directory.parts[-2:] == ("runs", "digits-1")
    assert type(net[3]) is nn.Linear
    assert_refused("has a custom model \\(Sequential\\)", load_run, run.directory)
    again = load_run(run.directory, own())
    assert torch.equal(again.predict(run.data.test.x).probs, run.predict(run.data.test.x).probs)
    narrow = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))
    assert_refused("to fit the model", load_run, run.directory, narrow)
    assert_refused("has a custom model", resume, run.directory)
    longer = resume(run.directory, own(), epochs=3)
    assert [r["epoch"] for r in longer.history] == [0, 1, 2]
    arrays, _ = read_tensors(longer.directory / "arrays.safetensors")
    assert torch.equal(arrays["probs"], longer.predict(longer.data.test.x).probs)


def test_uncertainty_tells_out_of_distribution_images(tmp_path):
    run = fit("digits", "mlp", vd.sparse_vd(), out=tmp_path / "r", epochs=6, beta=0.1, lr=3e-3)
    assert runs.evaluate(run, ["photos"])["ood"]["photos"]["auroc_entropy"] > 0.8
    arrays, _ = read_tensors(run.directory / "arrays.safetensors")
    assert {"entropy_out_photos", "epistemic_out_photos"} <= set(arrays)


def test_nan_stops_with_advice_and_resumes_with_other_settings(tmp_path):
    out = tmp_path / "run"
    with pytest.raises(NotFiniteError, match=r"in epoch \d+, step \d+.* Lower the learning rate"):
        fit("iris", "mlp", vd.sparse_vd(), out=out, lr=1e30, **QUICK)
    assert len(resume(out, lr=1e-3).history) == 2
    assert json.loads((out / "config.json").read_text())["settings"]["lr"] == 1e-3


def test_changed_data_are_noticed(tmp_path):
    table = pd.DataFrame({"a": [float(i) for i in range(40)], "y": [i % 2 for i in range(40)]})
    table.to_csv(tmp_path / "t.csv", index=False)
    run = fit(tmp_path / "t.csv", "mlp", target="y", out=tmp_path / "run", **QUICK)
    assert load_run(run.directory).data.classes == ("0", "1")
    table.assign(a=1.5 * table.a).to_csv(tmp_path / "t.csv", index=False)
    with pytest.raises(vd.VardropError, match="The checksum of the data of .* changed"):
        _ = load_run(run.directory).data
    assert_refused("The checksum of the data of .* changed", resume, run.directory)


def test_a_run_predicts_where_its_data_are_not(tmp_path):
    rows = [(float(i), "red" if i % 3 else None, 2.0 * i) for i in range(60)]
    table = pd.DataFrame(rows, columns=["a", "colour", "y"])
    table["colour"] = table["colour"].where(table.index % 2 == 0, "blue")
    table.to_csv(tmp_path / "t.csv", index=False)
    run = fit(tmp_path / "t.csv", "mlp", target="y", out=tmp_path / "run", **QUICK)
    (tmp_path / "t.csv").unlink()
    again = load_run((tmp_path / "run").rename(tmp_path / "elsewhere"))
    assert again.about == run.about
    assert torch.equal(again.predict(table).mean, run.predict(table).mean)
    with pytest.raises(vd.VardropError, match=r"File not found: .*t.csv"):
        _ = again.data


@pytest.mark.parametrize("started, told", [
    (["/lib/vardrop/__main__.py", "fit", "my data.csv"], "vardrop fit 'my data.csv'"),
    (["/env/bin/vardrop", "fit", "iris"], "vardrop fit iris"),
    (["study.py", "3"], "python study.py 3"),
    (["/lib/ipykernel_launcher.py", "-f", "kernel.json"], "Python"),
    ([""], "Python"),
])  # fmt: skip
def test_the_command_is_what_was_typed(started, told):
    assert command(started) == told


def test_a_resumed_run_keeps_both_commands(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["vardrop", "fit", "iris"])
    fit("iris", "mlp", out=tmp_path / "r", **QUICK)
    monkeypatch.setattr("sys.argv", ["vardrop", "fit", "--resume", "--epochs", "3"])
    resume(tmp_path / "r", epochs=3)
    stored = json.loads((tmp_path / "r" / "config.json").read_text())
    assert stored["command"] == "vardrop fit iris && vardrop fit --resume --epochs 3"


def test_pretraining_then_conversion(tmp_path):
    run = fit("iris", "mlp", vd.sparse_vd(), out=tmp_path / "r", pretrain=2, **QUICK)
    assert [r["phase"] for r in run.history] == ["pretrain", "pretrain", "fit", "fit"]
    assert [r["epoch"] for r in run.history] == [0, 1, 2, 3]
    assert run.history[0]["kl"] == 0 < run.history[3]["kl"]
    assert run.history[1]["nll"] < run.history[0]["nll"]


def test_methods_know_their_papers_and_options():
    found = {m.name: m for m in runs.methods()}
    assert found["sparse_vd"].paper.startswith("Molchanov, Ashukha & Vetrov 2017")
    assert all(m.summary.endswith(".") for m in found.values())
    assert_refused("sparse_vd among log_sigma2", runs.method_named, "sparse_vd", {"speed": 3})


def test_nets_and_errors_of_the_verbs(tmp_path):
    assert build_net("lenet5", (3, 32, 32), 7)(torch.zeros(1, 3, 32, 32)).shape == (1, 7)
    told = "Unknown model 'vgg'. Available: mlp50, mlp, lenet300, lenet5, or hidden"
    assert_refused(told, build_net, "vgg", (4,), 3)
    assert_refused("lenet5 needs images of at least 4 x 4", build_net, "lenet5", (4,), 3)
    run = fit("iris", "mlp", None, out=tmp_path / "r", **QUICK)
    assert_refused("plain model cannot be compressed", compress, run)
    assert runs.read_history(run.directory)[-1]["sparsity"] == {}
    (run.directory / "config.json").write_text(json.dumps(with_checksum({"version": 1})))
    assert_refused("config.json and .* to hold the description of a run", load_run, run.directory)


@pytest.mark.parametrize("given, told", [
    ({"targt": "y"}, "Unknown argument 'targt'. Did you mean 'target'"),
    ({"epoch": 3}, "Unknown argument 'epoch'. Did you mean 'epochs'"),

    ({"zzz": 3}, "Unknown argument 'zzz'. Available: batch_size.*target"),
])  # fmt: skip
def test_an_argument_that_is_not_known_is_told_with_the_nearest(tmp_path, given, told):
    assert_refused(told, vd.fit, "iris", out=tmp_path / "r", **given)
    assert list(tmp_path.iterdir()) == []


def test_a_method_may_be_named_as_on_the_command_line(tmp_path):
    run = vd.fit("iris", "mlp50", "sparse_vd", out=tmp_path / "named", **QUICK)
    assert run.config.method == vd.sparse_vd()
    assert vd.fit("iris", "mlp50", "none", out=tmp_path / "plain", **QUICK).config.method is None
    assert_refused(r"method 'sparse'\.", vd.fit, "iris", "mlp50", "sparse", out=tmp_path / "other")
    assert not (tmp_path / "other").exists()


# Settings: checks, JSON, schedules.


@pytest.mark.parametrize("change, text", [
    ({"lr": float("nan")}, "`lr` to be a finite number and above 0, but got nan"),
    ({"rate": "steep"}, "`rate` to be one of 'constant', 'linear', 'late', 'cosine'"),
    ({"precision": "half"}, "`precision` to be one of 'float32', 'bfloat16', but got 'half'"),
    ({"epochs": 2.5}, "`epochs` to be an integer of at least 1, but got 2.5"),
    ({"seed": "x"}, "`seed` to be an integer of at least 0, but got 'x'"),
    ({"seed": 2**62}, "`seed` to be a finite number and below 4.61169e.18, but got 461168"),
    ({"beta": -1.0}, "`beta` to be a finite number and at least 0, but got -1"),
    ({"weight_decay": None}, "`weight_decay` to be a finite number and at least 0, but got None"),
    ({"folds": 2, "patience": 3}, "`patience` needs a validation part, but got folds=2"),
    ({"warmup": [5]}, r"`warmup` to be two epochs, such as \(5, 20\), but got \(5,\)"),
    ({"warmup": "x"}, "`warmup` to be two epochs, such as .* but got 'x'"),
    ({"compile": 1}, "`compile` to be True or False, but got 1"),
    ({"device": 0}, "`device` to be the name of a device, but got 0"),
    ({"warmup": [5, 2]}, "0 <= `start` < `end`, but got 5 and 2"),
    ({"speed": 3}, r"Unknown setting 'speed'. Did you mean 'seed'"),
])  # fmt: skip
def test_settings_are_checked(change, text):
    assert_refused(text, Settings.from_json, change)


def test_settings_travel_as_json():
    settings = Settings(epochs=7, warmup=(1, 3), clip=0.5)
    assert Settings.from_json(json.loads(json.dumps(vars(settings)))) == settings
    assert Settings(warmup=(0, 0)).schedule(1.0)(0) == 1.0
    assert [Settings(rate=r).factor(10)(5) for r in ("constant", "linear", "late")] == [1, 0.5, 1]
    assert Settings(rate="cosine").factor(10)(5) == pytest.approx(0.5)
    assert_refused("`device` to be available", resolve_device, "abacus")
