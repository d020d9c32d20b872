"""The command line: every command, exit codes, help and completion."""

import dataclasses
import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import warnings

import pandas as pd
import pytest

from tests.app.cli.calling import call, printed
from tests.app.sealed import reseal
from tests.running import python
from vardrop.app.cli import main
from vardrop.app.runs import Settings
from vardrop.app.runs.models import RECOMMENDED


def test_the_commands_of_a_day(folder, capsys):
    out = folder / "predictions.csv"
    assert call("predict", folder / "h", folder / "new.csv", "--out", out) == 0
    assert list(pd.read_csv(out)) == ["mean", "lower", "upper", "aleatoric", "epistemic"]
    lines = printed(capsys, "evaluate", folder / "a", "--ood", "photos", "--json").out.splitlines()
    assert "auroc_entropy" in json.loads(lines[-1])["ood"]["photos"]
    words = {
        ("a", "--sparsity", 0.3, "--onnx", folder / "a.onnx"): [
            "times fewer", "saves bytes (vardrop.pack), not latency",
            "accuracy on test data 0.", "small.safetensors",
        ],
        ("h", "--sparsity", 0.3): ["rmse on test data "],
        ("plain", "--macs", 0.5): ["MACs", "accuracy on test data "],
    }  # fmt: skip
    for (name, *options), told in words.items():
        text, err = printed(capsys, "compress", folder / name, *options)
        assert [part for part in told if part not in text] == []
        assert err == ""  # the exporter's own words are not passed on
    assert (folder / "a.onnx").stat().st_size > 1000
    assert call("report", folder / "a", folder / "plain", "--out", folder / "both.html") == 0
    assert (folder / "both.html").stat().st_size > 10_000


def test_runs_and_methods_are_compared(folder, tmp_path, capsys):
    runs = (folder / "plain", folder / "a")
    assert call("compare", *runs, "--scores", "accuracy,auroc", "--out", tmp_path / "two") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["accuracy", "AUROC"]
    assert lines[1].startswith("plain ")
    assert lines[3].startswith("  against plain ")
    assert lines[-1].endswith("comparison.png")
    assert (tmp_path / "two" / "comparison.png").is_file()
    found = json.loads(printed(capsys, "compare", *runs, "--json").out)
    assert found["event"] == "comparison"
    assert found["differences"]["a"]["nll"]["low"] < found["differences"]["a"]["nll"]["high"]
    quick = ("--epochs", 1, "--folds", 1, "--beta", 0.3, "--seeds", 2, "--net", "dense-4")
    typed = ("compare", "iris", "--recipes", "none, l0", *quick, "--out", tmp_path / "m")
    lines = printed(capsys, *typed).out.splitlines()
    named = [f"{name}, seed {seed}" for name in ("none", "l0") for seed in (0, 1)]
    assert [line.split(":")[0] for line in lines[:4]] == named
    assert "Means of 2 seeds" in lines[-2]
    (line,) = printed(capsys, *typed, "--json", "--quiet").out.splitlines()
    assert list(json.loads(line)["scores"]) == ["none", "l0"]


def test_training_speaks_json_and_prints_inferred_types(folder, capsys):
    arguments = ("fit", folder / "houses.csv", "--target", "price", "--epochs", 1)
    assert call(*arguments, "--out", folder / "j", "--json") == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    # What is held out, each of three KL weights, the plain net and what it scored.
    assert [e["event"] for e in events] == ["data", *["note"] * 6, "epoch", "result"]
    assert events[1]["text"].startswith("4 folds in turn choose the KL weight")
    assert events[-1]["metrics"]["rmse"] > 0
    out, err = printed(capsys, *arguments, "--out", folder / "w")
    assert "price: regression" in out
    assert "category town: Bern, Ulm" in out
    assert err == ""  # no bar without a terminal


def test_methods_are_listed_with_papers(capsys):
    recommended, _, every = printed(capsys, "methods").out.partition("All methods:")
    assert {line.split()[0] for line in recommended.splitlines()[1:] if line} == set(RECOMMENDED)
    assert re.search(r"sparse_vd .*\n +Molchanov", every)
    assert json.loads(printed(capsys, "methods", "--json").out.splitlines()[0])["name"] == "ard"


COMMANDS = ("demo", "methods", "fit", "predict", "evaluate", "compress", "compare", "export")


@pytest.mark.parametrize("command", [*COMMANDS, "report", "reproduce"])
def test_help_has_an_example(command, capsys):
    assert f"vardrop {command}" in printed(capsys, command, "--help").out.rsplit("Example", 1)[1]


HELP_GROUPS = ["Arguments", "Main options", "Data", "Model and method", "Training", "Options"]


def test_summaries_are_complete_and_long_helps_have_groups(capsys):
    assert "..." not in printed(capsys, "--help").out.partition("Commands:")[2]
    for command in ("fit", "compare"):
        titles = re.findall(r"^(\w[\w ]*):$", printed(capsys, command, "--help").out, re.MULTILINE)
        assert titles == HELP_GROUPS
    main = printed(capsys, "fit", "--help").out.partition("Main options:")[2].partition("\n\n")[0]
    assert main.count("\n  --") == 10


def test_every_setting_is_an_option_with_its_help_and_default(capsys):
    out = printed(capsys, "fit", "--help").out
    assert "vardrop fit --resume --out runs/a" in [line.strip() for line in out.splitlines()]
    assert "VARDROP_DATA" in out
    assert "shared" not in out  # which is a directory of ours
    options = re.split(r"\n  --|\n\n", out)
    shown = {o.split()[0].replace("-", "_"): " ".join(o.split()) for o in options}
    assert "Examples per step" in shown["batch_size"]
    for field in dataclasses.fields(Settings):
        text, default = shown[field.name], field.default
        assert len(text.split()) > 2, text
        if default is not None and default is not False:
            number = f"{default:g}" if isinstance(default, float) else default
            number = "on" if default is True else number
            assert text.endswith(f"; {number} by default.")


def test_every_setting_arrives(tmp_path, capsys):
    typed = {"epochs": 2, "batch_size": 7, "lr": 0.01, "noise_lr": 0.02, "weight_decay": 0.1, "rate": "cosine",
             "warmup": "0,1.5", "beta": 0.5, "folds": 1, "samples": 2, "clip": 3.0, "pretrain": 1, "patience": 4,
             "precision": "bfloat16", "device": "cpu", "seed": 9, "checkpoint_seconds": 5.0,
             "class_weight": "balanced"}  # fmt: skip
    flags = {"compile": False, "compare": False, "heteroscedastic": False}
    assert {*typed, *flags} == {f.name for f in dataclasses.fields(Settings)}
    options = [word for n, v in typed.items() for word in (f"--{n.replace('_', '-')}", v)]
    options.append("--no-compare")
    assert call("fit", "iris", "--out", tmp_path / "r", *options, "--json") == 0
    stored = json.loads((tmp_path / "r" / "config.json").read_text())["settings"]
    assert stored == {**typed, "warmup": [0.0, 1.5], **flags}


@pytest.mark.parametrize("typed, offered", [
    ("ev", "evaluate"), ("fit di", "digits diabetes"), ("fit --net len", "lenet300 lenet5"),
    ("fit digits --recipe spar", "sparse_vd sparsemax"),
    ("fit digits --rate co", "constant cosine"), ("evaluate a --ood ph", "photos"),
])  # fmt: skip
def test_the_shell_completes(typed, offered, monkeypatch, capsys):
    words = f"vardrop {typed}"
    monkeypatch.setenv("_VARDROP_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    assert printed(capsys).out.split() == offered.split()


def test_no_argument_is_help(capsys):
    assert "--install-completion" in printed(capsys).out


def test_debug_shows_where(folder, monkeypatch):
    monkeypatch.chdir(folder)
    with pytest.raises(Exception, match="File not found"):
        main(["fit", "absent.csv", "--target", "y", "--out", "x", "--debug"])


def test_the_program_itself_exits_with_its_code():
    done = python("-m", "vardrop", "fit", "imagenet", "--out", "/dev/null/x")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)


def started(*words):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, *words], **pipes, text=True)


@pytest.fixture
def interruptible():
    """A shell starts what runs in its background deaf to interrupts, and children inherit that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_stops_with_one_line_and_the_run_goes_on(tmp_path, capsys):
    out = tmp_path / "run"
    arguments = ["fit", "iris", "--epochs", "100000", "--patience", "90000", "--json"]
    arguments += ["--beta", "1", "--no-compare"]
    with started("-m", "vardrop", *arguments, "--out", str(out)) as running:
        events = [json.loads(running.stdout.readline())["event"] for _ in range(2)]
        running.send_signal(signal.SIGINT)
        _, err = running.communicate(timeout=60)
    assert (events, running.returncode) == (["data", "epoch"], 1)
    assert err == f"vardrop: stopped. Resume with `vardrop fit --resume --out {out}`.\n"
    command = json.loads((out / "config.json").read_text())["command"]
    assert command.startswith("vardrop fit iris --epochs 100000")
    done = json.loads((out / "checkpoint.json").read_text())["epoch"]
    assert call("fit", "--resume", "--out", out, "--epochs", done + 1, "--json") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[0])["epoch"] == done


@pytest.mark.parametrize("verb, typed, told", [
    ("runs.fit", "fit iris --out x", "stopped before it began."),
    ("runs.fit", "fit iris --out h", "stopped. Resume with `vardrop fit --resume --out h`."),
    ("runs.resume", "fit --resume --out h", "Resume with `vardrop fit --resume --out h`."),
    ("runs.compare_methods", "compare iris --recipes l0 --out 'a b'",
     "stopped. Run the same command with --out 'a b' to resume."),
])  # fmt: skip
def test_a_stop_says_how_to_go_on(folder, monkeypatch, capsys, verb, typed, told):
    def stop(*arguments, **more):
        raise KeyboardInterrupt

    monkeypatch.chdir(folder)
    monkeypatch.setattr(f"vardrop.app.{verb}", stop)
    assert told in printed(capsys, *shlex.split(typed), code=1).err


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("seconds", [0.2, pytest.param(1.0, marks=pytest.mark.slow)])
def test_an_interrupt_while_it_starts_is_one_line(tmp_path, seconds):
    start = "import sys, vardrop.app.cli; print('on', flush=True); vardrop.app.cli.main()"
    with started("-c", start, "fit", "iris", "--out", str(tmp_path / "run")) as running:
        assert running.stdout.readline() == "on\n"
        time.sleep(seconds)
        running.send_signal(signal.SIGINT)
        _, err = running.communicate(timeout=60)
    assert running.returncode == 1
    assert err in (
        "vardrop: stopped before it began.\n",
        "vardrop: stopped before it ended.\n",  # between the start and the training
        f"vardrop: stopped. Resume with `vardrop fit --resume --out {tmp_path / 'run'}`.\n",
    )


def test_names_out_of_files_do_not_steer_the_terminal(tmp_path, capsys):
    rows = {"a\x1b[2J": range(40), "b": ["x\x1b]0;t\x07" if i % 2 else "y" for i in range(40)]}
    path = tmp_path / "t\x1b[31m.csv"
    pd.DataFrame({**rows, "y": [i % 7 for i in range(40)]}).to_csv(path, index=False)
    fitted = ("fit", path, "--target", "y", "--epochs", 1, "--out", tmp_path / "r")
    assert [call(*fitted), call(*fitted), call("fit", path, "--out", tmp_path / "s")] == [0, 1, 1]
    out, err = capsys.readouterr()
    assert not [code for code in ("\x1b[2J", "\x1b]", "\x1b[31m") if code in out + err]
    assert "number   a\\x1b[2J: median" in out
    assert "'a\\x1b[2J'" in err


def test_a_run_that_was_stopped_says_so(folder, tmp_path, capsys):
    shutil.copytree(folder / "h", tmp_path / "h")
    path = tmp_path / "h" / "config.json"
    reseal(path, settings={**json.loads(path.read_text())["settings"], "epochs": 30})
    assert call("predict", tmp_path / "h", folder / "new.csv", "--out", tmp_path / "p.csv") == 0
    out, err = capsys.readouterr()
    assert out == f"{tmp_path / 'p.csv'} written\n"
    stopped, last = "was stopped after 2 of 30 epochs", "its last model of the KL warm-up so far"
    assert err == f"vardrop: {tmp_path / 'h'} {stopped}. This is {last}.\n"


def test_warnings_are_one_line(folder, tmp_path, capsys, monkeypatch):
    def old(*arguments, **more):
        warnings.warn("the file is\nold\x1b[2J", stacklevel=2)

    monkeypatch.setattr("vardrop.app.runs.write_predictions", old)
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert call("predict", folder / "h", folder / "new.csv", "--out", tmp_path / "p.csv") == 0
    assert capsys.readouterr().err == "vardrop: warning: the file is old\\x1b[2J\n"
