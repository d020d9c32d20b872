"""Files that are whole or absent, and what a training in a directory keeps."""

import errno
import json
import os
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import vardrop as vd
from tests.app.runs.test_nothing_lost import same_tensors
from tests.nets import is_same_state
from tests.refusals import assert_refused
from tests.running import python
from tests.tuning.shared import After, adam, data, objective
from vardrop._core import files
from vardrop._core.files import read_tensors, remove, write_tensors
from vardrop.app.report import report
from vardrop.app.runs import Recorder, evaluate, fit, load_run, read_history
from vardrop.app.runs.recorder import load_optimizer, optimizer_tensors
from vardrop.app.runs.run_callbacks import RunCallback
from vardrop.tuning import Loop, NotFiniteError, Position


def loop(epochs=3, batch_size=16):
    elbo = objective()
    return Loop(elbo, adam(elbo), *data(), epochs, batch_size)


def timeless(directory):
    return [{k: v for k, v in r.items() if k != "seconds"} for r in read_history(directory)]


def full(descriptor):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def resumed(directory, training, **options):
    """A training that went on from a directory to its end."""
    recorder = Recorder(directory, **options)
    recorder.resume(training)
    recorder.run(training)
    return training


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    files.write_json(path, {"old": 1})

    monkeypatch.setattr(os, "fsync", full)
    assert_refused("write 4 bytes to .*a.json, .*No space", files.write_atomically, path, b"new!")
    assert files.read_json(path) == {"old": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_tensors_and_values_come_back(tmp_path):
    shared = torch.randn(3, 4)
    tensors = {"a": shared, "b": shared.t(), "c": torch.tensor(2)}
    write_tensors(tmp_path / "t.safetensors", tensors, {"epoch": 3})
    found, values = read_tensors(tmp_path / "t.safetensors")
    assert values == {"epoch": 3}
    assert all(torch.equal(found[name], t) for name, t in tensors.items())


@pytest.mark.parametrize("seconds", [0.0, 1e9])
def test_a_full_disk_stops_and_resumes_to_the_same_numbers(tmp_path, monkeypatch, seconds):
    expected, stopped, calls, sync = loop(), loop(), [], os.fsync
    for name in ("whole", "broken"):
        (tmp_path / name).mkdir()
    torch.manual_seed(1)
    Recorder(tmp_path / "whole").run(expected)

    def full_after_five(descriptor):
        calls.append(descriptor)
        if len(calls) > 5:
            full(descriptor)
        sync(descriptor)

    torch.manual_seed(1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_after_five)
        assert_refused("No space left", Recorder(tmp_path / "broken", seconds=seconds).run, stopped)
    torch.manual_seed(77)
    again = resumed(tmp_path / "broken", loop(), seconds=seconds)
    assert timeless(tmp_path / "broken") == timeless(tmp_path / "whole")
    assert is_same_state(again.elbo, expected.elbo)


def test_nan_stops_with_the_last_good_checkpoint_and_advice(tmp_path):
    class Breaks(RunCallback):
        def record(self, record, elbo):
            if record["epoch"] == 1:
                elbo.net[0].weight.data.fill_(float("nan"))

    recorder, again = Recorder(tmp_path, callback=Breaks()), loop()
    pattern = (
        r"got nan \(parameter 'net.0.weight'\) in epoch 3, step 1. Lower the learning rate, clip "
        r"the gradients or lengthen the KL warm-up. The last good state is .*checkpoint.safetensors, "
        r"after epoch 2. Resume from it with other settings."
    )
    with pytest.raises(NotFiniteError, match=pattern):
        recorder.run(loop(epochs=3))
    recorder.resume(again)
    assert again.epoch == 2
    assert bool(again.elbo.net[0].weight.isfinite().all())


def test_a_broken_net_never_becomes_the_checkpoint(tmp_path):
    training = loop()
    training.elbo.net[2].weight.data[0, 0] = float("inf")
    with pytest.raises(NotFiniteError, match="infinity in 'net.2.weight' in epoch 1, step 1"):
        Recorder(tmp_path).save(training)
    assert list(tmp_path.iterdir()) == []


def test_patience_and_the_best_net(tmp_path):
    scores, training = iter([5.0, 3.0, 4.0, 4.5, 1.0]), loop(epochs=5)
    training.elbo.set_beta(0.0)
    seen = []

    def validate(elbo):
        seen.append(elbo.net[0].weight.detach().clone())
        return {"nll": next(scores)}

    Recorder(tmp_path, validate=validate, patience=2).run(training)
    assert len(read_history(tmp_path)) == 4
    best, values = read_tensors(tmp_path / "best.safetensors")
    assert values == {"epoch": 1}
    assert torch.equal(best["net.0.weight"], seen[1])


def test_nets_compete_from_the_end_of_the_warm_up_on(tmp_path):
    scores = iter([1.0, 2.0, 3.0, 2.5])
    Recorder(tmp_path, validate=lambda e: {"nll": next(scores)}, compare_from=2).run(loop(epochs=4))
    assert read_tensors(tmp_path / "best.safetensors")[1]["epoch"] in (2, 3)
    assert ["loss" in r["validation"] for r in read_history(tmp_path)] == [False, False, True, True]


def test_records_have_what_the_report_reads(tmp_path):
    Recorder(tmp_path, validate=lambda e: {"nll": 1.0}).run(loop(epochs=1))
    (record,) = read_history(tmp_path)
    names = {"epoch", "loss", "nll", "kl", "beta", "phase", "validation", "sparsity", "seconds"}
    assert (set(record), set(record["sparsity"])) == (names, {"0", "2"})
    assert json.loads((tmp_path / "checkpoint.json").read_text())["epoch"] == 1


def test_before_nets_are_judged_the_best_one_follows_the_training(tmp_path):
    judged = {"validate": lambda e: {"nll": 1.0}, "compare_from": 4}
    Recorder(tmp_path, **judged).run(loop(epochs=2))
    assert read_tensors(tmp_path / "best.safetensors")[1] == {"epoch": 1}
    again = resumed(tmp_path, loop(epochs=3), **judged)
    tensors, values = read_tensors(tmp_path / "best.safetensors")
    assert values == {"epoch": 2}
    assert torch.equal(tensors["net.0.weight"], again.elbo.net[0].weight)


def test_with_another_beta_nets_compete_anew(tmp_path):
    scores = {0: 1.0, 1: 2.0, 2: 3.0, 3: 2.5}
    # The loss 2.5 of the last is more than the 1.0 of another objective.
    for epochs, beta, best in ((2, 0.0, 0), (4, 1e-9, 3)):
        found, recorder = loop(epochs), Recorder(tmp_path, patience=9)
        recorder.validate = lambda elbo, found=found: {"nll": scores[found.epoch - 1]}
        if epochs == 4:
            recorder.resume(found)
        found.beta = lambda epoch, beta=beta: beta
        recorder.run(found)
        assert read_tensors(tmp_path / "best.safetensors")[1]["epoch"] == best


def test_what_was_measured_goes_when_the_best_net_does(tmp_path):
    results, scores, seen = tmp_path / "results.json", iter([2.0, 3.0, 1.0]), []
    results.write_text("{}")

    class Looks(RunCallback):
        def record(self, record, elbo):
            seen.append(results.is_file())
            results.write_text("{}")

    given = {"callback": Looks(), "about_best": ["results.json"]}
    Recorder(tmp_path, validate=lambda e: {"nll": next(scores)}, **given).run(loop(epochs=3))
    assert seen == [False, True, False]


LINE = json.dumps(files.with_checksum({"epoch": 0})) + "\n"


@pytest.mark.parametrize("left", ["", '{"epoch": 0, "lo', LINE + '{"epoch": 1, "n'])
def test_a_history_without_a_checkpoint_is_begun_anew_and_torn_lines_are_forgotten(tmp_path, left):
    (tmp_path / "history.jsonl").write_text(left)
    Recorder(tmp_path).run(loop(epochs=2))
    before = timeless(tmp_path)
    assert [r["epoch"] for r in before] == [0, 1]
    assert len((tmp_path / "history.jsonl").read_text().splitlines()) == 2
    with open(tmp_path / "history.jsonl", "a") as file:
        file.write('{"epoch": 2, "lo')
    resumed(tmp_path, loop(epochs=3))
    assert timeless(tmp_path)[:2] == before
    assert [r["epoch"] for r in timeless(tmp_path)] == [0, 1, 2]


def test_the_history_of_an_earlier_phase_is_kept(tmp_path):
    Recorder(tmp_path, "pretrain", compare_from=float("inf")).run(loop(epochs=2))
    with open(tmp_path / "history.jsonl", "a") as file:
        # Killed before the first checkpoint of the next phase.
        file.write(json.dumps(files.with_checksum({"epoch": 2})) + "\n")
    Recorder(tmp_path, "fit", first_epoch=2).run(loop(epochs=1))
    assert [r["epoch"] for r in read_history(tmp_path)] == [0, 1, 2]
    assert [r["phase"] for r in read_history(tmp_path)] == ["pretrain", "pretrain", "fit"]


def test_a_damaged_history_is_told(tmp_path):
    Recorder(tmp_path).run(loop(epochs=3))
    path = tmp_path / "history.jsonl"
    whole = path.read_text()
    for damaged, text in {
        whole.replace('"beta": ', '"beta": 1', 1): "line 1 to match its content",
        whole.replace("{", "", 1): "object per epoch, but got Extra data.* in line 1",
        whole.replace("}\n", "\n", 2): "object per epoch, but got .* in line 1",
        "[" * 100_000 + "\n": "object per epoch, but got maximum recursion.* in line 1",
        '{"epoch": 0}\n': "line 1 to match its content",
        json.dumps(files.with_checksum({"epoch": -1})) + "\n": "but got the epoch -1 in line 1",
        "3\n": "line 1 to hold a JSON object, but got int",
        "".join(whole.splitlines(keepends=True)[::2]): "but got the epoch 2 in line 2",
        "".join(whole.splitlines(keepends=True)[:2]): "but got 2 epochs, but the checkpoint has",
        whole + whole.splitlines(keepends=True)[-1]: "but got the epoch 2 in line 4",
        whole[:20]: "but got 0 epochs, but the checkpoint has 3",
    }.items():
        path.write_text(damaged)
        assert_refused(f"history.jsonl.*{text}|{text}", read_history, tmp_path)
    path.unlink()
    assert read_history(tmp_path) == []


def test_another_batch_size_begins_the_epoch_anew(tmp_path):
    first = loop(epochs=2)
    list(first.run(After(lambda at: at.step == 2)))
    Recorder(tmp_path).save(first)
    same, other = loop(epochs=2), loop(epochs=2, batch_size=5)
    for again in (same, other):
        Recorder(tmp_path).resume(again)
    assert (same.epoch, same.position, other.epoch, other.position) == (0, 2, 0, 0)
    assert float(other.sums.abs().sum()) == 0
    assert sum(len(b.y) for b in other.batches(Position())) == 50


HOSTILE = [None, True, -1, 1.5, float("nan"), 10**30, "", "x", [], {}, [1, 2]]


NUMBERS = ("epoch", "waited", "first_epoch")


@pytest.mark.parametrize("name", [*NUMBERS, "position", "phase", "best", "best_beta"])
def test_values_that_no_recorder_writes_are_told(tmp_path, name):
    Recorder(tmp_path).save(loop())
    tensors, values = read_tensors(tmp_path / "checkpoint.safetensors")
    fine = {"best": [None, -1, 1.5, 10**30], "best_beta": [None, -1, 1.5, 10**30]}
    fine |= {key: [10**30] for key in NUMBERS}
    wrong = [{**values, name: v} for v in HOSTILE if v not in fine.get(name, [])]
    assert len(wrong) >= 6
    for broken in (*wrong, None, 3, [], {"epoch": 0}):
        write_tensors(tmp_path / "checkpoint.safetensors", tensors, broken)
        assert_refused("a checkpoint of this run, but got", Recorder(tmp_path).resume, loop())


@pytest.mark.parametrize("name", ["loop.noise", "loop.shuffle", "loop.sums", "optimizer.0.step"])
def test_tensors_that_no_recorder_writes_are_told(tmp_path, name):
    done = loop(epochs=1)
    list(done.run())
    Recorder(tmp_path).save(done)
    tensors, values = read_tensors(tmp_path / "checkpoint.safetensors")
    for wrong in ({}, {name: torch.zeros(2, 2, dtype=torch.float64)}):
        others = {k: v for k, v in tensors.items() if k != name}
        write_tensors(tmp_path / "checkpoint.safetensors", {**others, **wrong}, values)
        assert_refused("a checkpoint of this run, but got", Recorder(tmp_path).resume, loop())


def test_the_momenta_of_kernels_in_channels_last_come_back_in_their_layout():
    last, found = {"memory_format": torch.channels_last}, []
    start, gradients = torch.randn(4, 3, 5, 5), torch.randn(4, 4, 3, 5, 5)
    for stored in (True, False):
        kernel = nn.Parameter(start.clone(**last))
        optimizer = torch.optim.Adam([kernel], lr=0.1, fused=True)
        for step, gradient in enumerate(gradients):
            kernel.grad = gradient.to(**last)
            optimizer.step()
            if stored and step == 1:  # as through a file
                tensors = optimizer_tensors(optimizer)
                load_optimizer(optimizer, {name: t.contiguous() for name, t in tensors.items()})
        found.append(kernel.detach())
    assert torch.equal(*found)


# A run that is killed many times at random moments ends with the numbers of an unbroken one.


# All but the last are SIGKILLs, the last is a SIGINT.
@pytest.mark.parametrize("count", [9, pytest.param(21, marks=pytest.mark.slow)])
def test_kills_change_nothing(tmp_path, count):
    done = python(Path(__file__).with_name("killed.py"), tmp_path, count)
    assert done.returncode == 0, done.stderr
    kills, places = (int(word) for word in done.stdout.split() if word.isdigit())
    assert kills == count
    assert places >= count // 2
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for name in ("checkpoint.safetensors", "best.safetensors", "choice.safetensors"):
        assert same_tensors(whole / name, broken / name), name
        assert read_tensors(whole / name)[1] == read_tensors(broken / name)[1]
    assert timeless(whole) == timeless(broken)
    assert len(timeless(whole)) == 11
    assert (whole / "results.json").read_bytes() == (broken / "results.json").read_bytes()
    assert not [*whole.glob("trials"), *broken.glob("trials")]


# A run that was stopped at any moment predicts with what it has, or says how it gets a net.


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
]


@pytest.mark.parametrize("more, callback, where", UNTRAINED, ids=[str(u[0]) for u in UNTRAINED])
def test_a_run_without_a_net_says_how_it_gets_one(tmp_path, more, callback, where):
    path = stopped(tmp_path / "r", callback, **more)
    told = f"{path} has no trained model yet, because it was stopped {where}.*`vardrop fit --resume --out {path}`"
    assert_refused(told, load_run, path)
    assert report([path]).is_file()
    done = vd.resume(path)
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
    done = vd.resume(path)
    whole = fit("iris", "mlp50", out=tmp_path / "whole", **QUICK | settings)
    assert is_same_state(done.elbo, whole.elbo)


def test_what_was_handed_over_has_to_be_handed_over_again(tmp_path):
    rows = torch.arange(120.0).reshape(60, 2), [i % 2 for i in range(60)]
    net = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2))
    path = stopped(tmp_path / "own's", Stops(1), rows, net)
    call = f"`vardrop.resume({str(path)!r}, net=net, data=data)`"
    assert_refused(re.escape(call), load_run, path)
    fresh = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2))
    assert vd.resume(path, net=fresh, data=rows).standing == ""


def test_a_net_without_a_scale_says_so_without_its_checkpoint_too(tmp_path):
    path = stopped(tmp_path / "r", Stops(6), **SAVING, beta=0.5, folds=1)
    assert "was stopped after 1 of 6 epochs" in load_run(path).standing
    remove(path / "checkpoint.json")  # as where the first one was being written
    told = load_run(path).standing
    assert "before the scale of its noise was chosen. Resume it with `vardrop fit --resume" in told
