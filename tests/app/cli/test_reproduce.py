"""`vardrop reproduce`: names, --list, --quick with its exit code, --page, errors."""

import json
from pathlib import Path

import pytest

from experiments.command import FUNCTIONS
from tests.app.cli.calling import call, printed
from tests.experiments.toy import describe, toy_training
from tests.refusals import assert_refused
from vardrop.app.cli.commands import import_experiments


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


ROOT = Path(__file__).parents[3]


def test_the_descriptions_here_come_before_those_of_the_clone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert import_experiments()[0] == ROOT / "experiments"
    (tmp_path / "experiments").mkdir()  # of another project
    assert import_experiments()[0] == ROOT / "experiments"
    describe(tmp_path / "experiments")
    assert import_experiments()[0] == Path("experiments")
    wheel = tmp_path / "site-packages" / "experiments"  # descriptions without code
    assert_refused("File not found: .*in a clone of the repository", import_experiments, wheel)
