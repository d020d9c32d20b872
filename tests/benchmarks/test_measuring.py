import time

import machine
import pytest
import torch
from measuring import Settings, once, per_call, quartiles, rows, turns
from profiling import heaviest, sentence


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
    found = [
        {"candidate": "plain", "ms": 10.0, "ratio": 1.0, "low": 1.0, "high": 1.0},
        {"candidate": "other", "ms": 4.0, "ratio": 0.4, "low": 0.4, "high": 0.4},
    ]
    plain, other = per_call(found, {"plain": 5, "other": 2})
    assert (plain["ms"], plain["ratio"], other["ms"], other["ratio"]) == (2.0, 1.0, 2.0, 1.0)


def test_quartiles():
    assert quartiles([4.0]) == (4.0, 4.0, 4.0)
    assert quartiles([5.0, 1.0, 3.0, 2.0, 4.0]) == (2.0, 3.0, 4.0)


def test_the_first_row_of_a_candidate_stands_for_all():
    found = [{"candidate": "a", "n": 1}, {"candidate": "b", "n": 2}, {"candidate": "a", "n": 3}]
    assert once(found) == found[:2]


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
