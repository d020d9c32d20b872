import json

import checks
import peers
import pruned_nets
import pytest
import torch
from naive import Naive, naive
from peer_layers import OURS, Model
from torch import nn

import vardrop as vd
from nets import TRAIN


def by_hand(net, x):
    noisy = naive(net)
    layers = [m for m in noisy.modules() if isinstance(m, Naive)]
    return Model(noisy, noisy, lambda: sum(m.kl() for m in layers), noisy.parameters)


class Refilled(nn.Module):
    """Noise in a buffer that every call overwrites, outside autograd's sight."""

    def __init__(self, layer):
        super().__init__()
        self.weight, self.rho = layer.weight, nn.Parameter(torch.zeros_like(layer.weight))
        self.register_buffer("noise", torch.zeros_like(layer.weight))

    def forward(self, x):
        self.noise.data.normal_()
        return x @ (self.weight + self.rho.exp() * self.noise).t()


def refilled(net, x):
    noisy = nn.Sequential(*(Refilled(m) if isinstance(m, nn.Linear) else m for m in net))
    mean = sum(m.rho.square().mean() + 1 for m in noisy if isinstance(m, Refilled))
    return Model(noisy, noisy, lambda: mean, noisy.parameters)


@pytest.mark.parametrize("build", [by_hand, *OURS.values()])
def test_right_candidates_pass_the_checks(build):
    assert checks.check(build)["marks"] == []


def test_wrong_candidates_are_marked():
    total, draws = checks.check(refilled)["marks"]
    assert total.startswith("KL is no sum over weights")
    assert draws.startswith("gradients of 10 draws are wrong")


@pytest.mark.parametrize("case", TRAIN, ids=lambda case: case.name)
def test_every_net_takes_a_batch_and_is_convertible(case):
    x, net = torch.rand(2, *case.shape[1:]), vd.convert(case.make(), vd.sparse_vd())
    assert net(x).shape == (2, 10)
    assert float(vd.kl(net).detach()) > 0


@pytest.mark.parametrize("name", pruned_nets.NETS)
def test_pruned_nets_shrink_to_what_training_left(name):
    small = vd.shrink(pruned_nets.pruned(name), torch.zeros(1, 1, 28, 28), drop_inputs=True).net
    found = [m.weight for m in small.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    shapes = [(w.shape[1], w.shape[0], int(w.count_nonzero())) for w in found]
    left = pruned_nets.left(name)
    assert shapes == [(c["inputs"], c["outputs"], c["weights"]) for c in left]


def test_a_library_that_does_not_install_is_written_down(tmp_path, monkeypatch):
    def fail(name, package):
        raise RuntimeError("no such version")

    monkeypatch.setattr(peers, "ROOT", tmp_path)
    monkeypatch.setattr(peers, "_install", fail)
    assert peers.ensure("torchbnn")["failure"] == "does not install: no such version"
    monkeypatch.setattr(peers, "_install", lambda name, package: None)
    assert "failure" not in peers.ensure("torchbnn")
    monkeypatch.setattr(peers, "_install", fail)
    assert peers.ensure("torchbnn") == json.loads((tmp_path / "torchbnn.json").read_text())
