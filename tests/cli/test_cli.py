"""The command line: every command, exit codes, and what it says of broken inputs."""

import json
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

from vardrop.cli import main


def call(*arguments):
    """Run a command in this process; its exit code."""
    with pytest.raises(SystemExit) as left:
        main([str(a) for a in arguments])
    return left.value.code


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with tables, a run on a table and a run on images."""
    folder = tmp_path_factory.mktemp("cli")
    n = 80
    table = pd.DataFrame(
        {
            "area": [50 + (7 * i) % 60 for i in range(n)],
            "town": ["Ulm" if i % 3 else "Bern" for i in range(n)],
            "price": [3.5 * ((7 * i) % 60) + (i % 5) for i in range(n)],
        }
    )
    table.to_csv(folder / "houses.csv", index=False)
    table.drop(columns="price").head(4).to_csv(folder / "new.csv", index=False)
    table.head(4).drop(columns=["town"]).to_csv(folder / "no_town.csv", index=False)
    table.assign(k=1).to_csv(folder / "constant.csv", index=False)
    table.assign(price=["x" if i == 8 else i for i in range(n)]).to_csv(
        folder / "text.csv", index=False
    )
    table.assign(price=[None if i == 8 else i for i in range(n)]).to_csv(
        folder / "hole.csv", index=False
    )
    table.assign(key=[f"n{i}" for i in range(n)]).to_csv(folder / "keys.csv", index=False)
    table.head(2).to_csv(folder / "two.csv", index=False)
    (folder / "empty.csv").write_text("")
    (folder / "torn.csv").write_text("a,b\n1,2\n3,4,5\n")
    (folder / "bad.parquet").write_bytes(b"nothing")
    np.save(folder / "small.npy", np.zeros((2, 1, 5, 5)))
    (folder / "notarun").mkdir()
    (folder / "notarun" / "config.json").write_text("{")
    quick = ("--epochs", 2, "--json")
    assert (
        call("fit", folder / "houses.csv", "--target", "price", "--out", folder / "h", *quick) == 0
    )
    assert call("fit", "digits", "--method", "none", "--out", folder / "plain", *quick) == 0
    assert call("fit", "digits", "--out", folder / "a", "--tensorboard", *quick) == 0
    return folder


def test_the_commands_of_a_day(folder, capsys):
    out = folder / "predictions.csv"
    assert call("predict", folder / "h", folder / "new.csv", "--out", out) == 0
    assert list(pd.read_csv(out)) == ["mean", "lower", "upper", "aleatoric", "epistemic"]
    assert call("evaluate", folder / "a", "--ood", "photos", "--json") == 0
    lines = capsys.readouterr().out.splitlines()
    assert "auroc_entropy" in json.loads(lines[-1])["ood"]["photos"]
    assert call("compress", folder / "a", "--sparsity", 0.3) == 0
    text = capsys.readouterr().out
    assert "times fewer weights" in text
    assert "small.safetensors" in text
    assert call("report", folder / "a", folder / "plain", "--out", folder / "both.html") == 0
    assert (folder / "both.html").stat().st_size > 10_000
    assert any((folder / "a" / "tensorboard").iterdir())


def test_training_speaks_json_and_prints_inferred_types(folder, capsys):
    arguments = ("fit", folder / "houses.csv", "--target", "price", "--epochs", 1)
    assert call(*arguments, "--out", folder / "j", "--json") == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [e["event"] for e in events] == ["data", "epoch", "result"]
    assert events[2]["metrics"]["rmse"] > 0
    assert call(*arguments, "--out", folder / "w") == 0
    out, err = capsys.readouterr()
    assert "price: regression" in out
    assert "category town: Bern, Ulm" in out
    assert err == ""  # no bar without a terminal


def test_resume_goes_on_and_force_overwrites(folder, capsys):
    out = folder / "r"
    assert call("fit", "iris", "--out", out, "--epochs", 1, "--json") == 0
    assert call("fit", "--resume", "--out", out, "--epochs", 3, "--json") == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [e["epoch"] for e in events if e["event"] == "epoch"] == [0, 1, 2]
    assert call("fit", "iris", "--out", out, "--epochs", 1) == 1
    assert "--resume, overwrite it by --force" in capsys.readouterr().err
    assert call("fit", "iris", "--out", out, "--epochs", 1, "--force") == 0


def test_methods_are_listed_with_papers(capsys):
    assert call("methods") == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("sparse_vd") and "Molchanov" in line for line in lines)
    assert call("methods", "--json") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[0])["name"] == "ard"


@pytest.mark.parametrize(
    "command", ["demo", "methods", "fit", "predict", "evaluate", "compress", "report"]
)
def test_help_has_an_example(command, capsys):
    assert call(command, "--help") == 0
    assert f"vardrop {command}" in capsys.readouterr().out.rsplit("Example", 1)[1]


def test_no_argument_is_help(capsys):
    assert call() == 0
    assert "--install-completion" in capsys.readouterr().out


# What is typed, the exit code, and a part of the line that answers.
BROKEN = [
    ("fly", 2, "No such command"),
    ("fit", 2, "Expected DATA"),
    ("fit digits --speed 3", 2, "No such option"),
    ("fit digits --epochs few", 2, "valid integer"),
    ("fit digits --epochs 0", 2, "`epochs` to be at least 1"),
    ("fit digits --lr -1", 2, "`lr` to be above 0"),
    ("fit digits --rate steep", 2, "`rate` to be one of"),
    ("fit digits --warmup 5", 2, "two numbers such as 5,20"),
    ("fit digits --warmup 9,5", 2, "0 <= `start` < `end`"),
    ("fit digits --precision int4", 2, "`precision`"),
    ("fit digits --device abacus", 2, "`device`"),
    ("fit digits --method magic", 2, "a method among"),
    ("fit digits --option rate", 2, "name=value"),
    ("fit digits --method dropconnect --option rate=1", 2, "options of dropconnect"),
    ("fit digits --method dropconnect --option drop_rate=7", 2, "drop_rate"),
    ("fit digits --net vgg", 2, "--net among mlp"),
    ("fit houses.csv --target price --task ranking", 2, "--task among"),
    ("fit --resume", 2, "--out with --resume"),
    ("fit digits --resume --out a", 2, "only --out and settings"),
    ("predict h", 2, "Missing argument"),
    ("compress a --max-drop 0.1 --sparsity 0.5", 2, "--max-drop or --sparsity"),
    ("fit imagenet --out x", 1, "data to be one of digits"),
    ("fit absent.csv --target y --out x", 1, "absent.csv, but it is not there"),
    ("fit empty.csv --target y --out x", 1, "empty.csv to hold a table, but it is empty"),
    ("fit torn.csv --target a --out x", 1, "line 3"),
    ("fit bad.parquet --target a --out x", 1, "bad.parquet to be a table"),
    ("fit houses.csv --out x", 1, "a target for"),
    ("fit houses.csv --target cost --out x", 1, "target column 'cost'"),
    ("fit constant.csv --target price --out x", 1, "column 'k'"),
    ("fit text.csv --target price --out x", 1, "'x' in row 9"),
    ("fit hole.csv --target price --out x", 1, "row 9 has none"),
    ("fit keys.csv --target price --out x", 1, "at most 50 categories in column 'key'"),
    ("fit two.csv --target price --out x", 1, "at least 4 rows"),
    ("fit houses.csv --target price --drop k --out x", 1, "column 'k' to drop"),
    ("fit houses.csv --target price --net lenet5 --out x", 1, "images of at least 4 x 4"),
    ("fit digits --where nothing --out x", 1, "`where` to match a module"),
    ("fit digits --out houses.csv", 1, "to be a directory, but it is a file"),
    ("fit digits --lr 1e30 --epochs 3 --out nan", 1, "Lower the learning rate"),
    ("fit --resume --out absent", 1, "Is this the directory of a run"),
    ("predict h no_town.csv --out p.csv", 1, "none named 'town'"),
    ("predict a new.csv --out p.csv", 1, "an .npy file with images of shape (N, 1, 8, 8)"),
    ("predict a small.npy --out p.csv", 1, "got (2, 1, 5, 5)"),
    ("evaluate absent", 1, "Is this the directory of a run"),
    ("evaluate notarun", 1, "config.json to hold JSON"),
    ("evaluate a --ood moons", 1, "other data among"),
    ("evaluate h --ood photos", 1, "a net on images"),
    ("compress plain", 1, "a run with a method to compress"),
    ("compress a --sparsity 2", 1, "threshold with `sparsity` within"),
    ("report absent", 1, "to be a run directory"),
]  # fmt: skip


@pytest.mark.parametrize("typed, code, answer", BROKEN, ids=[b[0] for b in BROKEN])
def test_broken_inputs_get_one_line(folder, monkeypatch, capsys, typed, code, answer):
    monkeypatch.chdir(folder)
    assert call(*typed.split()) == code
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("vardrop: ")
    assert answer in lines[0]
    assert "Traceback" not in lines[0]


def test_what_fails_before_training_leaves_no_directory(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert call("fit", "digits", "--where", "nothing", "--out", "untouched") == 1
    assert call("fit", "digits", "--method", "mc_dropout", "--out", "untouched") == 1
    assert not (folder / "untouched").exists()


def test_debug_shows_where(folder, monkeypatch):
    monkeypatch.chdir(folder)
    with pytest.raises(Exception, match="it is not there"):
        main(["fit", "absent.csv", "--target", "y", "--out", "x", "--debug"])


def test_the_program_itself_exits_with_its_code():
    done = subprocess.run(
        [sys.executable, "-m", "vardrop.cli", "fit", "imagenet", "--out", "/dev/null/x"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
