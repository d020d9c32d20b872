"""The fast gradient sign method against closed forms, and its curves."""

import math

import pytest
import torch
from torch import nn

import vardrop as vd
from experiments.neklyudov_uses import attack_curve, attack_curves, fgsm, log_probabilities
from tests.experiments.digits import digits


def linear() -> nn.Linear:
    net = vd.convert(nn.Linear(3, 2, bias=False), vd.bayes_by_backprop(log_sigma2=-40.0)).eval()
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[1.0, -1.0, 0.0], [0.0, 0.0, 2.0]]))
    return net


@pytest.mark.parametrize("samples", [0, 3])
def test_step_of_a_linear_classifier(samples: int) -> None:
    # d loss / dx = p_1 (w_1 - w_0) for class 0: signs (-, +, +).
    x = torch.full((1, 3), 0.5)
    found = fgsm(linear(), x, torch.tensor([0]), 0.1, samples)
    assert torch.allclose(found, torch.tensor([[0.4, 0.6, 0.6]]))
    assert torch.allclose(fgsm(linear(), x, torch.tensor([0]), 0.8), torch.tensor([[0.0, 1, 1]]))
    assert torch.equal(fgsm(linear(), x, torch.tensor([0]), 0.0), x)


def test_ensembles_average_probabilities() -> None:
    net = vd.convert(nn.Linear(2, 2), vd.variance_layer())
    x = torch.ones(1, 2)
    torch.manual_seed(1)
    found = log_probabilities(net, x, 4).exp()
    torch.manual_seed(1)
    assert torch.allclose(found, torch.stack([net(x).softmax(-1) for _ in range(4)]).mean(0))
    assert found.sum().item() == pytest.approx(1.0)


def test_curve_starts_at_the_clean_accuracy_and_falls() -> None:
    data, test = digits()
    curves = attack_curves(data, test, (0.0, 0.2), epochs=3, samples=3)
    assert set(curves) == {"dropout, mean", "dropout, ensemble", "variance, ensemble"}
    for clean, attacked in curves.values():
        assert clean > 0.8
        assert attacked < clean - 0.2


def test_modes_stay_and_errors() -> None:
    _, test = digits()
    net = vd.convert(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), vd.sparse_vd())
    attack_curve(net, test, (0.1,), samples=1)
    assert net.training
    with pytest.raises(vd.VardropError, match="Expected `epsilon` to be at least 0"):
        fgsm(net, test.x, test.y, -math.pi)
