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

from tests.app.cli.calling import call
from vardrop._core.files import sealed
from vardrop.app.cli import main
from vardrop.app.runs import Settings


def test_the_commands_of_a_day(folder, capsys):
    out = folder / "predictions.csv"
    assert call("predict", folder / "h", folder / "new.csv", "--out", out) == 0
    assert list(pd.read_csv(out)) == ["mean", "lower", "upper", "aleatoric", "epistemic"]
    assert call("evaluate", folder / "a", "--ood", "photos", "--json") == 0
    lines = capsys.readouterr().out.splitlines()
    assert "auroc_entropy" in json.loads(lines[-1])["ood"]["photos"]
    assert call("compress", folder / "a", "--sparsity", 0.3, "--onnx", folder / "a.onnx") == 0
    text, err = capsys.readouterr()
    assert "times fewer weights" in text
    assert "saves bytes (vardrop.pack), not latency" in text
    assert "accuracy on test data 0." in text
    assert "small.safetensors" in text
    assert err == ""  # the exporter's own words are not passed on
    assert (folder / "a.onnx").stat().st_size > 1000
    assert call("compress", folder / "h", "--sparsity", 0.3) == 0
    assert "rmse on test data " in capsys.readouterr().out
    assert call("compress", folder / "plain", "--macs", 0.5) == 0
    text, err = capsys.readouterr()
    assert "MACs" in text
    assert "accuracy on test data " in text
    assert err == ""
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
    assert call("compare", *runs, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["event"] == "comparison"
    assert found["differences"]["a"]["nll"]["low"] < found["differences"]["a"]["nll"]["high"]
    quick = ("--epochs", 1, "--folds", 1, "--beta", 0.3, "--seeds", 2, "--net", "dense-4")
    typed = ("compare", "iris", "--methods", "none, l0", *quick, "--out", tmp_path / "m")
    assert call(*typed) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[:4]] == [
        f"{name}, seed {seed}" for name in ("none", "l0") for seed in (0, 1)
    ]
    assert "Means of 2 seeds" in lines[-2]
    assert call(*typed, "--json", "--quiet") == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert list(json.loads(line)["scores"]) == ["none", "l0"]


def test_training_speaks_json_and_prints_inferred_types(folder, capsys):
    arguments = ("fit", folder / "houses.csv", "--target", "price", "--epochs", 1)
    assert call(*arguments, "--out", folder / "j", "--json") == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    # What is held out, each of three KL weights, the plain net and what it scored.
    assert [e["event"] for e in events] == ["data", *["note"] * 6, "epoch", "result"]
    assert events[1]["text"].startswith(
        "4 folds of 64 rows, held out in turn, choose the KL weight"
    )
    assert events[-1]["metrics"]["rmse"] > 0
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


def test_tensorboard_goes_into_the_directory_of_the_run(tmp_path):
    pytest.importorskip("tensorboard", reason="needs tensorboard: pip install tensorboard")
    assert call("fit", "iris", "--out", tmp_path / "r", "--epochs", 1, "--tensorboard") == 0
    assert len(list((tmp_path / "r" / "tensorboard").iterdir())) == 1


def test_methods_are_listed_with_papers(capsys):
    assert call("methods") == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("sparse_vd") and "Molchanov" in line for line in lines)
    assert call("methods", "--json") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[0])["name"] == "ard"


@pytest.mark.parametrize(
    "command",
    [
        "demo",
        "methods",
        "fit",
        "predict",
        "evaluate",
        "compress",
        "compare",
        "export",
        "report",
        "reproduce",
    ],
)
def test_help_has_an_example(command, capsys):
    assert call(command, "--help") == 0
    examples = capsys.readouterr().out.rsplit("Example", 1)[1]
    assert f"vardrop {command}" in examples


def test_every_setting_is_an_option_with_its_help_and_default(capsys):
    assert call("fit", "--help") == 0
    options = re.split(r"\n  --", capsys.readouterr().out)
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


def test_examples_of_help_stand_on_lines_of_their_own(capsys):
    assert call("fit", "--help") == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert "vardrop fit --resume --out runs/a" in lines


@pytest.mark.parametrize(
    "typed, offered",
    [
        ("ev", "evaluate"),
        ("fit di", "digits diabetes"),
        ("fit --net len", "lenet300 lenet5"),
        ("fit digits --method spar", "sparse_vd sparsemax"),
        ("fit digits --rate co", "constant cosine"),
        ("evaluate a --ood ph", "photos"),
    ],
)
def test_the_shell_completes(typed, offered, monkeypatch, capsys):
    words = f"vardrop {typed}"
    monkeypatch.setenv("_VARDROP_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    assert call() == 0
    assert capsys.readouterr().out.split() == offered.split()


def test_no_argument_is_help(capsys):
    assert call() == 0
    assert "--install-completion" in capsys.readouterr().out


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
        [sys.executable, "-m", "vardrop", "fit", "imagenet", "--out", "/dev/null/x"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1


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
    with subprocess.Popen(
        [sys.executable, "-m", "vardrop", *arguments, "--out", str(out)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as running:  # fmt: skip
        events = [json.loads(running.stdout.readline())["event"] for _ in range(2)]
        running.send_signal(signal.SIGINT)
        _, err = running.communicate(timeout=60)
    assert events == ["data", "epoch"]
    assert running.returncode == 1
    assert err == f"vardrop: stopped. Resume with `vardrop fit --resume --out {out}`.\n"
    command = json.loads((out / "config.json").read_text())["command"]
    assert command.startswith("vardrop fit iris --epochs 100000")
    done = json.loads((out / "checkpoint.json").read_text())["epoch"]
    assert call("fit", "--resume", "--out", out, "--epochs", done + 1, "--json") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[0])["epoch"] == done


@pytest.mark.parametrize(
    "verb, typed, told",
    [
        ("runs.fit", "fit iris --out x", "stopped before it began."),
        ("runs.fit", "fit iris --out h", "stopped. Resume with `vardrop fit --resume --out h`."),
        ("runs.resume", "fit --resume --out h", "Resume with `vardrop fit --resume --out h`."),
        ("runs.compare_methods", "compare iris --methods l0 --out 'a b'",
         "stopped. Run the same command with --out 'a b' to resume."),
    ],
)  # fmt: skip
def test_a_stop_says_how_to_go_on(folder, monkeypatch, capsys, verb, typed, told):
    def stop(*arguments, **more):
        raise KeyboardInterrupt

    monkeypatch.chdir(folder)
    monkeypatch.setattr(f"vardrop.app.{verb}", stop)
    assert call(*shlex.split(typed)) == 1
    assert told in capsys.readouterr().err


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("seconds", [0.2, 1.0])
def test_an_interrupt_while_it_starts_is_one_line(tmp_path, seconds):
    start = "import sys, vardrop.app.cli; print('on', flush=True); vardrop.app.cli.main()"
    with subprocess.Popen(
        [sys.executable, "-c", start, "fit", "iris", "--out", str(tmp_path / "run")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as running:  # fmt: skip
        assert running.stdout.readline() == "on\n"
        time.sleep(seconds)
        running.send_signal(signal.SIGINT)
        _, err = running.communicate(timeout=60)
    assert running.returncode == 1
    assert err in (
        "vardrop: stopped before it began.\n",
        f"vardrop: stopped. Resume with `vardrop fit --resume --out {tmp_path / 'run'}`.\n",
    )


@pytest.mark.parametrize(
    "package, typed, extra",
    [
        ("typer", "methods", "app"),
        ("rich", "methods", "app"),
        ("sklearn", "fit iris --out x", "app"),
        ("matplotlib", "report x", "app"),
        ("jinja2", "report x", "app"),
        ("safetensors", "fit iris --epochs 1 --out x", "app"),
    ],
)
def test_a_package_that_is_missing_is_named_with_its_extra(tmp_path, package, typed, extra):
    code = f"import sys; sys.modules[{package!r}] = None; import vardrop.app.cli; vardrop.app.cli.main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *typed.split()],
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"vardrop: Expected the package {package} to be installed")
    assert f"pip install 'vardrop[{extra}]'" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_names_out_of_files_do_not_steer_the_terminal(tmp_path, capsys):
    rows = {"a\x1b[2J": range(40), "b": ["x\x1b]0;t\x07" if i % 2 else "y" for i in range(40)]}
    table = pd.DataFrame({**rows, "y": [i % 7 for i in range(40)]})
    table.to_csv(tmp_path / "t\x1b[31m.csv", index=False)
    fitted = ("fit", tmp_path / "t\x1b[31m.csv", "--target", "y", "--epochs", 1)
    assert call(*fitted, "--out", tmp_path / "r") == 0
    assert call(*fitted, "--out", tmp_path / "r") == 1
    assert call("fit", tmp_path / "t\x1b[31m.csv", "--out", tmp_path / "s") == 1
    out, err = capsys.readouterr()
    assert "\x1b[2J" not in out + err
    assert "\x1b]" not in out + err
    assert "\x1b[31m" not in out + err
    assert "number   a\\x1b[2J: median" in out
    assert "'a\\x1b[2J'" in err


def test_a_run_that_was_stopped_says_so(folder, tmp_path, capsys):
    shutil.copytree(folder / "h", tmp_path / "h")
    config = json.loads((tmp_path / "h" / "config.json").read_text())
    del config["sha256"]
    config["settings"]["epochs"] = 30
    (tmp_path / "h" / "config.json").write_text(json.dumps(sealed(config)))
    assert call("predict", tmp_path / "h", folder / "new.csv", "--out", tmp_path / "p.csv") == 0
    out, err = capsys.readouterr()
    assert out == f"{tmp_path / 'p.csv'} written\n"
    assert err == (
        f"vardrop: {tmp_path / 'h'} was stopped after 2 of 30 epochs; this is its last net of the "
        "KL warm-up so far.\n"
    )


def test_warnings_are_one_line(folder, tmp_path, capsys, monkeypatch):
    def old(*arguments, **more):
        warnings.warn("the file is\nold\x1b[2J", stacklevel=2)

    monkeypatch.setattr("vardrop.app.runs.write_predictions", old)
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert call("predict", folder / "h", folder / "new.csv", "--out", tmp_path / "p.csv") == 0
    assert capsys.readouterr().err == "vardrop: warning: the file is old\\x1b[2J\n"


def test_help_names_no_directory_of_ours(capsys):
    assert call("fit", "--help") == 0
    out = capsys.readouterr().out
    assert "VARDROP_DATA" in out
    assert "shared" not in out
