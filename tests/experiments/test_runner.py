"""The runner: descriptions, results that grow seed by seed, and trainings that go on."""

import dataclasses
import json
import math

import pytest
import torch

from experiments import runner
from experiments.command import FUNCTIONS
from experiments.page import rows
from experiments.runner import finished, load, reproduce
from tests.experiments.toy import describe, toy_training
from tests.refusals import assert_refused

TOY = {"toy_training": toy_training}


@pytest.fixture
def experiment(tmp_path):
    return runner.experiments(describe(tmp_path / "experiments"))["toy/run"]


def test_the_result_states_everything(experiment, tmp_path):
    out = tmp_path / "results" / "toy" / "run.json"
    results = list(reproduce(experiment, TOY, out))
    assert len(results) == 3
    stored = json.loads(out.read_text())
    assert stored == json.loads(json.dumps(results[-1]))
    assert (stored["expected"], stored["arguments"]) == ({"loss": 0.5}, {"epochs": 4})
    assert stored["data_md5"]["mnist"]["train"]
    assert set(stored["versions"]) == {"python", "torch"}
    assert [run["seed"] for run in stored["runs"]] == [0, 1, 2]
    assert [r["epoch"] for r in stored["runs"][0]["curve"]] == [0, 1, 2, 3] * 2
    assert stored["runs"][0]["cpu_seconds"] >= 0
    seeds = stored["figures"]["seed"]  # 0, 1, 2: mean 1, deviation 1
    assert (seeds["mean"], seeds["standard_error"]) == (1, pytest.approx(1 / math.sqrt(3)))
    assert finished(experiment, out) == [0, 1, 2]
    assert not (out.parent / ".run").exists()


def test_a_function_of_several_seeds_gets_all_that_are_missing_at_once(experiment, tmp_path):
    asked, out = [], tmp_path / "run.json"

    def together(seeds, epochs, stop_after=0, watch=None):
        asked.append((list(seeds), watch.directory))
        return [{"figures": {"loss": 0.5, "seed": float(seed)}} for seed in seeds]

    (result,) = reproduce(experiment, {"toy_training": together}, out)
    assert [run["seed"] for run in result["runs"]] == [0, 1, 2]
    assert result["figures"]["seed"]["values"] == [0.0, 1.0, 2.0]
    assert {run["cpu_seconds"] for run in result["runs"]} == {result["runs"][0]["cpu_seconds"]}
    stored = json.loads(out.read_text())
    stored["runs"] = stored["runs"][1:2]  # as of a run that was described with one seed
    out.write_text(json.dumps(stored))
    (result,) = reproduce(experiment, {"toy_training": together}, out)
    assert [seeds for seeds, _ in asked] == [[0, 1, 2], [0, 2]]
    assert asked[0][1] != asked[1][1]  # what is kept of other seeds does not fit
    assert [run["seed"] for run in result["runs"]] == [1, 0, 2]


def test_only_missing_seeds_are_run(experiment, tmp_path):
    out, seeds = tmp_path / "run.json", []
    next(reproduce(experiment, TOY, out))
    assert finished(experiment, out) == [0]
    spy = lambda seed, epochs: seeds.append(seed) or toy_training(seed, epochs)
    list(reproduce(experiment, {"toy_training": spy}, out))
    assert seeds == [1, 2]
    runner.forget(out)
    assert finished(experiment, out) == []


def test_a_reworded_description_reaches_a_finished_result(experiment, tmp_path):
    out = tmp_path / "run.json"
    list(reproduce(experiment, TOY, out))
    before = json.loads(out.read_text())
    reworded = dataclasses.replace(experiment, notes="Other words.")
    list(reproduce(reworded, {"toy_training": lambda **_: pytest.fail("ran again")}, out))
    after = json.loads(out.read_text())
    runner.reword(dataclasses.replace(experiment, arguments={"epochs": 9}, notes="Of others."), out)
    assert json.loads(out.read_text()) == after
    assert after.pop("notes") == "Other words."
    assert after == {key: value for key, value in before.items() if key != "notes"}


def test_a_seed_goes_on_where_it_was_cut_off(experiment, tmp_path):
    out, told = tmp_path / "run.json", []

    def cut(seed, epochs, watch):
        return toy_training(seed, epochs, stop_after=2, watch=watch)

    with pytest.raises(KeyboardInterrupt):
        next(reproduce(experiment, {"toy_training": cut}, out))
    assert (out.parent / ".run" / ".gitignore").read_text() == "*\n"
    before = torch.get_rng_state()
    tell = lambda share, text: told.append((share, text))
    resumed = next(reproduce(experiment, TOY, out, tell=tell))
    assert torch.equal(torch.get_rng_state(), before)
    # two epochs are left of the second training, of 3 seeds with 8 epochs each
    assert [round(24 * share) for share, _ in told] == [7, 8, 8]
    assert (told[0][1], told[-1][1]) == ("seed 0: second, epoch 3 of 4", "seed 0 done")
    fresh = toy_training(0, 4)
    assert resumed["runs"][0]["curve"] == fresh["curve"]
    assert resumed["runs"][0]["figures"] == fresh["figures"]


def test_quick_takes_other_arguments_and_one_seed(experiment, tmp_path):
    (result,) = reproduce(experiment, TOY, tmp_path / "quick.json", quick=True)
    assert (result["arguments"], len(result["runs"][0]["curve"])) == ({"epochs": 2}, 4)
    assert finished(experiment, tmp_path / "quick.json") == []  # other arguments
    assert runner.outside(result["figures"], experiment.bounds) == []
    told = runner.outside(result["figures"], {"seed": (1.0, 2.0)})
    assert told == ["seed = 0, expected 1.0 to 2.0"]
    told = runner.outside({"a": {"mean": math.nan}}, {"a": (0.0, 1.0)})
    assert told == ["a = nan, expected 0.0 to 1.0"]


def test_rows_leave_out_results_of_other_arguments(experiment, tmp_path):
    out, known = tmp_path / "toy" / "run.json", {"toy/run": experiment}
    assert rows(known, tmp_path)[0]["result"] is None
    list(reproduce(experiment, TOY, out, quick=True))
    assert rows(known, tmp_path)[0]["result"] is None
    runner.forget(out)
    list(reproduce(experiment, TOY, out))
    (row,) = rows(known, tmp_path)
    assert (row["result"]["figures"]["seed"]["mean"], len(row["digest"])) == (1, 16)


def test_errors(experiment, tmp_path):
    out = tmp_path / "run.json"
    assert_refused(r"to be one of \['x'\]", next, reproduce(experiment, {"x": toy_training}, out))
    list(reproduce(experiment, TOY, out, quick=True))
    assert_refused("Start anew with --force", next, reproduce(experiment, TOY, out))
    out.write_text("{}")
    assert_refused("to hold a result, but got", next, reproduce(experiment, TOY, out))
    described = {"toy/run": experiment}
    assert_refused("such as toy/run, but got 'toy/rum'", runner.named, described, "toy/rum")
    assert_refused("descriptions .* in .*, but got none", runner.experiments, tmp_path / "nowhere")


def test_every_description_names_a_known_function_and_bounds():
    from tests.experiments.test_page import KNOWN

    assert len(KNOWN) > 30
    assert {e.row for e in KNOWN.values()} >= set(range(1, 16))
    for experiment in KNOWN.values():
        assert experiment.function in FUNCTIONS
        assert experiment.bounds
        assert experiment.minutes > 0


@pytest.mark.parametrize("old, new, told", [
    (b"[quick]", b"[quick", "to be TOML, but got"),
    (b"paper = ", b"# ", "to have paper, but got"),
    (b"[expected]", b"[unexpected]", "to have `expected`, the paper's figures, or `headline`"),
    (b"title", b"tit\xffle", "to be TOML, but got: 'utf-8' codec"),
    (b"seeds = ", b"seeds = 3 # ", "whole numbers as row and seeds"),
    (b"minutes = ", b"minutes = true # ", "finite numbers as minutes"),
    (b"title = ", b"title = 3 # ", "Expected .* to have texts as title"),
    (b"title = ", b"tittle = 3\ntitle = ", r"to have only .* but got \['tittle'\]"),
])  # fmt: skip
def test_descriptions_that_are_none_are_told(tmp_path, old, new, told):
    path = describe(tmp_path) / "toy" / "run.toml"
    raw = path.read_bytes()
    assert old in raw
    path.write_bytes(raw.replace(old, new, 1))
    assert_refused(told, load, path)
