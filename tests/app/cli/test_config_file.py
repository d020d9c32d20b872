"""Options from a file, packages of one's own, the version, and quiet."""

import json
import sys
from pathlib import Path
from unittest import mock

import pytest

import vardrop as vd
from experiments.command import FUNCTIONS
from tests.app.cli.calling import call, printed
from tests.experiments.toy import describe, toy_training
from tests.refusals import assert_refused
from tests.running import ROOT
from vardrop.app.cli.commands import import_experiments
from vardrop.app.data import datasets as catalog
from vardrop.app.store import method_name
from vardrop.recipes import METHODS

MINE = """
import vardrop as vd

def wide(std=3.0):
    '''Weights under a wide prior.'''
    return vd.bayes_by_backprop(prior=vd.Normal(std=std))

vd.register_dataset("ramp", lambda: ([[float(i)] for i in range(40)], [0, 1] * 20))
vd.register_recipe("wide", wide)
"""
RUN = """
data = "iris"
net = "dense-8"
recipe = "binary_dropout"
epochs = 2
batch-size = 16
warmup = [0, 1.5]
folds = 1
compare = false
out = "r"

[option]
drop_rate = 0.25
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working directory, and nothing imported from it afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(catalog, "_REGISTERED", {})
    with mock.patch.dict(METHODS):
        yield tmp_path
    sys.modules.pop("mine", None)


def settings(path):
    return json.loads((path / "config.json").read_text())["settings"]


def test_a_file_gives_options_and_those_that_are_typed_win(here, capsys):
    (here / "run.toml").write_text(RUN)
    assert call("fit", "--config", "run.toml", "--epochs", 3, "--out", "typed") == 0
    stored = json.loads((here / "typed" / "config.json").read_text())
    assert (stored["net"], stored["method"]["gate"]["drop_rate"]) == ("dense-8", 0.25)
    found = settings(here / "typed")
    assert (found["epochs"], found["batch_size"], found["warmup"]) == (3, 16, [0.0, 1.5])
    assert (found["folds"], found["compare"]) == (1, False)
    assert not (here / "r").exists()
    (here / "run.toml").write_text(RUN, encoding="utf-8-sig")  # with a byte order mark
    assert call("fit", "wine", "--config", "run.toml", "--compare") == 0
    assert settings(here / "r")["compare"] is True
    assert vd.load_run(here / "r").about.name == "wine"
    capsys.readouterr()


def test_a_file_names_lists_and_modules_too(here):
    (here / "mine.py").write_text(MINE)
    text = 'import = "mine"\ndata = "ramp"\nrecipe = "wide"\nepochs = 1\nfolds = 1\nout = "r"\n'
    (here / "run.toml").write_text(f"{text}drop = []\nforce = true\n")
    assert call("fit", "--config", "run.toml", "--quiet") == 0
    assert call("fit", "--config", "run.toml", "--quiet") == 0  # forced


@pytest.mark.parametrize("first", [True, False])
def test_a_module_of_ones_own_is_imported_before_the_command(here, capsys, first):
    (here / "mine.py").write_text(MINE)
    own = ("--import=mine",) if first else ("--import", "mine")
    command = ("fit", "ramp", "--recipe", "wide", "--option", "std=2.0")
    quick = ("--epochs", 1, "--folds", 1, "--out", "r")
    typed = (*own, *command, *quick) if first else (*command, *quick, *own)
    assert call(*typed) == 0
    assert vd.load_run(here / "r").config.method.prior.std == 2.0
    assert method_name(vd.to_json(METHODS["wide"]())) == "wide"  # as a report tells it
    capsys.readouterr()
    assert "Weights under a wide prior." in printed(capsys, "methods", "--import", "mine").out


def test_the_version_is_printed(capsys):
    assert call("--version") == 0
    assert printed(capsys, "fit", "--version").out == f"vardrop {vd.__version__}\n" * 2


def test_quiet_prints_errors_alone_and_json_the_result_alone(here, capsys):
    quick = ("--epochs", 1, "--folds", 1, "--no-compare")
    assert call("fit", "iris", *quick, "--out", "r", "--quiet") == 0
    assert printed(capsys, "--quiet", "evaluate", "r") == ("", "")
    out, err = printed(capsys, "fit", "iris", *quick, "--out", "r", "--quiet", code=1)
    assert out == ""
    assert err.startswith("vardrop: r already holds files")
    assert call("fit", "iris", *quick, "--out", "s", "--quiet", "--json") == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["event"] == "result"


@pytest.mark.parametrize("name, make, told", [
    ("l0", vd.l0, "`name` to be a text that is not taken, but got 'l0'"),
    ("none", vd.l0, "`name` to be a text that is not taken, but got 'none'"),
    (3, vd.l0, "`name` to be a text that is not taken, but got 3"),
    ("mine", lambda rate: vd.l0(), "without arguments, but got: .* Give them defaults"),
    ("mine", vd.l0(), "`make` to be a function that gives a recipe without arguments"),
    ("mine", lambda: 3, "`make` to give a recipe, but got 3"),
])  # fmt: skip
def test_a_method_of_ones_own_is_checked(name, make, told):
    before = dict(METHODS)
    assert_refused(told, vd.register_recipe, name, make)
    assert before == METHODS


def test_what_follows_two_dashes_is_no_option(capsys):
    assert "but got '--quiet'" in printed(capsys, "fit", "--", "--quiet", code=1).err


# `vardrop reproduce`: names, --list, --quick with its exit code, --page, errors.


@pytest.fixture
def folder(tmp_path, monkeypatch):
    describe(tmp_path / "experiments")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(FUNCTIONS, "toy_training", toy_training)
    return tmp_path


def test_runs_and_goes_on(folder, capsys):
    out = printed(capsys, "reproduce", "toy/run").out
    assert "toy/run: 67%, seed 1 done; about 0 min left" in out
    assert "loss" in out
    assert "result: results/toy/run.json" in out
    written = (folder / "results/toy/run.json").read_text()
    assert call("reproduce", "toy/run") == 0
    assert (folder / "results/toy/run.json").read_text() == written
    assert call("reproduce", "toy/run", "--results", "other") == 0
    assert len(json.loads((folder / "other/toy/run.json").read_text())["runs"]) == 3


def test_force_starts_anew(folder, capsys):
    path = folder / "results/toy/run.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"arguments": {"epochs": 9}, "runs": [], "figures": {}}))
    assert "--force" in printed(capsys, "reproduce", "toy/run", code=1).err
    assert call("reproduce", "toy/run", "--force") == 0
    assert json.loads(path.read_text())["arguments"] == {"epochs": 4}


def test_list(folder, capsys):
    assert call("reproduce", "--list") == 0
    assert " 3  toy/run   0/3     2 min  A toy [Nobody 2020; table 7]" in capsys.readouterr().out
    assert call("reproduce", "toy/run") == 0
    assert "toy/run  done" in printed(capsys, "reproduce", "--list").out


def test_quick_checks_the_bounds(folder, capsys):
    assert "toy/run: ok (0 s): loss = 0." in printed(capsys, "reproduce", "--quick").out
    assert not (folder / "results").exists()
    text = (folder / "experiments/toy/run.toml").read_text()
    (folder / "experiments/toy/run.toml").write_text(text.replace("[0.0, 2.0]", "[5.0, 6.0]"))
    assert call("reproduce", "toy/run", "--quick", "--results", "kept") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].startswith("toy/run: failed")
    assert lines[-1].startswith("toy/run: loss = 0.")
    assert lines[-1].endswith(", expected 5.0 to 6.0")
    assert (folder / "kept/toy/run.json").is_file()


def test_quick_of_one_shows_every_figure_beside_its_bounds(folder, capsys):
    lines = printed(capsys, "reproduce", "toy/run", "--quick").out.splitlines()
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines]
    (loss,) = (row for row in rows if row[:1] == ["loss"])
    assert 0 < float(loss[1]) < 2
    assert loss[2] == "0 to 2"
    assert ["seed", "0", ""] in rows


def test_page(folder, capsys):
    assert printed(capsys, "reproduce", "--page").out.strip() == "docs/results.md"
    assert "not run" in (folder / "docs/results/toy.md").read_text()


@pytest.mark.parametrize("typed, code, says", [
    ("", 2, "Expected a name, --quick, --list or --page"),
    ("toy/run toy/run", 2, "unexpected extra argument"), ("toy/run --list", 2, "Expected a name"),
    ("--quick --page", 2, "Expected a name"), ("toy/ran", 1, "such as toy/run, but got 'toy/ran'"),
    ("--quick toy/ran", 1, "such as toy/run, but got 'toy/ran'"),
])  # fmt: skip
def test_broken_calls(folder, capsys, typed, code, says):
    assert says in printed(capsys, "reproduce", *typed.split(), code=code).err


def test_the_descriptions_here_come_before_those_of_the_clone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert import_experiments()[0] == ROOT / "experiments"
    (tmp_path / "experiments").mkdir()  # of another project
    assert import_experiments()[0] == ROOT / "experiments"
    describe(tmp_path / "experiments")
    assert import_experiments()[0] == Path("experiments")
    wheel = tmp_path / "site-packages" / "experiments"  # descriptions without code
    assert_refused("File not found: .*in a clone of the repository", import_experiments, wheel)
