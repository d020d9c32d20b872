"""Runs and methods beside each other: paired where they can be, refused where they cannot."""

import json
import math
import shutil
from pathlib import Path

import pandas as pd
import pytest
import torch
from torch import nn

import vardrop as vd
from tests.nets import assert_unchanged
from tests.refusals import assert_refused
from vardrop.app.runs import evaluate, fit, load_run, resume
from vardrop.app.runs.run_callbacks import RunCallback

QUICK = {"epochs": 2, "batch_size": 32, "folds": 1, "beta": 0.3, "compare": False}


def fitted(path, data="iris", recipe=None, **more):
    return fit(data, "dense-8", recipe, out=path, **{**QUICK, **more})


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compared")
    fitted(folder / "plain")
    fitted(folder / "noisy", recipe=vd.bayes_by_backprop(), epochs=3)
    fitted(folder / "seed", seed=1)
    fitted(folder / "a", "diabetes")
    fitted(folder / "b", "diabetes", vd.sparse_vd())
    return folder


@pytest.fixture
def runs(base, tmp_path):
    shutil.copytree(base, tmp_path / "runs")
    return tmp_path / "runs"


# Runs.


@pytest.mark.parametrize("names", [("plain", "noisy"), ("a", "b")])
def test_runs_on_the_same_rows_are_paired(base, names):
    first, second = (load_run(base / name) for name in names)
    found = vd.compare_runs([first, base / names[1]])
    assert (found.over, found.reference) == ("rows", names[0])
    for run in (first, second):
        own = found.scores[run.directory.name]
        assert {k: e.value for k, e in own.items()} == pytest.approx(run.results["metrics"])
        with_interval = {k for k, e in own.items() if e.low is not None}
        assert set(own) - with_interval <= {"ece", "average_precision", "crps"}
        for low, value, high in ((own[k].low, own[k].value, own[k].high) for k in with_interval):
            assert low <= value <= high or value == pytest.approx(low, rel=1e-6)  # all rows alike
    difference = found.differences[names[1]]["nll"]
    logs = [run.arrays()["log_prob"] for run in (first, second)]
    gap = logs[0] - logs[1]
    assert difference.value == pytest.approx(float(gap.mean()), abs=1e-6)
    expected = float(gap.std(correction=0)) / math.sqrt(len(gap))
    assert difference.error == pytest.approx(expected, rel=0.14)  # six errors of the bootstrap
    assert difference.error < found.scores[names[0]]["nll"].error
    assert found.sizes[names[0]]["weights"] == sum(r["weights"] for r in first.results["layers"])


def test_the_table_the_frame_and_the_files_say_the_same(base, tmp_path):
    found = vd.compare_runs([base / "a", base / "b"])
    lines = str(found).splitlines()
    assert lines[0].split()[:2] == ["RMSE", "NLL"]
    assert [line.split()[0] for line in lines[1:4]] == ["a", "b", "against"]
    assert found.difference_text("b", "rmse") in lines[3]
    assert lines[4] == "In brackets: 95% intervals over rows."
    table = found.frame().set_index(["name", "score"])
    assert table.loc[("b", "mae"), "value"] == found.scores["b"]["mae"].value
    assert table.loc[("b", "mae"), "difference"] == found.differences["b"]["mae"].value
    assert math.isnan(table.loc[("a", "mae"), "difference"])
    folder = found.write(tmp_path / "new" / "folder")
    stored = json.loads((folder / "comparison.json").read_text())
    assert stored["scores"]["b"]["rmse"]["low"] == found.scores["b"]["rmse"].low
    assert stored["runs"] == {"a": [str(base / "a")], "b": [str(base / "b")]}
    assert (folder / "comparison.png").read_bytes().startswith(b"\x89PNG")
    assert [p.get_xlabel() for p in found.plot(["mae", "r2"]).child_axes] == ["MAE", "R²"]
    assert_refused("score 'rms'. Did you mean 'rmse'.* Available: rmse", found.table, ["rms"])


def test_other_rows_of_the_same_data_are_compared_without_pairs(base):
    found = vd.compare_runs([base / "plain", base / "seed", base / "noisy"])
    assert list(found.differences) == ["noisy"]
    assert found.scores["seed"]["accuracy"].low is not None
    assert found.notes == ["seed was tested on other rows than plain."]


def test_weights_of_rows_count_in_intervals(tmp_path):
    rows = pd.DataFrame({"x": [float(i % 17) for i in range(90)]})
    rows = rows.assign(y=rows.x + [i % 5 for i in range(90)], w=[i % 4 for i in range(90)])
    given = {"target": "y", "weight": "w"}
    for name in ("one", "two"):
        fitted(tmp_path / name, rows, epochs=2 if name == "one" else 5, **given)
    own = vd.compare_runs([tmp_path / "one", tmp_path / "two"]).scores["one"]["mae"]
    assert own.low < own.value < own.high
    assert own.value == load_run(tmp_path / "one").results["metrics"]["mae"]


def test_runs_that_cannot_be_compared_are_refused(runs, tmp_path):
    def refused(told, *names):
        assert_refused(told, vd.compare_runs, [runs / name for name in names])

    refused("runs on the same data, but the data of .*a is diabetes with sha256:.* i", "plain", "a")
    refused("two or more different runs to compare, but got .*plain", "plain")
    refused("two or more different runs", "plain", "plain")
    refused("two or more different runs to compare, but got none")
    refused("File not found: .*absent.config.json", "plain", "absent")
    fitted(runs / "all", test=False)
    refused("all has no scores on test data", "plain", "all")
    (runs / "noisy" / "results.json").unlink()
    refused("noisy has no scores on test data. Run `vardrop evaluate .*noisy`", "plain", "noisy")


def test_a_run_that_was_stopped_is_told(runs):
    class Stops(RunCallback):
        def record(self, record, elbo):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        resume(runs / "plain", callback=Stops(), epochs=9)
    evaluate(load_run(runs / "plain"))
    found = vd.compare_runs([runs / "noisy", runs / "plain"])
    assert found.notes == ["plain was stopped after 3 of 9 epochs."]


# Methods.


class Told(RunCallback):
    """Counts trainings, hears notes, and stops before a training of this number."""

    def __init__(self, stop=None):
        self.trainings, self.notes, self.last = 0, [], stop

    def note(self, text):
        if " seed " in text:  # of the comparison, not of a run
            self.notes.append(text)

    def trial(self, label):
        return self

    def start(self, loop):
        if self.trainings == self.last:
            raise KeyboardInterrupt
        self.trainings += 1


def methods(out, recipes=("none", "sparse_vd"), seeds=3, data="iris", **more):
    given = {"net": "dense-8", **{k: v for k, v in QUICK.items() if k != "compare"}, **more}
    return vd.compare_methods(data, recipes, seeds, out=out, **given)


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("methods")
    return folder, methods(folder)


def test_methods_share_the_splits_of_each_seed(compared):
    folder, found = compared
    assert found.over == "seeds"
    names = [p.name.split("-") for p in folder.glob("*-*")]
    expected = [(name, seed) for name in ("none", "sparse_vd") for seed in "012"]
    assert sorted((name, seed) for name, _, seed in names) == expected
    runs = {name: [load_run(path) for path in found.runs[name]] for name in found.runs}
    tested = [[run.results["test_rows"] for run in own] for own in runs.values()]
    assert tested[0] == tested[1]
    assert len(set(tested[0])) == 3
    for name, own in runs.items():
        nll = torch.tensor([run.results["metrics"]["nll"] for run in own], dtype=torch.float64)
        assert found.scores[name]["nll"].value == pytest.approx(float(nll.mean()))
        assert found.scores[name]["nll"].error == pytest.approx(float(nll.std()) / math.sqrt(3))
    nlls = [[run.results["metrics"]["nll"] for run in own] for own in runs.values()]
    gaps = torch.tensor(nlls[1], dtype=torch.float64) - torch.tensor(nlls[0], dtype=torch.float64)
    paired = found.differences["sparse_vd"]["nll"]
    expected = float(gaps.mean()), float(gaps.std()) / math.sqrt(3)
    assert (paired.value, paired.error) == pytest.approx(expected)
    half = 4.302652729911275 * float(gaps.std()) * math.sqrt(1 / 3 + 30 / 120)
    assert paired.high - paired.value == pytest.approx(half)
    assert found.scores["none"]["accuracy"].high <= 1.0
    assert "Means of 3 seeds. In brackets" in str(found)
    assert json.loads((folder / "comparison.json").read_text())["reference"] == "none"
    assert (folder / "comparison.png").is_file()


def test_what_is_there_is_not_trained_again_and_grows(compared, tmp_path):
    shutil.copytree(compared[0], tmp_path / "c")
    heard = Told()
    again = methods(tmp_path / "c", callback=heard)
    assert (heard.trainings, len(heard.notes)) == (0, 6)
    assert heard.notes[0].startswith("none, seed 0: accuracy ")
    assert again.scores == compared[1].scores
    more = methods(tmp_path / "c", ["none", "sparse_vd", "l0"], [0, 1, 2, 7], callback=heard)
    assert (heard.trainings, list(more.scores)) == (6, ["none", "sparse_vd", "l0"])
    only = methods(tmp_path / "c", ["l0", None], [7], callback=heard)
    assert (heard.trainings, list(only.scores)) == (6, ["l0", "none"])
    assert only.notes == ["One seed has no interval. Use more seeds."]
    assert only.scores["l0"]["nll"].low is None


def test_a_stopped_comparison_goes_on_to_the_same_numbers(compared, tmp_path):
    for stop in (1, 2):  # between two runs, or before the first step of one
        with pytest.raises(KeyboardInterrupt):
            methods(tmp_path / "c", callback=Told(stop))
    (half,) = (tmp_path / "c").glob("none-*-1")
    shutil.rmtree(half)
    half.mkdir()
    (half / ".lock").touch()
    found = methods(tmp_path / "c")
    for name, own in compared[1].scores.items():
        resumed = {k: e.value for k, e in found.scores[name].items()}
        assert {k: e.value for k, e in own.items()} == pytest.approx(resumed)


def nll(comparison):
    return {label: scores["nll"].value for label, scores in comparison.scores.items()}


def test_a_run_is_known_by_its_content_and_not_by_its_label(tmp_path):
    first, heard = methods(tmp_path / "c", {"a b": "none"}, 1), Told()
    second = methods(tmp_path / "c", {"a-b": vd.sparse_vd()}, 1, callback=heard)
    assert heard.trainings == 1
    assert nll(second)["a-b"] != nll(first)["a b"]
    both = methods(tmp_path / "c", {"a-b": "none", "a b": vd.sparse_vd()}, 1, callback=heard)
    assert heard.trainings == 1
    assert nll(both) == {"a-b": nll(first)["a b"], "a b": nll(second)["a-b"]}


CHANGES = [{"epochs": 3}, {"data": "wine"}, {"net": "dense-9"}, {"recipes": {"none": vd.l0()}}]


@pytest.mark.parametrize("change", CHANGES)
def test_runs_of_something_else_stay_beside_those_of_a_comparison(compared, tmp_path, change):
    shutil.copytree(compared[0], tmp_path / "c")
    heard, given = Told(), {"recipes": ["none"], "net": "dense-8", **change}
    found = methods(tmp_path / "c", given.pop("recipes"), 1, callback=heard, **given)
    assert heard.trainings == 1
    assert nll(found)["none"] != compared[1].scores["none"]["nll"].value
    assert nll(methods(tmp_path / "c", callback=heard)) == nll(compared[1])
    assert heard.trainings == 1


@pytest.mark.parametrize("recipes, seeds, more, told", [
    ([], 2, {}, "`recipes` to name at least one method"),
    (["sparse-vd"], 2, {}, "Unknown method 'sparse-vd'. Did you mean 'sparse_vd'"),
    ([vd.l0(), "l0"], 2, {}, "different names, but got l0 twice. Pass labels"),
    ([3], 2, {}, "`recipes` to be names of methods, recipes or None, but got 3"),
    (3, 2, {}, "`recipes` to be a list or a dictionary of methods"),
    (["none"], 0, {}, "`seeds` to be an integer of at least 1, but got 0"),
    (["none"], [1, 1], {}, r"`seeds` to be different numbers, but got \[1, 1\]"),
    (["none"], [], {}, r"`seeds` to be different numbers, but got \[\]"),
    (["none"], 2, {"seed": 3}, "`seed` is not supported by compare_methods"),
    (["none"], 2, {"force": True}, "`force` is not supported by compare_methods"),
    (["none"], 1, {"data": "iriss"}, "Did you mean 'iris'"),
    (["none"], 1, {"test": False}, "`test=False` cannot be combined with compare_methods"),
])  # fmt: skip
def test_wrong_calls_are_told(tmp_path, recipes, seeds, more, told):
    assert_refused(told, methods, tmp_path / "c", recipes, seeds, **more)


def test_data_and_nets_of_ones_own(tmp_path):
    rows = pd.DataFrame({"x": [float(i % 17) for i in range(80)], "z": [i % 3 for i in range(80)]})
    rows["y"] = rows.x + 0.3 * rows.z
    net = nn.Sequential(nn.Flatten(), nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))
    recipes = {"my plain": None, "noisy": vd.bayes_by_backprop()}
    given = {"net": net, "target": "y", **{k: v for k, v in QUICK.items() if k != "compare"}}
    with assert_unchanged(net):
        with pytest.raises(KeyboardInterrupt):
            vd.compare_methods(rows, recipes, 2, out=tmp_path / "c", callback=Told(1), **given)
        found = vd.compare_methods(rows, recipes, 2, out=tmp_path / "c", **given)
    assert list(found.scores) == ["my plain", "noisy"]
    own = set((tmp_path / "c").glob("none-*-1"))
    assert own == {Path(found.runs["my plain"][1])}
    other = nn.Sequential(nn.Flatten(), nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))
    vd.compare_methods(rows, {"my plain": None}, [1], out=tmp_path / "c", **{**given, "net": other})
    assert len(set((tmp_path / "c").glob("none-*-1")) - own) == 1  # of other weights to begin with


def test_test_rows_that_no_seed_chooses_do_not_widen_the_interval(tmp_path):
    rows = pd.DataFrame({"x": [float(i % 17) for i in range(80)], "t": range(80)})
    rows["y"] = rows.x + 0.3 * (rows.t % 3)
    found = methods(tmp_path / "c", ["none"], 3, data=rows, target="y", time="t")
    own = found.scores["none"]["mae"]
    assert own.high - own.value == pytest.approx(4.302652729911275 * own.error)


def test_the_folder_has_a_name_where_none_is_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    methods(None, ["none"], 1)
    assert [p.name for p in (tmp_path / "runs").iterdir()] == ["iris-comparison-1"]
