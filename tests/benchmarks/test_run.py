import sys
from argparse import Namespace

import peers
import run
from measuring import Settings

from nets import TRAIN


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
    rows = run.peer("torchbnn", Settings(), record)
    told = [(r["case"], r["ratio"], r["note"]) for r in rows]
    assert told == [(case.name, None, "no x") for case in TRAIN[:3]]


def test_a_worker_that_ends_early_is_a_failure(monkeypatch, tmp_path):
    (tmp_path / "worker.py").write_text("raise SystemExit('broken')")
    _, record = started()
    monkeypatch.setattr(run, "HERE", tmp_path)
    monkeypatch.setattr(peers, "ensure", lambda name: {"requirement": "x"})
    monkeypatch.setattr(peers, "python", lambda name: sys.executable)
    assert run.peer("torchbnn", Settings(), record) == []
    assert record["peers"]["torchbnn"]["failure"] == "worker ends with 1: broken"
