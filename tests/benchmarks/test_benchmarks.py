import json
import re
import sys
import time
from argparse import Namespace

import chart
import checks
import deploying
import machine
import peers
import pruned_nets
import pytest
import results
import run
import tables
import torch
import train_step
from goals import COMPILED, GOALS, LAST, LENET, SMALL, TRAIN, Goal, asked
from measuring import Settings, per_call, quartiles, rows, turns
from naive import Naive, naive
from peer_layers import BUILDS, OURS, Model, beside, of_peer
from profiling import heaviest, sentence
from torch import nn

import vardrop as vd
from nets import PREDICT, TRAIN as CASES

GOAL = Goal("what", "group", "case", ("a", "b"), 2.0, then=1.5)


def row(candidate, ratio, **more):
    return {"group": "group", "case": "case", "candidate": candidate, "ratio": ratio, **more}


def test_the_best_candidate_on_one_thread_answers():
    rows = [row("a", 3.0), row("b", 1.8), row("b", 1.0, threads=2), row("c", 0.1), row("a", None)]
    assert GOAL.answer(rows) == (1.8, rows[1])
    assert GOAL.answer([row("c", 0.1)]) is None


@pytest.mark.parametrize("value, verdict", [(2.1, "no"), (2.0, "the first"), (1.5, "yes, both")])
def test_two_bounds(value, verdict):
    assert GOAL.verdict(value) == verdict


def test_another_library_is_compared_within_its_process():
    goal = Goal("", "group", "case", ("ours",), 0.7, over=("x", "y"), environment="one")
    rows = [
        row("ours", 1.0, environment="two"), row("ours", 3.0, environment="one"),
        row("x", 6.0, environment="one"), row("y", 4.0, environment="one"), row("x", 9.0),
    ]  # fmt: skip
    assert goal.answer(rows) == (0.75, rows[1])
    assert goal.answer(rows[:2]) is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # inside torch.compile
def test_goals_ask_for_rows_that_are_measured():
    assert asked(TRAIN, SMALL, "sparse_vd, KL value every 10")  # these are profiled
    assert not asked(TRAIN, SMALL, "plain")
    cases = {case.name for case in (*CASES, *PREDICT)}
    cases |= {"1 M weights", "import vardrop, beyond torch"}
    cases |= {f"{name} b{batch}" for name in deploying.NETS for batch in (256, 1)}
    assert {goal.case for goal in GOALS} <= cases
    beside_others = {name + where for name in OURS for where in ("", LAST, COMPILED)}
    named = lambda quick: {n for c in CASES[:3] for n, _ in train_step.candidates(c, quick=quick)}
    full, quick = (beside_others | named(quick) for quick in (False, True))
    for goal in GOALS:
        if goal.group == TRAIN:
            assert set(goal.candidates) <= full, goal
            assert set(goal.candidates) & quick, goal
            assert all(map(of_peer, goal.over)), goal


def test_each_library_runs_beside_ours_with_noise_of_the_same_kind():
    assert next(iter(beside("cplxmodule"))) == "vardrop, LRT"
    assert next(iter(beside("torchbnn"))) == "vardrop, weight draws"
    assert all(set(BUILDS[peer]) < set(beside(peer)) for peer in BUILDS)


def test_the_page_opens_with_the_cost_relative_to_plain_torch_at_its_best():
    step = {"group": TRAIN, "case": LENET, "threads": 1}
    times = {"plain, fused Adam": 9.0, "plain, channels-last, fused Adam": 5.0, "plain": 10.0}
    times |= {"sparse_vd, KL value every 10, channels-last, fused Adam": 12.0}
    times |= {"sparse_vd, vd.compile, fused Adam": 10.0}
    rows = [{**step, "candidate": name, "ms": ms} for name, ms in times.items()]
    assert "| `sparse_vd()` | 2.4 (2.0) |" in results.step_cost(rows)
    measured = {"CNN b8": {"plain": 1.0, "plain, channels-last": 0.5, "predict, class": 20.0}}
    measured["CNN b8"]["plain, ms"] = 4.0
    assert results.prediction_cost(measured)[-1] == "| CNN, 8 | 2.00 | 40 | - | - |"


def test_the_page_is_the_page_of_its_run_and_says_what_was_missed_and_why():
    page = (results.HERE / "RESULTS.md").read_text()
    date = re.search(r"^(\d{4}-\d\d-\d\dT[\d:]+), ", page, re.MULTILINE)[1]
    stored = json.loads((results.HERE / f"history/{date.replace(':', '')}.json").read_text())
    assert results.markdown(stored) == page
    for row in stored["rows"]:
        row |= {"ratio": row["ratio"] and 9 * row["ratio"], "profile": [["aten::mm", 0.6]]}
    stored["parts"][0]["others"] = 1.2
    stored["peers"]["blitz"] = {"requirement": "blitz==0", "failure": "does not install: no"}
    page = results.markdown(stored)
    assert re.search(r"\| LRT train step, exact KL \| .* \| no \|", page)
    assert re.search("by `sparse_vd, .*`: mm 60 %", page)
    assert "| blitz==0 | does not install: no |" in page
    assert f"1.2 cores busy during {stored['parts'][0]['name']} on 1" in page


def test_the_chart_has_one_bar_for_each_library():
    measured = [
        ("plain", 1.0, ""), ("sparse_vd", 2.0, ""), ("torchbnn", 3.0, "torchbnn"),
        ("torchbnn, channels-last", 2.5, "torchbnn"), ("bayesian-torch", 4.0, "bayesian-torch"),
        ("bayesian-torch flipout", 5.0, "bayesian-torch"),
        ("vardrop, weight draws", 1.5, "torchbnn"), ("vardrop, weight draws", 2.5, "bayesian-torch"),
    ]  # fmt: skip
    step = {"group": "train step", "case": "a b1", "threads": 1}
    where = lambda name: {"environment": name} if name else {}
    rows = [{**step, "candidate": c, "ratio": r, **where(name)} for c, r, name in measured]
    expected = {"plain torch": 1.0, "torchbnn": 2.5, "bayesian-torch": 4.0}
    assert chart.bars(rows) == {"a b1": {**expected, "vardrop, one sample per batch": 2.0}}


def started(only=("",), threads=(1,), quick=True):
    arguments = Namespace(quick=quick, rounds=1, seconds=1.0, threads=list(threads), only=only)
    return arguments, run._start(arguments)


def test_a_part_that_fails_is_shown_and_the_others_go_on(capsys):
    def part():
        raise ValueError("no")

    _, record = started()
    run._measured("a part", 1, part, record)
    run._measured("another", 1, lambda: [{"group": "g"}], record)
    failed, other = record["rows"]
    assert (failed["group"], failed["case"], failed["note"]) == ("failed", "a part", "no")
    assert other == {"group": "g"}
    assert [p["name"] for p in record["parts"]] == ["a part", "another"]
    assert record["machine"]["load after"] >= 0
    assert "ValueError" in capsys.readouterr().err


def test_parts_by_name_and_number_of_threads():
    arguments, record = started(["kl", "peer tyxe", "peer torchbnn"], (1, 2), quick=False)
    assert set(run._parts(arguments, record)) == {
        ("kl", 1), ("kl of 100 M weights", 1), ("peer tyxe", 1), ("peer torchbnn", 1),
        ("peer torchbnn", 2),
    }  # fmt: skip


def test_a_library_that_is_absent_is_a_row_with_the_reason(monkeypatch):
    _, record = started()
    monkeypatch.setattr(peers, "ensure", lambda name: {"requirement": "x", "failure": "no x"})
    told = [(r["case"], r["ratio"], r["note"]) for r in run.peer("torchbnn", Settings(), record)]
    assert told == [(case.name, None, "no x") for case in CASES[:3]]


def test_a_worker_that_ends_early_is_a_failure(monkeypatch, tmp_path):
    (tmp_path / "worker.py").write_text("raise SystemExit('broken')")
    _, record = started()
    monkeypatch.setattr(run, "HERE", tmp_path)
    monkeypatch.setattr(peers, "ensure", lambda name: {"requirement": "x"})
    monkeypatch.setattr(peers, "python", lambda name: sys.executable)
    assert run.peer("torchbnn", Settings(), record) == []
    assert record["peers"]["torchbnn"]["failure"] == "worker ends with 1: broken"


def test_every_round_has_every_call_once():
    calls = []
    runs = {name: lambda name=name: calls.append(name) for name in "abc"}
    times, timed = turns(runs, Settings(rounds=5)), calls[-15:]
    assert all(sorted(timed[i : i + 3]) == ["a", "b", "c"] for i in range(0, 15, 3))
    assert len({tuple(timed[i : i + 3]) for i in range(0, 15, 3)}) > 1, "never shuffled"
    assert {name: len(t) for name, t in times.items()} == {"a": 5, "b": 5, "c": 5}


def test_time_ends_the_rounds_but_not_before_the_third():
    assert len(turns({"a": lambda: time.sleep(0.01)}, Settings(rounds=50, seconds=0.0))["a"]) == 3


def test_ratios_are_over_the_median_of_the_reference(monkeypatch):
    seconds = {"plain": [2.0, 1.0, 3.0], "other": [6.0, 4.0, 5.0]}
    monkeypatch.setattr("measuring.turns", lambda runs, settings: seconds)
    plain, other = rows("group", "case", {"plain": None, "other": None}, Settings())
    assert plain["ratio"] == 1
    assert (other["low"], other["ratio"], other["high"]) == (2.25, 2.5, 2.75)
    assert (other["ms"], other["rounds"]) == (5000, 3)


def test_repeated_calls_are_brought_back_to_one():
    ratios = {"plain": 1.0, "other": 0.4}.items()
    relative = {name: {"ratio": r, "low": r, "high": r} for name, r in ratios}
    found = [{"candidate": n, "ms": 10 * row["ratio"], **row} for n, row in relative.items()]
    plain, other = per_call(found, {"plain": 5, "other": 2})
    assert (plain["ms"], plain["ratio"], other["ms"], other["ratio"]) == (2.0, 1.0, 2.0, 1.0)
    assert quartiles([4.0]) == (4.0, 4.0, 4.0)
    assert quartiles([5.0, 1.0, 3.0, 2.0, 4.0]) == (2.0, 3.0, 4.0)


def test_a_profile_names_the_heaviest_operation():
    x = torch.randn(300, 300)
    shares = heaviest(lambda: (x @ x).neg())
    assert shares[0][0] == "aten::mm"
    assert sum(share for _, share in shares) == pytest.approx(1, abs=0.1)
    assert sentence(shares).startswith("mm ")
    assert sentence([]) == "no operation of torch"


def test_own_work_is_not_counted_as_others(monkeypatch):
    monkeypatch.setattr(machine, "_busy", lambda: sum(machine.os.times()[:4]) + 3.0)
    others = machine.Others()
    monkeypatch.setattr(machine, "_busy", lambda: sum(machine.os.times()[:4]) + 4.0)
    others._wall -= 10.0
    assert others.cores() == pytest.approx(0.1, rel=0.05)


@pytest.mark.parametrize("name", tables.TABLES)
def test_both_are_scored_on_the_same_rows(name):
    found = tables.measured(name, 400, epochs=1, beta=1.0, compare=False)
    seconds = [found[name]["seconds"] for name in ("fit", "MLPRegressor")]
    assert found["times"] == pytest.approx(seconds[0] / seconds[1])
    assert found["goal"] in (True, False)
    frame = tables.table(name, 400)
    assert frame["part"].value_counts().to_dict() == {"train": 280, "test": 80, "validation": 40}
    assert frame.shape[1] == tables.COLUMNS + 2


def by_hand(net, x):
    noisy = naive(net)
    layers = [m for m in noisy.modules() if isinstance(m, Naive)]
    return Model(noisy, noisy, lambda: sum(m.kl() for m in layers), noisy.parameters)


class Refilled(nn.Module):
    """Noise in a buffer that every call overwrites, outside autograd's sight."""

    def __init__(self, layer):
        super().__init__()
        self.weight, self.rho = layer.weight, nn.Parameter(torch.zeros_like(layer.weight))
        self.register_buffer("noise", torch.zeros_like(layer.weight))

    def forward(self, x):
        self.noise.data.normal_()
        return x @ (self.weight + self.rho.exp() * self.noise).t()


def refilled(net, x):
    noisy = nn.Sequential(*(Refilled(m) if isinstance(m, nn.Linear) else m for m in net))
    mean = sum(m.rho.square().mean() + 1 for m in noisy if isinstance(m, Refilled))
    return Model(noisy, noisy, lambda: mean, noisy.parameters)


BUILDERS = [by_hand, *(next(iter(beside(name).values())) for name in ("torchbnn", "cplxmodule"))]


@pytest.mark.parametrize("build", BUILDERS)
def test_right_candidates_pass_the_checks(build):
    assert checks.check(build)["marks"] == []


def test_wrong_candidates_are_marked():
    total, draws = checks.check(refilled)["marks"]
    assert total.startswith("KL is no sum over weights")
    assert draws.startswith("gradients of 10 draws are wrong")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_net_takes_a_batch_and_is_convertible(case):
    x, net = torch.rand(2, *case.shape[1:]), vd.convert(case.make(), vd.sparse_vd())
    assert net(x).shape == (2, 10)
    assert float(vd.kl(net).detach()) > 0


@pytest.mark.parametrize("name", pruned_nets.NETS)
def test_pruned_nets_shrink_to_what_training_left(name):
    small = vd.shrink(pruned_nets.pruned(name), torch.zeros(1, 1, 28, 28), drop_inputs=True).net
    found = [m.weight for m in small.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    shapes = [(w.shape[1], w.shape[0], int(w.count_nonzero())) for w in found]
    assert shapes == [(c["inputs"], c["outputs"], c["weights"]) for c in pruned_nets.left(name)]


def test_a_library_that_does_not_install_is_written_down(tmp_path, monkeypatch):
    def fail(name, package):
        raise RuntimeError("no such version")

    monkeypatch.setattr(peers, "ROOT", tmp_path)
    monkeypatch.setattr(peers, "_install", fail)
    assert peers.ensure("torchbnn")["failure"] == "does not install: no such version"
    monkeypatch.setattr(peers, "_install", lambda name, package: None)
    assert "failure" not in peers.ensure("torchbnn")
    monkeypatch.setattr(peers, "_install", fail)
    assert peers.ensure("torchbnn") == json.loads((tmp_path / "torchbnn.json").read_text())
