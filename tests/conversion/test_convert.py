from dataclasses import make_dataclass

import pytest
import torch
from torch import nn

import vardrop as vd
from tests.compression.nets import Residual, Separable
from tests.nets import Parts, Tied
from tests.refusals import assert_refused, unchanged
from vardrop.gates import base as gates_base
from vardrop.layers import Variational

IMAGE = torch.randn(2, 3, 8, 8)
NETS = {
    "residual": (Residual, IMAGE, 4),
    "depthwise": (Separable, IMAGE, 4),
    "tied": (Tied, torch.randint(11, (3, 4)), 2),
    "bare": (lambda: nn.Linear(6, 2), torch.randn(3, 6), 1),
}


@pytest.mark.parametrize("make, x, count", NETS.values(), ids=NETS)
def test_outputs_in_mean_mode_are_unchanged(make, x, count):
    net, calls = make().eval(), []
    before, parameters = net(x), dict(net.named_parameters())
    for module in net.modules():
        module.register_forward_hook(lambda *a: calls.append(1))
    assert vd.convert(net, vd.sparse_vd()) is net
    assert torch.equal(net(x), before)
    assert len(calls) == len(list(net.modules()))  # hooks and references survive
    assert all(net.get_parameter(k) is p for k, p in parameters.items())
    assert len(vd.log_alpha(net)) == count
    assert "55 weights" in str(vd.plan(Tied(), vd.sparse_vd()))  # a tied one counts once
    with vd.sampling(net):
        assert not torch.equal(net(x), before)
    vd.kl(net).backward()
    plain = vd.revert(net)
    assert torch.equal(plain(x), before)
    assert not any(type(m).__module__.startswith("vardrop") for m in plain.modules())
    assert set(plain.state_dict()) == set(make().state_dict())


def mixed():
    return nn.ModuleDict({
        "conv": nn.Conv1d(2, 3, 2), "norm": nn.BatchNorm1d(3), "fc": nn.Linear(3, 2),
        "attention": nn.MultiheadAttention(4, 2), "lstm": nn.LSTM(3, 4), "lazy": nn.LazyLinear(3),
        "table": nn.Embedding(5, 2, max_norm=1.0), "sparse": nn.Embedding(5, 2, sparse=True),
        "bag": nn.EmbeddingBag(5, 2),
    })  # fmt: skip


def test_plan_says_what_and_why_not():
    text = str(vd.plan(mixed(), vd.sparse_vd()))
    for line in (
        # 12 + 6, 3 x 16 + 16 of attention with its output projection, 16 x (3 + 4) of the LSTM
        "4 modules, 194 weights become noisy",
        "-> vardrop.Conv1d",
        "-> vardrop.MultiheadAttention",
        "-> vardrop.LSTM",
        "BatchNorm1d  skip: no weights that can be noisy",
        "bag        EmbeddingBag  skip: bags reduce rows inside one torch function",
        "skip: its shape is not known yet",
        "skip: max_norm rewrites",
        "skip: sparse gradients",
    ):
        assert line in text
    assert "out_proj" not in text, "it goes with its attention layer"


@pytest.mark.parametrize("where, exclude, expected", [
    ("fc", None, {"fc"}), (nn.Conv1d, None, {"conv"}),
    (lambda module, name: name.startswith("c"), None, {"conv"}),
    (["fc", nn.Conv1d], None, {"fc", "conv"}), (None, "con*", {"fc", "attention", "lstm"}),
    (None, nn.Linear, {"conv", "attention", "lstm"}),
])  # fmt: skip
def test_selection(where, exclude, expected):
    changes = vd.plan(mixed(), vd.sparse_vd(), include=where, exclude=exclude).changes
    assert {s.name for s in changes} == expected


def nan_net():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[1].weight.data[0, 0] = float("nan")
    return net


BAD = [
    (lambda: nn.Linear(2, 2), {"include": "fc9"}, "`include` to match a module, but got 'fc9'"),
    (lambda: nn.Linear(2, 2), {"exclude": "x"}, "`exclude` to match a module, but got 'x'"),
    (lambda: nn.Sequential(), {}, "no modules with parameters"),
    (lambda: nn.BatchNorm1d(3), {}, "every module is skipped.*no weights that can be noisy"),
    (nan_net, {}, "module '1' to be finite, but got NaN"),
    (lambda: vd.convert(nn.Linear(2, 2), vd.ard()), {}, r"'\(net\)' to be plain.*revert"),
]


@pytest.mark.parametrize("make, arguments, match", BAD)
def test_bad_input_leaves_the_net_as_it_was(make, arguments, match):
    net = make()
    with unchanged(net, match=match):
        vd.convert(net, vd.sparse_vd(), **arguments)


def test_a_recipe_of_a_kind_that_conversion_does_not_know():
    unheard = make_dataclass("Unheard", [], bases=(vd.BaseRecipe,), frozen=True)()
    assert_refused(r"kind \(Recipe, .*\), but got .*Unheard", vd.plan, nn.Linear(2, 2), unheard)


@pytest.mark.parametrize("walk", [vd.kl, vd.log_alpha, vd.revert, vd.sparsity])
def test_a_plain_net_has_no_noise(walk):
    assert_refused("to have noisy modules, but got Linear.*convert", walk, nn.Linear(2, 2))


def test_zero_mean_ignores_the_means_of_a_checkpoint():
    net = vd.convert(nn.Linear(3, 2), vd.variance_layer())
    net.load_state_dict(nn.Linear(3, 2).state_dict(), strict=False)
    assert not net.weight.any()
    assert net.sigma.abs().sum() > 0


def adapted():
    """A frozen layer under a trained adapter of low rank."""
    base, a, b = nn.Linear(6, 5).requires_grad_(False), nn.Linear(6, 2), nn.Linear(2, 5)
    return Parts(lambda net, x: net.base(x) + net.b(net.a(x)), base=base, a=a, b=b)


@pytest.mark.parametrize("recipe", [vd.sparse_vd(), vd.beta_bernoulli()])
def test_frozen_weights_stay_plain_unless_they_are_named(recipe):
    text = str(vd.plan(adapted(), recipe))
    assert "2 modules, 22 weights become noisy" in text
    assert "base   Linear  skip: its weights are frozen; name it with `include`" in text
    net = vd.convert(adapted(), recipe)
    assert type(net.base) is nn.Linear
    assert isinstance(net.a, vd.Linear)
    named = vd.convert(adapted(), recipe, include=["base", "b"])
    assert isinstance(named.base, vd.Linear)
    assert not named.base.weight.requires_grad
    assert type(named.a) is nn.Linear


def test_a_frozen_head_is_named_or_left():
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3))
    net[2].requires_grad_(False)
    assert_refused("'2' .Linear.: its weights are frozen", vd.convert, net, vd.dropmax())
    assert isinstance(vd.convert(net, vd.dropmax(), include="2")[2], vd.Head)


@pytest.mark.parametrize("norm", [nn.utils.spectral_norm, nn.utils.parametrizations.weight_norm])
def test_weights_that_are_computed_are_left(norm):
    net = nn.Sequential(norm(nn.Linear(3, 4)), nn.Linear(4, 2))
    skips = {s.name: s.reason for s in vd.plan(net, vd.sparse_vd()).skips}
    assert "computed from other tensors" in skips["0"] or "subclass of Linear" in skips["0"]
    vd.convert(net, vd.sparse_vd())
    assert not isinstance(net[0], vd.Linear)


def test_the_plan_of_many_layers_is_printed_by_kind():
    layers = [nn.ModuleDict({"map": nn.Linear(2, 2), "norm": nn.LayerNorm(2)}) for _ in range(20)]
    net = nn.ModuleDict({"layers": nn.ModuleList(layers), "last": nn.Linear(2, 1)})
    layers[3]["map"].requires_grad_(False)
    layers[5]["map"].requires_grad_(False)
    todo = vd.plan(net, vd.sparse_vd())
    assert len(todo.steps) == 41
    rows = [" ".join(line.split()) for line in str(todo).splitlines()[1:]]
    assert rows == [
        "layers.0.map, layers.1.map and 16 more 18 Linear -> vardrop.Linear",
        "layers.*.norm 20 LayerNorm skip: no weights that can be noisy",
        "layers.3.map, layers.5.map 2 Linear skip: its weights are frozen; name it with `include` if it is meant",
        "last Linear -> vardrop.Linear",
    ]
    assert len(vd.plan(net, vd.sparse_vd(), include="layers.*.map").changes) == 20


# A conversion that fails, wherever it does, leaves the net as it was.


def make():
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 2))
    net[4].bias.requires_grad_(False)
    return net.eval()


RECIPES = [
    vd.sparse_vd(), vd.variance_layer(), vd.beta_bernoulli(), vd.bayesian_compression(),
    vd.bayes_by_backprop(vd.Normal("pretrained")),
]  # fmt: skip


@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("owner, method, call, recipe", [
    *((vd.Variational, "add_noise", call, recipe) for recipe in RECIPES for call in (1, 2, 3)),
    (vd.AdditiveGaussian, "initial", 2, vd.sparse_vd()), (vd.Head, "make_head", 1, vd.dropmax()),
    (gates_base.Gate, "__init__", 2, vd.dependent_beta_bernoulli()),
])  # fmt: skip
def test_a_failure_leaves_the_net(monkeypatch, owner, method, call, recipe, failure):
    net = vd.convert(make(), vd.beta_bernoulli()) if owner is gates_base.Gate else make()
    work, calls = getattr(owner, method), []

    def broken(*args, **kwargs):  # raises at its `call`th use, after it has done its work
        calls.append(work(*args, **kwargs))
        if len(calls) == call:
            raise failure
        return calls[-1]

    monkeypatch.setattr(owner, method, broken)
    with unchanged(net, failure):
        vd.convert(net, recipe)
    monkeypatch.undo()
    vd.convert(net, recipe)
    if owner is vd.Variational:
        vd.revert(net)


NEUTRAL = (vd.l0, vd.bayesian_compression, vd.mc_dropout)
MOVING = (vd.beta_bernoulli, vd.structured_pruning, vd.concrete_dropout)


@pytest.mark.parametrize("method", NEUTRAL + MOVING, ids=lambda method: method.__name__)
@torch.no_grad()
def test_a_gate_keeps_the_outputs_of_a_trained_model_or_the_plan_says_how_far_it_moves_them(method):
    net, x = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).eval(), torch.randn(5, 4)
    before, recipe = net(x), method(0.1) if method is vd.mc_dropout else method()
    texts = [step.becomes for step in vd.plan(net, recipe).changes]
    factors = [float(t.split(" times ")[1].split()[0]) if " times " in t else 1.0 for t in texts]
    vd.convert(net, recipe)
    moved = float((net(x) - before).abs().max())
    assert (moved < 1e-3) == (factors == [1.0] * len(texts)) == (method in NEUTRAL)
    with vd.sampling(net, False):
        for layer, factor in zip((net[0], net[2]), factors, strict=True):
            inside = torch.randn(5, layer.in_features)
            plain = nn.functional.linear(factor * inside, layer.weight, layer.bias)
            outside = factor * nn.functional.linear(inside, layer.weight, layer.bias)
            drift = min(float((layer(inside) - y).abs().max()) for y in (plain, outside))
            assert drift < 0.005


ENCODER = lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)


@pytest.mark.parametrize("make, expected", [
    (lambda: nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2)), vd.local_reparameterization),
    (Residual, vd.flipout), (Separable, vd.flipout), (Tied, vd.flipout), (ENCODER, vd.flipout),
], ids=["dense", "residual", "depthwise", "embedding", "attention"])  # fmt: skip
def test_bayes_by_backprop_chooses_the_estimator_that_is_exact_for_the_model(make, expected):
    noisy = vd.noisy.named_modules_of(vd.convert(make(), vd.bayes_by_backprop()), Variational)
    assert {m.estimator for m in noisy.values()} == {expected}
    explicit = vd.convert(make(), vd.bayes_by_backprop(estimator=vd.weight_sample))
    noisy = vd.noisy.named_modules_of(explicit, Variational)
    assert {m.estimator for m in noisy.values()} == {vd.weight_sample}
