"""UCI splits: what is held out of what, and scores that can be worked out by hand."""

import math

import pytest
import torch

from experiments import uci
from tests.experiments.test_functions import few_rows
from tests.refusals import assert_refused

METHOD = uci.Method("plain", hidden=4, batch=16, samples=4, members=1)


def parts(split):
    _, y, tests = few_rows("few")
    outer = uci._outer(*few_rows("few")[:2], tests[split])
    return y, tests[split], outer, uci._inner(outer, split)


def test_test_rows_are_those_of_the_split_and_the_rest_trains():
    y, tested, outer, inner = parts(1)
    rest = [k for k in range(40) if k not in tested]
    assert torch.allclose(outer.test_y, ((y[tested] - y[rest].mean()) / outer.unit).float())
    assert torch.allclose(outer.y, ((y[rest] - y[rest].mean()) / y[rest].std()).float(), atol=1e-6)
    assert (len(inner.x), len(inner.test_x)) == (32, 4)  # a tenth of 36


def test_inner_rows_are_training_rows_in_units_of_the_target():
    _, _, outer, inner = parts(0)
    # Standardising twice leaves distances in units of the target as they were.
    spread = torch.cat([inner.y, inner.test_y]).double() * inner.unit
    assert torch.allclose(
        (spread - spread.mean()).flatten().sort().values,
        ((outer.y.double() - outer.y.double().mean()) * outer.unit).flatten().sort().values,
        atol=1e-4,
    )


def test_scores_of_one_normal_are_those_of_the_formulas(monkeypatch):
    part = uci.Part(*(torch.zeros(2, 1),) * 3, torch.tensor([[0.0], [3.0]]), unit=2.0)
    draws = (torch.zeros(1, 2).double(), torch.ones(1, 2).double())
    monkeypatch.setattr(uci.Method, "_draws", lambda *_: draws)
    found = METHOD.scores([], part)
    assert found["RMSE"] == pytest.approx(2 * math.sqrt(4.5))
    assert found["NLL"] == pytest.approx(0.5 * math.log(2 * math.pi) + 9 / 4 + math.log(2))
    assert found["coverage"] == 0.5


def test_splits_side_by_side_are_trained_on_their_own_rows():
    outers = [parts(0)[2], parts(1)[2]]
    both = METHOD.train(uci.Choice(0, False, 400), outers, 0)
    wrong = [METHOD.scores(nets, part)["RMSE"] for nets, part in zip(both, outers, strict=True)]
    assert max(wrong) < 0.5  # the plane's noise is 0.1, the targets spread by more than 2


def test_a_missing_table_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("VARDROP_DATA", str(tmp_path))
    assert_refused(r"the file .*nowhere\.csv, but it is not there", uci.split_table, "nowhere")
