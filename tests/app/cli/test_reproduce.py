"""`vardrop reproduce`: names, --list, --quick with its exit code, --page, errors."""

import json
from pathlib import Path

import pytest

from experiments.command import FUNCTIONS
from tests.app.cli.calling import call
from tests.experiments.toy import describe, toy_training
from vardrop._core.errors import VardropError
from vardrop.app.cli.commands import experiments_command, experiments_directory
from vardrop.app.data import IMAGE_SETS, idx_set


@pytest.fixture
def folder(tmp_path, monkeypatch):
    describe(tmp_path / "experiments")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(FUNCTIONS, "toy_training", toy_training)
    return tmp_path


def test_runs_and_goes_on(folder, capsys):
    assert call("reproduce", "toy/run") == 0
    out = capsys.readouterr().out
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
    assert call("reproduce", "toy/run") == 1
    assert "--force" in capsys.readouterr().err
    assert call("reproduce", "toy/run", "--force") == 0
    assert json.loads(path.read_text())["arguments"] == {"epochs": 4}


def test_list(folder, capsys):
    assert call("reproduce", "--list") == 0
    line = capsys.readouterr().out
    assert " 3  toy/run   0/3     2 min  A toy [Nobody 2020; table 7]" in line
    assert call("reproduce", "toy/run") == 0
    assert call("reproduce", "--list") == 0
    assert "toy/run  done" in capsys.readouterr().out


def test_quick_checks_the_bounds(folder, capsys):
    assert call("reproduce", "--quick") == 0
    assert "toy/run: ok (0 s): loss = 0." in capsys.readouterr().out
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
    assert call("reproduce", "toy/run", "--quick") == 0
    rows = [
        [c.strip() for c in line.split("│")[1:-1]] for line in capsys.readouterr().out.splitlines()
    ]
    (loss,) = (row for row in rows if row[:1] == ["loss"])
    assert 0 < float(loss[1]) < 2
    assert loss[2] == "0 to 2"
    assert ["seed", "0", ""] in rows


def test_page(folder, capsys):
    assert call("reproduce", "--page") == 0
    assert capsys.readouterr().out.strip() == "docs/results.md"
    assert "not run yet" in (folder / "docs/results.md").read_text()


@pytest.mark.parametrize(
    ("typed", "code", "says"),
    [
        ("", 2, "Expected a name, --quick, --list or --page"),
        ("toy/run toy/run", 2, "unexpected extra argument"),
        ("toy/run --list", 2, "Expected a name"),
        ("--quick --page", 2, "Expected a name"),
        ("toy/ran", 1, "such as toy/run, but got 'toy/ran'"),
        ("--quick toy/ran", 1, "such as toy/run, but got 'toy/ran'"),
        ("toy/run --experiments nowhere", 1, "Expected descriptions"),
    ],
)
def test_broken_calls(folder, capsys, typed, code, says):
    assert call("reproduce", *typed.split()) == code
    assert says in capsys.readouterr().err


def test_missing_images_are_an_error_that_names_the_file(folder, capsys, monkeypatch):
    monkeypatch.setenv("VARDROP_DATA", str(folder / "none"))
    offline = idx_set("mnist", None, **IMAGE_SETS["mnist"].md5)
    monkeypatch.setitem(IMAGE_SETS, "mnist", offline)
    text = (folder / "experiments/toy/run.toml").read_text()
    (folder / "experiments/toy/run.toml").write_text(text.replace("toy_training", "sparse_mnist"))
    assert call("reproduce", "toy/run") == 1
    assert "train-images-idx3-ubyte.gz, but it is not there" in capsys.readouterr().err


ROOT = Path(__file__).parents[3]


def test_the_descriptions_here_come_before_those_beside_the_source(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert experiments_directory() == ROOT / "experiments"
    (tmp_path / "experiments").mkdir()  # somebody else's
    assert experiments_directory() == ROOT / "experiments"
    describe(tmp_path / "experiments")
    assert experiments_directory() == Path("experiments")
    assert experiments_directory(Path("given")) == Path("given")


def test_without_a_clone_it_says_where_the_experiments_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wheel = tmp_path / "site-packages" / "experiments"
    says = "Expected a clone of vardrop's repository.* clone the repository or unpack the source"
    with pytest.raises(VardropError, match=says):
        experiments_directory(beside=wheel)
    describe(tmp_path / "experiments")  # descriptions without code
    with pytest.raises(VardropError, match=says):
        experiments_command(Path("experiments"), beside=wheel)
