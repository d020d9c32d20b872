import chart
import deploying
import pytest
import results
import train_step
from goals import COMPILED, GOALS, LAST, LENET, SMALL, TRAIN, Goal, asked
from peer_layers import BUILDS, OURS, beside, of_peer

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


def test_rows_of_goals_are_profiled():
    assert asked(TRAIN, SMALL, "sparse_vd, KL value every 10")
    assert not asked(TRAIN, SMALL, "plain")


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # inside torch.compile
def test_goals_ask_for_rows_that_are_measured():
    cases = {case.name for case in (*CASES, *PREDICT)}
    cases |= {"1 M weights", "import vardrop, beyond torch"}
    cases |= {f"{name} b{batch}" for name in deploying.NETS for batch in (256, 1)}
    assert {goal.case for goal in GOALS} <= cases
    beside_others = {name + where for name in OURS for where in ("", LAST, COMPILED)}
    full, quick = (
        beside_others | {n for case in CASES[:3] for n, _ in train_step.candidates(case, quick=q)}
        for q in (False, True)
    )
    for goal in GOALS:
        if goal.group == TRAIN:
            assert set(goal.candidates) <= full, goal
            assert set(goal.candidates) & quick, goal
            assert all(map(of_peer, goal.over)), goal


def test_each_library_runs_beside_ours_with_noise_of_the_same_kind():
    assert next(iter(beside("cplxmodule"))) == "vardrop, LRT"
    assert next(iter(beside("torchbnn"))) == "vardrop, weight draws"
    assert all(set(BUILDS[peer]) < set(beside(peer)) for peer in BUILDS)


def toy_run():
    step = {"group": TRAIN, "case": SMALL, "threads": 1, "ms": 1.0, "low": 0.9, "high": 1.1}
    noisy = "sparse_vd, KL value every 10"
    beside_torchbnn = {**step, "environment": "torchbnn"}
    failing = {"group": TRAIN, "case": LENET, "candidate": "TyXe", "ratio": None}
    return {
        "date": "2026-01-01T00:00:00", "quick": True, "rounds": 3, "threads": [1],
        "machine": {"torch": "2", "python": "3", "processor": "p", "cores": 2, "load before": 0.1},
        "parts": [
            {"name": "kl", "threads": 1, "seconds": 60.0, "others": 0.0},
            {"name": "train step", "threads": 1, "seconds": 60.0, "others": 1.2},
        ],
        "peers": {
            "torchbnn": {"requirement": "torchbnn==1.2", "checks": {
                "torchbnn": {"marks": ["KL is no sum"]}}},
            "blitz": {"requirement": "blitz==0", "failure": "does not install: no such version"},
        },
        "rows": [
            {**step, "candidate": "plain", "ratio": 1.0},
            {**step, "candidate": noisy, "ratio": 2.5, "profile": [["aten::mm", 0.6]]},
            {**beside_torchbnn, "candidate": "plain", "ratio": 1.0},
            {**beside_torchbnn, "candidate": "vardrop, weight draws", "ratio": 2.0},
            {**beside_torchbnn, "candidate": "torchbnn", "ratio": 3.0},
            {**failing, "environment": "tyxe", "note": "fails: ValueError: no"},
        ],
    }  # fmt: skip


def test_a_page_says_what_was_missed_and_why():
    page = results.markdown(toy_run())
    line = f"| LRT train step, exact KL | {SMALL} | 3.00 (torchbnn) | 1.9, then 1.6 | 2.50 | no |"
    assert line in page
    assert "by `sparse_vd, KL value every 10`: mm 60 %" in page
    assert f"exact KL, channels-last | {LENET} |  | 1.45, then 1.2 | - | not" in page
    assert f"| torchbnn | {SMALL} | 1.50 |" in page
    assert "| *torchbnn* | 3.00 | 0.90-1.10 | 1.000 | KL is no sum |" in page
    assert "| *TyXe* | - |  |  | fails: ValueError: no |" in page
    assert "| blitz==0 | does not install: no such version |" in page
    assert "kept 1.2 to 1.2 cores busy during train step on 1." in page
    assert page.count("| plain | 1.00 |") == 1


def test_results_are_written_with_a_chart(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "HERE", tmp_path)
    results.write(toy_run())
    assert "(train_step.png)" in (tmp_path / "RESULTS.md").read_text()
    assert (tmp_path / "train_step.png").stat().st_size > 1000


def test_the_chart_has_one_bar_for_each_library():
    rows = [
        {"group": "train step", "case": "a b1", "threads": 1, "candidate": name, "ratio": ratio}
        | ({"environment": where} if where else {})
        for name, ratio, where in (
            ("plain", 1.0, ""), ("sparse_vd", 2.0, ""), ("torchbnn", 3.0, "torchbnn"),
            ("torchbnn, channels-last", 2.5, "torchbnn"), ("bayesian-torch", 4.0, "bayesian-torch"),
            ("bayesian-torch flipout", 5.0, "bayesian-torch"),
            ("vardrop, weight draws", 1.5, "torchbnn"),
            ("vardrop, weight draws", 2.5, "bayesian-torch"),
        )
    ]  # fmt: skip
    assert chart.bars(rows) == {
        "a b1": {
            "plain torch": 1.0,
            "torchbnn": 2.5,
            "bayesian-torch": 4.0,
            "vardrop, one draw a batch": 2.0,
        }
    }
