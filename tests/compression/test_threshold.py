import math

import pytest
import torch
from torch import nn

import vardrop as vd
from tests.compression.nets import accuracy
from tests.nets import Parts
from vardrop.compression import Threshold, choose_threshold, shrink, zero_pruned_weights


def net_and_data():
    """A linear classifier whose weights die one after the other as the threshold falls."""
    net = vd.convert(nn.Linear(10, 2, bias=False), vd.sparse_vd()).eval()
    net.weight.data.copy_(torch.stack([torch.arange(1.0, 11), -torch.arange(1.0, 11)]))
    net.log_sigma2.data.fill_(0.0)  # log alpha = -2 log |weight|: large weights are relevant
    x = torch.randn(400, 10, generator=torch.Generator().manual_seed(0))
    return net, (x, net(x).argmax(1))


def test_curve_is_what_masking_gives():
    net, (x, y) = net_and_data()
    t = choose_threshold(net, (x, y), accuracy, sparsity=0.0)
    assert t.reference == 1.0
    for p in t.points:
        kept = vd.log_alpha(net)[""] < p.threshold
        assert p.sparsity == pytest.approx(1 - float(kept.double().mean()))
        assert p.score == accuracy(x @ (net.weight * kept).t(), y)
    assert [p.sparsity for p in t.points] == sorted(p.sparsity for p in t.points)


def test_budgets():
    net, data = net_and_data()
    drop = choose_threshold(net, data, accuracy, max_drop=0.1)
    chosen = next(p for p in drop.points if p.threshold == float(drop))
    assert chosen.score >= 0.9
    sparser = [p for p in drop.points if p.sparsity > chosen.sparsity]
    assert sparser
    assert all(p.score < 0.9 for p in sparser)
    half = choose_threshold(net, data, accuracy, sparsity=0.5)
    chosen = next(p for p in half.points if p.threshold == float(half))
    assert 0.5 <= chosen.sparsity <= 0.6


def test_gates_are_kept_above():
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    vd.convert(net, vd.Recipe(gate=vd.gates.BetaBernoulli()), include="2").eval()
    for parameter in net[2].gate.parameters():
        parameter.data.add_(torch.linspace(-2, 2, 4))
    score = vd.noisy.relevance(net)["2.gate"].score
    data = (torch.randn(20, 3), torch.zeros(20, dtype=torch.long))
    t = choose_threshold(net, data, accuracy, sparsity=0.5)
    assert int((score > float(t)).sum()) <= 2
    assert shrink(net, data[0][:1], t).net[0].out_features <= 2


def test_text():
    net, data = net_and_data()
    t = choose_threshold(net, [(data[0][:200], data[1][:200])], accuracy, max_drop=0.5)
    assert str(t).startswith("threshold ")
    assert sum(line.startswith("*") for line in str(t).splitlines()) == 1
    assert isinstance(t, Threshold)


def test_dead_weights_of_infinite_ratio_do_not_upset_the_sweep():
    net, data = net_and_data()
    net.weight.data[:, :3] = 0
    net.log_sigma2.data[:, 3] = 200.0
    assert math.isfinite(float(choose_threshold(net, data, accuracy, sparsity=0.3)))


# Shrinking is exact, and the plan says how much the threshold itself changes.


def with_half_of_the_ranks_dead(recipe):
    """A frozen layer with an adapter of rank 8, as LoRA has it."""
    torch.manual_seed(0)
    layers = {"lora_A": nn.Linear(6, 8, bias=False), "lora_B": nn.Linear(8, 5, bias=False)}
    run = lambda net, x: net.base(x) + 2 * net.lora_B(net.lora_A(x))
    net = Parts(run, base=nn.Linear(6, 5).requires_grad_(False), **layers).eval()
    vd.convert(net, recipe, include="lora_B")
    closed = {"log_sigma2": 1.0, "logit": -8.0, "log_sigma": 3.0, "raw_a": -9.0}
    for name, parameter in net.lora_B.gate.named_parameters():
        if name in closed:
            parameter.data[:4] = closed[name]
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
