"""Functions that experiments are made of: data, figures, thresholds, attacks."""

import math

import pytest
import torch
from torch import nn

import vardrop as vd
from experiments import lee_dropmax, molchanov, neklyudov_uses as uses
from experiments.lee_bb import active_units, units
from experiments.neklyudov import _exceeded_by, train_parameterisation
from tests.experiments.digits import digits
from tests.refusals import assert_refused
from vardrop.app.data import Images


def test_four_gaussians_sit_at_their_centres():
    x, y = uses.gaussians(20_000, torch.Generator().manual_seed(0))
    centres = torch.stack([x[y == k].mean(0) for k in range(4)])
    # Eight means with a standard error of 0.007, 5.7 of them.
    assert (centres - torch.tensor([[3.0, 3], [3, 10], [10, 3], [10, 10]])).abs().max() < 0.04


def test_first_of_each_class_keeps_the_order_of_the_file():
    y = torch.tensor([2, 0, 1, 0, 2, 1, 0, 2])
    chosen = lee_dropmax.first_of_each_class(Images(torch.arange(8.0).view(8, 1), y), 2)
    assert chosen.x.flatten().tolist() == [0, 1, 2, 3, 4, 5]
    assert chosen.y.tolist() == [2, 0, 1, 0, 2, 1]


def test_a_short_run_logs_the_transition():
    (data, test), before = digits(), torch.get_rng_state()
    run = train_parameterisation("layer", data, test, epochs=3, samples=2, width=50)
    assert torch.equal(torch.get_rng_state(), before)
    assert [record["sixths of the training"] for record in run.curve] == [1, 2, 3]
    assert run.curve[0]["alpha below 1, %"] == 100.0
    assert run.elbo < 0


def net_with(*log_alphas: float) -> nn.Module:
    """One weight for each value of log alpha, all means 1."""
    net = nn.Linear(len(log_alphas), 1, bias=False)
    nn.init.ones_(net.weight)
    vd.convert(net, vd.sparse_vd())
    net.log_sigma2.data.copy_(torch.tensor([log_alphas]))
    return net


def test_the_lowest_threshold_that_the_held_out_images_allow(monkeypatch):
    test, held = (torch.zeros(1, 1), torch.tensor(0)), (torch.zeros(1, 1), torch.tensor(1))
    by_weights = {4: (5.0, 2.0), 3: (6.0, 2.05), 2: (7.0, 2.1), 1: (8.0, 2.3)}  # test, held out

    def error(net, x, y):
        return by_weights[int(net.weight.count_nonzero())][int(y)]

    monkeypatch.setattr(molchanov, "error", error)
    found = molchanov._pruned(net_with(2.5, 1.5, 0.5, -1.0), (2, 1, 0), test, held)
    assert (found["chosen threshold"], found["error, chosen threshold, %"]) == (1.0, 7.0)
    assert (found["compression, chosen threshold"], found["error, %"]) == (2.0, 5.0)
    assert found["error, threshold 0, %"] == 8.0


def test_an_input_counts_while_one_of_its_weights_is_left():
    net = nn.Sequential(vd.convert(nn.Linear(3, 2), vd.sparse_vd()))
    with torch.no_grad():
        net[0].weight.fill_(1.0)
        net[0].log_sigma2.copy_(torch.tensor([[5.0, 5.0, -5.0], [5.0, -5.0, -5.0]]))
    assert units(net) == [2.0]


def test_units_of_gates_and_what_is_open_for_an_input():
    net = nn.Sequential(vd.convert(nn.Linear(4, 2), vd.beta_bernoulli()))
    net[0].gate.raw_a.data[0] = -10.0  # E pi = 4.5e-5, below the threshold of 1e-3
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
def test_the_exceeded_by_is_exceeded_by_the_share(share: float):
    sizes = torch.arange(1.0, 11.0)
    assert int((sizes > _exceeded_by(sizes, share)).sum()) == round(10 * share)


def linear() -> nn.Linear:
    net = vd.convert(nn.Linear(3, 2, bias=False), vd.bayes_by_backprop(log_sigma2=-40.0)).eval()
    net.weight.data.copy_(torch.tensor([[1.0, -1.0, 0.0], [0.0, 0.0, 2.0]]))
    return net


@pytest.mark.parametrize("samples", [0, 3])
def test_step_of_a_linear_classifier(samples: int):
    # d loss / dx = p_1 (w_1 - w_0) for class 0: signs (-, +, +).
    x = torch.full((1, 3), 0.5)
    found = uses.fgsm(linear(), x, torch.tensor([0]), 0.1, samples)
    assert torch.allclose(found, torch.tensor([[0.4, 0.6, 0.6]]))
    far = uses.fgsm(linear(), x, torch.tensor([0]), 0.8)
    assert torch.allclose(far, torch.tensor([[0.0, 1, 1]]))
    assert torch.equal(uses.fgsm(linear(), x, torch.tensor([0]), 0.0), x)


def test_ensembles_average_probabilities():
    net, x = vd.convert(nn.Linear(2, 2), vd.variance_layer()), torch.ones(1, 2)
    torch.manual_seed(1)
    found = uses.log_probabilities(net, x, 4).exp()
    torch.manual_seed(1)
    assert torch.allclose(found, torch.stack([net(x).softmax(-1) for _ in range(4)]).mean(0))
    assert found.sum().item() == pytest.approx(1.0)


def test_curve_starts_at_the_clean_accuracy_and_falls():
    data, test = digits()
    curves = uses.attack_curves(data, test, (0.0, 0.2), epochs=3, samples=3)
    assert set(curves) == {"dropout, mean", "dropout, ensemble", "variance, ensemble"}
    for clean, attacked in curves.values():
        assert clean > 0.8
        assert attacked < clean - 0.2


def test_modes_stay_and_errors():
    _, test = digits()
    net = vd.convert(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), vd.sparse_vd())
    uses.attack_curve(net, test, (0.1,), samples=1)
    assert net.training
    assert_refused("Expected `epsilon` to be at least 0", uses.fgsm, net, test.x, test.y, -math.pi)


def test_policies_differ_by_their_middle_layer():
    pytest.importorskip("gymnasium", reason="needs the extra `rl`")
    assert uses.policy("variance")[2].posterior == vd.ZeroMean()
    assert type(uses.policy("entropy")[2]) is nn.Linear
