"""Exploration on CartPole, where gymnasium is installed."""

import pytest
import torch
from torch import nn

import vardrop as vd
from experiments.neklyudov_uses import cartpole, policy

pytest.importorskip("gymnasium", reason="needs the extra `rl`")


def test_policies_differ_by_their_middle_layer() -> None:
    assert policy("variance")[2].posterior == vd.ZeroMean()
    assert type(policy("entropy")[2]) is nn.Linear


@pytest.mark.parametrize("explorer", ["variance", "entropy"])
def test_runs_reproducibly_and_leaves_the_generator(explorer) -> None:
    before = torch.get_rng_state()
    first = cartpole(explorer, episodes=3)
    assert torch.equal(torch.get_rng_state(), before)
    assert first == cartpole(explorer, episodes=3)
    assert len(first) == 3
    assert min(first) >= 1


@pytest.mark.slow
def test_a_policy_with_a_variance_layer_learns() -> None:
    returns = torch.tensor(cartpole("variance", episodes=200))
    assert returns[-50:].mean() > 2 * returns[:50].mean()
