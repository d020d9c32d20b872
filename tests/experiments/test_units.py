"""Counting what gates keep: by unit, by weight, by input."""

import pytest
import torch
from torch import nn

import vardrop as vd
from experiments.lee_bb import active_units, units
from experiments.neklyudov import _exceeded_by


def test_an_input_counts_while_one_of_its_weights_is_left() -> None:
    net = nn.Sequential(vd.convert(nn.Linear(3, 2), vd.sparse_vd()))
    with torch.no_grad():
        net[0].weight.fill_(1.0)
        net[0].log_sigma2.copy_(torch.tensor([[5.0, 5.0, -5.0], [5.0, -5.0, -5.0]]))
    assert units(net) == [2.0]


def test_units_of_gates_and_what_is_open_for_an_input() -> None:
    net = nn.Sequential(vd.convert(nn.Linear(4, 2), vd.beta_bernoulli()))
    with torch.no_grad():
        net[0].gate.raw_a[0] = -10.0  # E pi = 4.5e-5, below the threshold of 1e-3
    assert units(net) == [3.0]
    vd.convert(net, vd.dependent_beta_bernoulli())
    gate = net[0].gate
    with torch.no_grad():
        gate.running_mean.zero_()
        gate.running_var.fill_(1.0)
        gate.scale.fill_(1.0)
        gate.shift.copy_(torch.tensor([9.0, 9.0, -9.0, 0.0]))
    x = torch.tensor([[0.0, 0, 0, 1], [0, 0, 0, -1]])  # the last unit is open for the first row
    assert active_units(net, x) == [1.5]


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_the_exceeded_by_is_exceeded_by_the_share(share: float) -> None:
    sizes = torch.arange(1.0, 11.0)
    assert int((sizes > _exceeded_by(sizes, share)).sum()) == round(10 * share)
