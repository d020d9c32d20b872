"""Shrinking is exact, and the plan says how much the threshold itself changes."""

import pytest
import torch
from torch import nn

import vardrop as vd
from vardrop.compression import zero_pruned_weights


class Adapted(nn.Module):
    """A frozen layer with an adapter of rank 8, as LoRA has it."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(6, 5).requires_grad_(False)
        self.lora_A, self.lora_B = nn.Linear(6, 8, bias=False), nn.Linear(8, 5, bias=False)

    def forward(self, x):
        return self.base(x) + 2 * self.lora_B(self.lora_A(x))


def with_half_of_the_ranks_dead(recipe):
    torch.manual_seed(0)
    net = vd.convert(Adapted().eval(), recipe, include="lora_B")
    closed = {"log_sigma2": 1.0, "logit": -8.0, "log_sigma": 3.0, "raw_a": -9.0}
    with torch.no_grad():
        for name, parameter in net.lora_B.gate.named_parameters():
            if name in closed:
                parameter[:4] = closed[name]
    return net


@pytest.mark.parametrize("recipe", [vd.bayesian_compression(), vd.l0(), vd.structured_pruning()])
def test_ranks_go_exactly(recipe):
    net, x = with_half_of_the_ranks_dead(recipe), torch.randn(7, 6)
    small, plan = vd.shrink(net, x)
    assert (small.lora_A.out_features, small.lora_B.in_features) == (4, 4)
    with torch.no_grad():
        zeroed, whole = zero_pruned_weights(net)[0](x), net(x)
        assert torch.allclose(small(x), zeroed, atol=1e-6)
    assert plan.change == pytest.approx(float((whole - zeroed).abs().max()), abs=1e-6)
    assert f"outputs of the example by at most {plan.change:.2g}." in str(plan)


def test_bayesian_compression_alone_drops_units_that_evaluation_mode_still_passes():
    """Its rule is a ratio of noise to mean; the mean of a dead unit is not zero."""
    changes = {
        name: vd.shrink(with_half_of_the_ranks_dead(recipe), torch.randn(7, 6)).plan.change
        for name, recipe in {"bc": vd.bayesian_compression(), "l0": vd.l0()}.items()
    }
    assert changes["bc"] > 0.1
    assert changes["l0"] < 1e-5


def test_a_plain_net_is_not_changed():
    plan = vd.shrink(nn.Linear(3, 2), torch.randn(2, 3)).plan
    assert plan.change == 0
    assert "threshold" not in str(plan)
