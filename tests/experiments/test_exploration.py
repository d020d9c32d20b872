"""Exploration on CartPole, where gymnasium is installed."""

import pytest
from torch import nn

import vardrop as vd
from experiments.neklyudov_uses import policy

pytest.importorskip("gymnasium", reason="needs the extra `rl`")


def test_policies_differ_by_their_middle_layer() -> None:
    assert policy("variance")[2].posterior == vd.ZeroMean()
    assert type(policy("entropy")[2]) is nn.Linear
