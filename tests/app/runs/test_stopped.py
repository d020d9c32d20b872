"""A run that was stopped at any moment predicts with what it has, or says how it gets a net."""

import re

import pytest
import torch
from torch import nn

import vardrop as vd
from tests.refusals import assert_refused
from vardrop._core.files import remove
from vardrop.app.report import report
from vardrop.app.runs import evaluate, fit, load_run
from vardrop.app.runs.run_callbacks import RunCallback

QUICK = {"epochs": 6, "batch_size": 32, "lr": 1e-2, "folds": 2, "compare": False}
SAVING = {"checkpoint_seconds": 0.0}  # a checkpoint after every step


class Stops(RunCallback):
    """Interrupts the run's own training, or its trials, after so many steps."""

    def __init__(self, steps, trials=False):
        self.steps, self.trials = steps, trials

    def trial(self, label):
        return Stops(self.steps) if self.trials else RunCallback()

    def on_step(self, at, loss):
        self.steps -= 1
        if self.steps == 0 and not self.trials:
            raise KeyboardInterrupt


def stopped(path, callback, data="iris", net="mlp50", **more):
    with pytest.raises(KeyboardInterrupt):
        fit(data, net, out=path, callback=callback, **{**QUICK, **more})
    return path


UNTRAINED = [
    ({}, Stops(3, trials=True), "during the trials on held-out rows"),
    ({"folds": 1}, Stops(3, trials=True), "during the trials on held-out rows"),
    ({}, Stops(1), "before its first checkpoint"),
    ({"folds": 1, "beta": 1.0}, Stops(1), "before its first checkpoint"),
    ({"pretrain": 2, **SAVING}, Stops(3), "during the pretraining of the plain model"),
]  # fmt: skip


@pytest.mark.parametrize("more, callback, where", UNTRAINED, ids=[str(u[0]) for u in UNTRAINED])
def test_a_run_without_a_net_says_how_it_gets_one(tmp_path, more, callback, where):
    path = stopped(tmp_path / "r", callback, **more)
    told = f"{path} has no trained model yet, because it was stopped {where}.*`vardrop fit --resume --out {path}`"
    assert_refused(told, load_run, path)
    assert report([path]).is_file()
    done = vd.resume(path, callback=RunCallback())
    assert done.standing == ""
    assert len(done.history) == QUICK["epochs"] + more.get("pretrain", 0)
    assert load_run(path).predict(done.data.test.x).probs.shape == (30, 3)


@pytest.mark.parametrize("folds", [1, 2])
@pytest.mark.parametrize("steps, where", [(2, "0 of 6 epochs and 1 step"), (6, "1 of 6 epochs")])
def test_a_run_stopped_in_its_first_epochs_is_used(tmp_path, folds, steps, where):
    settings = {"folds": folds, "beta": 0.5}
    path = stopped(tmp_path / "r", Stops(steps), **SAVING, **settings)
    run = load_run(path)
    assert run.standing.startswith(f"{path} was stopped after {where}")
    assert run.standing.endswith("This is its last model of the KL warm-up so far.")
    assert run.predict(run.data.test.x[:4]).probs.shape == (4, 3)
    assert evaluate(run)["metrics"]["accuracy"] >= 0
    assert run.report().is_file()
    done = vd.resume(path, callback=RunCallback())
    whole = fit("iris", "mlp50", out=tmp_path / "whole", callback=RunCallback(), **QUICK | settings)
    for name, tensor in whole.elbo.state_dict().items():
        assert torch.equal(done.elbo.state_dict()[name], tensor)


def test_what_was_handed_over_has_to_be_handed_over_again(tmp_path):
    rows = torch.arange(120.0).reshape(60, 2), [i % 2 for i in range(60)]
    net = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2))
    path = stopped(tmp_path / "own's", Stops(1), rows, net)
    call = f"`vardrop.resume({str(path)!r}, net=net, data=data)`"
    assert_refused(re.escape(call), load_run, path)
    fresh = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2))
    assert vd.resume(path, net=fresh, data=rows, callback=RunCallback()).standing == ""


def test_a_net_without_a_scale_says_so_without_its_checkpoint_too(tmp_path):
    path = stopped(tmp_path / "r", Stops(6), **SAVING, beta=0.5, folds=1)
    assert "was stopped after 1 of 6 epochs" in load_run(path).standing
    remove(path / "checkpoint.json")  # as where the first one was being written
    told = load_run(path).standing
    assert "before the scale of its noise was chosen. Resume it with `vardrop fit --resume" in told
