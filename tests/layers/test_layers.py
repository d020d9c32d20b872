"""Layers as torch's own: factory arguments, and a warning where a net is trained without its KL."""

import copy
import warnings

import pytest
import torch
from torch import nn

import vardrop as vd
from tests.refusals import assert_refused

ARGUMENTS = {vd.Linear: (4, 3), vd.Bilinear: (4, 3, 2), vd.Embedding: (5, 3)}
ARGUMENTS[vd.MultiheadAttention] = (4, 2)
X, Y = torch.randn(8, 4), torch.randint(3, (8,))


# Only torch's own layers take a type and a device.
TORCHS = [n for k, n in vd.layers.NOISY_TYPES.items() if k.__module__.startswith("torch.")]


@pytest.mark.parametrize("kind", TORCHS)
def test_factory_arguments(kind):
    arguments = ARGUMENTS.get(kind, (2, 3, 2))
    method = {"posterior": vd.AdditiveGaussian(-3.0), "prior": vd.Normal()}
    layer = kind(*arguments, dtype=torch.float64, device="cpu", **method)
    assert {p.dtype for p in layer.parameters()} == {torch.float64}
    assert layer.posterior == vd.AdditiveGaussian(-3.0)
    layer = kind(*arguments, device="meta", **method)
    assert {p.device.type for p in layer.parameters()} == {"meta"}


def test_options_of_torch_are_taken_by_name():
    assert vd.Linear(in_features=4, out_features=3, bias=False).bias is None
    assert vd.Bilinear(in1_features=4, in2_features=3, out_features=2).weight.shape == (2, 4, 3)
    assert vd.Embedding(5, 3, padding_idx=0, scale_grad_by_freq=True).scale_grad_by_freq


@pytest.mark.parametrize("options, match", [
    ({"max_norm": 1.0}, "noisy Embedding.*max_norm rewrites its weights"),
    ({"sparse": True}, "noisy Embedding.*sparse gradients"),
    ({"gate": vd.BinaryDropout()}, "noisy Embedding.*an index has no features to gate"),
])  # fmt: skip
def test_what_a_noisy_embedding_cannot_have(options, match):
    assert_refused(match, vd.Embedding, 5, 3, **options)


def net_and_step(recipe, loss, frozen=False, inside=1, lr=1e-4, **options):
    net = vd.convert(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)), recipe)
    last = nn.Linear(3, 3)
    net.requires_grad_(not frozen)
    optimizer = torch.optim.Adam([*net.parameters(), *last.parameters()], lr=lr, **options)

    def step():
        optimizer.zero_grad()
        for _ in range(inside):
            loss(net, last).backward()
        optimizer.step()

    return net, step


def without_kl(net, last):
    return nn.functional.cross_entropy(last(net(X)), Y)


def with_kl(net, last):
    return without_kl(net, last) + vd.kl(net) / 100


OWING = {
    "sparse_vd": vd.sparse_vd(), "bayes_by_backprop": vd.bayes_by_backprop(),
    "concrete_dropout": vd.concrete_dropout(), "l0": vd.l0(),
}  # fmt: skip


@pytest.mark.parametrize("recipe, options", [
    *((recipe, {}) for recipe in OWING), ("sparse_vd", {"fused": True}), ("l0", {"foreach": True}),
])  # fmt: skip
def test_a_net_that_is_trained_without_its_kl_warns_once(recipe, options):
    net, step = net_and_step(OWING[recipe], without_kl, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(250):
            step()
    assert len(caught) == 1
    assert "vardrop.ELBO(net, likelihood, num_data)" in str(caught[0].message)
    copy.deepcopy(net)


def elbo_step(beta):
    likelihood, n = vd.Categorical(), 100
    return lambda net, last: vd.ELBO(nn.Sequential(net, last), likelihood, n, beta=beta)(X, Y).loss


def gathered(net, last):
    return sum(without_kl(net, last) for _ in range(150)) + vd.kl(net) / 100


QUIET = {
    "with the KL": (OWING["sparse_vd"], with_kl, {}),
    "the ELBO": (OWING["l0"], elbo_step(1.0), {}),
    "the ELBO, beta=0": (OWING["sparse_vd"], elbo_step(0.0), {}),
    "many passes per step": (OWING["sparse_vd"], gathered, {}),
    "gradients gathered": (OWING["sparse_vd"], with_kl, {"inside": 3}),
    "frozen": (OWING["sparse_vd"], without_kl, {"frozen": True}),
    "nothing changes": (OWING["sparse_vd"], without_kl, {"lr": 0.0}),
    "fused, with the KL": (OWING["sparse_vd"], with_kl, {"fused": True}),
    "no prior": (vd.Recipe(vd.AdditiveGaussian()), without_kl, {}),
    "a gate without a KL": (vd.binary_dropout(0.3), without_kl, {}),
    "a gate with fixed noise": (vd.gaussian_dropout(0.3, kind="A"), without_kl, {}),
}


@pytest.mark.parametrize("recipe, loss, options", QUIET.values(), ids=QUIET)
def test_no_false_alarm(recipe, loss, options):
    _, step = net_and_step(recipe, loss, **options)
    for _ in range(8 if loss is gathered else 120):
        step()


def test_no_alarm_inside_a_transform_which_hides_values():
    net = vd.convert(nn.Linear(4, 3), vd.sparse_vd())

    loss = lambda values, x: torch.func.functional_call(net, values, (x,)).sum()
    each = torch.func.vmap(torch.func.grad(loss), (None, 0), randomness="different")
    for _ in range(120):
        each(dict(net.named_parameters()), X)
