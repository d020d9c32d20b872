"""A conversion that fails, wherever it does, leaves the net as it was."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

import vardrop as vd
from vardrop.gates import base as gates_base
from vardrop.heads.base import Head
from vardrop.layers import Variational

X = torch.randn(3, 4)


def make():
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 2))
    net[4].bias.requires_grad_(False)
    return net.eval()


def state(net):
    return {
        "types": [type(m) for m in net.modules()],
        "attributes": [sorted(vars(m)) for m in net.modules()],
        "registries": [id(m._parameters) for m in net.modules()],
        "parameters": [(n, id(p), p.requires_grad) for n, p in net.named_parameters()],
        "modes": [m.training for m in net.modules()],
    }


@pytest.fixture(params=[RuntimeError, KeyboardInterrupt])
def failure(request):
    return request.param


def assert_unchanged(net, before, tensors, output):
    assert state(net) == before
    assert all(torch.equal(t, tensors[k]) for k, t in net.state_dict().items())
    assert torch.equal(net(X), output)


def fail_at(monkeypatch, owner, name, call, failure):
    """Let a method raise at its `call`th use, after it has done its work."""
    work, calls = getattr(owner, name), []

    def broken(*args, **kwargs):
        work(*args, **kwargs)
        calls.append(1)
        if len(calls) == call:
            raise failure

    monkeypatch.setattr(owner, name, broken)


@pytest.mark.parametrize("call", [1, 2, 3])
@pytest.mark.parametrize("recipe", [
    vd.sparse_vd(), vd.variance_layer(), vd.beta_bernoulli(), vd.bayesian_compression(),
    vd.bayes_by_backprop(vd.Normal("pretrained")),
])  # fmt: skip
def test_layers(monkeypatch, recipe, call, failure):
    net = make()
    before, tensors = state(net), {k: t.clone() for k, t in net.state_dict().items()}
    output = net(X)
    fail_at(monkeypatch, Variational, "add_noise", call, failure)
    with pytest.raises(failure):
        vd.convert(net, recipe)
    assert_unchanged(net, before, tensors, output)
    monkeypatch.undo()
    vd.revert(vd.convert(net, recipe))


@pytest.mark.parametrize("owner, method, call, recipe", [
    (Head, "make_head", 1, vd.dropmax()),
    (gates_base.Gate, "__init__", 2, vd.dependent_beta_bernoulli()),
])  # fmt: skip
def test_heads_and_dependent_gates(monkeypatch, owner, method, call, recipe, failure):
    net = make() if owner is Head else vd.convert(make(), vd.beta_bernoulli())
    before, tensors, output = state(net), net.state_dict(), net(X)
    fail_at(monkeypatch, owner, method, call, failure)
    with pytest.raises(failure):
        vd.convert(net, recipe)
    assert_unchanged(net, before, tensors, output)


def test_a_posterior_that_fails_on_the_second_layer():
    @dataclass(frozen=True)
    class Picky(vd.AdditiveGaussian):
        def initial(self, weight, axes):
            if weight.shape[0] == 2:
                raise ValueError("two outputs")
            return super().initial(weight, axes)

    net = make()
    before, tensors, output = state(net), net.state_dict(), net(X)
    with pytest.raises(ValueError, match="two outputs"):
        vd.convert(net, vd.Recipe(Picky()))
    assert_unchanged(net, before, tensors, output)
