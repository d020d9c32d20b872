"""Who is told about a training: machines by JSON lines, people by a bar."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import vardrop as vd
from vardrop.app.runs import Recorder, read_history, run_callbacks
from vardrop.tuning import Loop, Position


def train(directory, callback: run_callbacks.RunCallback):
    """Two epochs of a small net, recorded and told to the callback."""
    net = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    elbo = vd.ELBO(vd.convert(net, vd.sparse_vd()), vd.Categorical(), 30)
    x, y = torch.randn(30, 4), torch.arange(30) % 3
    loop = Loop(elbo, torch.optim.Adam(elbo.parameters()), x, y, epochs=2, batch_size=10)
    scores = lambda elbo: {"nll": 1.5, "accuracy": 0.5}
    Recorder(directory, validate=scores, callback=callback).run(loop)


def test_json_lines_are_json(tmp_path, capsys):
    watch = run_callbacks.JsonLines()
    watch.describe("target y")
    train(tmp_path, watch)
    out, err = capsys.readouterr()
    events = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert [e["event"] for e in events] == ["data", "epoch", "epoch"]
    assert events[0]["text"] == ["target y"]
    told = [{k: v for k, v in e.items() if k != "event"} for e in events[1:]]
    assert told == read_history(tmp_path)
    assert err == ""


def test_text_and_a_bar_are_shown_together(tmp_path, capsys):
    watch = run_callbacks.TextBar()
    watch.describe("target y")
    train(tmp_path, watch)
    assert watch._bar.tasks[0].completed == 6
    assert not isinstance(watch.trial("fold"), run_callbacks.TextLines)
    assert capsys.readouterr().out == "target y\n"


def test_the_bar_tells_epoch_rate_and_scores(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    bar = run_callbacks.ProgressBar("sparse")
    train(tmp_path, bar)
    (task,) = bar._bar.tasks
    assert (task.description, task.completed, task.total) == ("sparse: epoch 2/2", 6, 6)
    assert "accuracy 0.5" in task.fields["scores"]
    out, err = capsys.readouterr()
    assert out == ""
    assert "0:00:00 left" in err
    assert "so far" in err
    assert "examples/s" in err


@pytest.mark.parametrize("columns", [60, 80, 90, 110])
def test_the_bar_keeps_epoch_and_time_left_on_narrow_terminals(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    loop = SimpleNamespace(epochs=400, steps=2, epoch=388, position=0, batch_size=64)
    bar = run_callbacks.ProgressBar("KL weight 0.3, fold 1")
    bar.start(loop)
    for step in range(2):
        bar.on_step(Position(388, step + 1), torch.zeros(()))
    bar.record({"validation": {"nll": 5.408, "rmse": 53.95}, "loss": 1.2}, None)
    bar.stop()
    (line,) = capsys.readouterr().err.splitlines()
    assert len(line) <= columns
    assert line.startswith("KL weight 0.3, fold 1: epoch 389/400 ━━━━━━━━")
    assert " left" in line
    assert "…" not in line
    assert ("nll 5.408  rmse 53.95" in line) == (columns >= 85)
    assert "loss" not in line
