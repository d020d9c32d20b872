"""A conversion that fails, wherever it does, leaves the net as it was."""

from contextlib import contextmanager
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


@contextmanager
def unchanged(net, failure, match=None):
    """The block raises, and the net is as it was before."""
    before, tensors = state(net), {k: t.clone() for k, t in net.state_dict().items()}
    output = net(X)
    with pytest.raises(failure, match=match):
        yield
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
    fail_at(monkeypatch, Variational, "add_noise", call, failure)
    with unchanged(net, failure):
        vd.convert(net, recipe)
    monkeypatch.undo()
    vd.revert(vd.convert(net, recipe))


@pytest.mark.parametrize("owner, method, call, recipe", [
    (Head, "make_head", 1, vd.dropmax()),
    (gates_base.Gate, "__init__", 2, vd.dependent_beta_bernoulli()),
])  # fmt: skip
def test_heads_and_dependent_gates(monkeypatch, owner, method, call, recipe, failure):
    net = make() if owner is Head else vd.convert(make(), vd.beta_bernoulli())
    fail_at(monkeypatch, owner, method, call, failure)
    with unchanged(net, failure):
        vd.convert(net, recipe)


def test_a_posterior_that_fails_on_the_second_layer():
    @dataclass(frozen=True)
    class Picky(vd.AdditiveGaussian):
        def initial(self, weight, axes):
            if weight.shape[0] == 2:
                raise ValueError("two outputs")
            return super().initial(weight, axes)

    net = make()
    with unchanged(net, ValueError, "two outputs"):
        vd.convert(net, vd.Recipe(Picky()))
