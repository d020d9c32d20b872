"""Dropout that a net has: what the switch reaches becomes noise, the rest is named with a reason."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional

import vardrop as vd
from tests.nets import Parts, assert_unchanged, reload
from tests.refusals import assert_refused
from tests.zoo.vision import DropPath, StochasticDepth
from vardrop._core.modules import evaluating


def attend(q, k, v, dropout=0.0):
    return functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout)


class Attention(nn.Module):
    """As in transformers: the dropout module lends its rate to a function."""

    def __init__(self, rate=0.5):
        super().__init__()
        self.query, self.dropout = nn.Linear(4, 4), nn.Dropout(rate)

    def forward(self, x):
        return attend(self.query(x), x, x, dropout=0.0 if not self.training else self.dropout.p)


class Called(Attention):
    def forward(self, x):
        assert 0 <= self.dropout.p < 1
        return self.dropout(self.query(x))


class OwnRate(nn.Module):
    def __init__(self, rate=0.5):
        super().__init__()
        self.query, self.attention_dropout, self.after = nn.Linear(4, 4), rate, nn.Dropout(0.5)

    def forward(self, x):
        rate = self.attention_dropout if self.training else 0.0
        return self.after(attend(self.query(x), x, x, rate))


X = torch.randn(2, 3, 4)


def reasons(net, x=None):
    return {s.name: s.reason for s in vd.plan(net, vd.mc_dropout(), example_input=x).steps}


@pytest.mark.parametrize("kind", [Attention, OwnRate])
def test_dropout_in_the_code_of_a_module_is_found_by_a_pass_and_switched(kind, tmp_path):
    net = nn.Sequential(kind(), nn.Dropout(0.5)).eval()
    step = {s.name: s for s in vd.plan(net, vd.mc_dropout(), example_input=X).changes}["0"]
    assert step.becomes == "itself, with its dropout (in code=0.5) under the switch"
    assert "0" not in reasons(net)  # without an example
    assert "0" not in reasons(nn.Sequential(kind(rate=0.0), nn.Dropout(0.5)), X)
    before = net(X)
    vd.convert(net, vd.mc_dropout(), example_input=X)
    assert torch.equal(net(X), before)
    with vd.sampling(net[0]):
        assert not torch.equal(net[0](X), net[0](X))
    assert type(reload(net, nn.Sequential(kind(), nn.Dropout(0.5)), tmp_path)[0]) is type(net[0])
    assert type(vd.revert(net)[0]) is kind


class Scaling(OwnRate):
    """Its training mode decides on more than dropout."""

    def forward(self, x):
        return super().forward(x) * (2 if self.training else 1)


def spread(net):
    """The largest standard deviation of predictions."""
    return vd.predict(net, X, samples=8, seed=0, likelihood=vd.Values()).std.max()


def test_a_net_whose_only_dropout_is_in_code_names_the_example():
    net = nn.Sequential(nn.Linear(4, 4), OwnRate(), nn.Linear(4, 2)).eval()
    net[1].after.p = 0.0
    assert_refused("`example_input` to find dropout in code", vd.convert, net, vd.mc_dropout())
    for recipe in (vd.mc_dropout(), vd.mc_dropout(0.1)):
        assert [s.name for s in vd.plan(net, recipe, example_input=X).changes] == ["1"]
    vd.convert(net, vd.mc_dropout(), example_input=X)
    assert spread(net) > 0


@pytest.mark.parametrize("kind", [DropPath, StochasticDepth])
def test_stochastic_depth_follows_the_switch_without_an_example(kind, tmp_path):
    net = nn.Sequential(nn.Linear(4, 4), kind(0.5)).eval()
    plan = vd.plan(net, vd.mc_dropout())
    assert [s.name for s in plan.changes] == ["1"]
    assert "=0.5) under the switch" in plan.changes[0].becomes
    vd.convert(net, vd.mc_dropout())
    with vd.sampling(net):
        assert not all(torch.equal(net(X), net(X)) for _ in range(20))
    assert type(reload(net, nn.Sequential(nn.Linear(4, 4), kind(0.5)), tmp_path)[1]) is type(net[1])


def test_what_plan_says_is_true_of_the_net():
    """The switch leaves alone what plan skips, and reaches all that it claims."""
    for kind in (Called, OwnRate, Scaling):
        net = nn.Sequential(kind(), nn.Dropout(0.5))
        plan = vd.plan(net, vd.mc_dropout(), example_input=X)
        vd.convert(net, vd.mc_dropout(), example_input=X).eval()
        for step in plan.changes:
            with vd.sampling(step.module):
                assert not torch.equal(net(X), net(X)), (kind, step.name)
        assert [s.name for s in plan.skips] == (["0"] if kind is Scaling else [])
        if kind is Scaling:  # its mode controls more than dropout
            told = "its own code draws dropout of 0.5, and its training mode does not"
            assert told in plan.skips[0].reason
            assert "call a dropout module instead" in plan.skips[0].reason
        own = {OwnRate: {"0", "0.after"}, Scaling: {"0.after"}}.get(kind, {"0.dropout"})
        assert {s.name for s in plan.changes} == {*own, "1"}
    both = nn.ModuleDict({"attention": Attention(), "called": Called()})
    both["called"].dropout = both["attention"].dropout  # one module with two owners
    assert reasons(both)["attention.dropout"] == ""


def test_a_net_without_dropout_gets_its_advice_once():
    net = nn.Sequential(*[nn.Linear(2, 2) for _ in range(19)])
    with pytest.raises(vd.VardropError, match="and 11 more: the net has no dropout module") as e:
        vd.convert(net, vd.mc_dropout())
    assert str(e.value).count("give `drop_rate`") == 1
    assert len(str(e.value)) < 400


INSIDE = {name: (lambda kind=kind: kind(4, 4, 2, dropout=0.5), 1) for name, kind in
          (("lstm", nn.LSTM), ("gru", nn.GRU), ("rnn", nn.RNN))}  # fmt: skip
INSIDE["attention"] = (lambda: nn.MultiheadAttention(4, 2, dropout=0.5), 3)


@pytest.mark.parametrize("make, count", INSIDE.values(), ids=INSIDE)
def test_dropout_inside_torchs_functions_follows_the_switch(make, count, tmp_path):
    net, x = make().eval(), [torch.randn(6, 5, 4)] * count
    before = net(*x)[0]
    assert "dropout=0.5" in vd.plan(net, vd.mc_dropout()).changes[0].becomes
    vd.convert(net, vd.mc_dropout())
    assert torch.equal(net(*x)[0], before)
    with vd.sampling(net):
        assert not torch.equal(net(*x)[0], net(*x)[0])
        with evaluating(net):  # leaves the mode as it was, not as the switch has it
            pass
    assert torch.equal(net(*x)[0], before)
    with vd.sampling(net.train(), False):
        assert torch.equal(net(*x)[0], net(*x)[0])
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert type(other) is type(net)
        assert torch.equal(other.eval()(*x)[0], before)
    assert type(reload(net, make(), tmp_path)) is type(net)
    wrong = make()
    wrong.dropout = 0.25
    assert_refused("'dropout': 0.25.*, in the file", vd.load_noisy, tmp_path / "net", wrong)
    assert type(vd.revert(net)) is type(make())
    assert torch.equal(net.eval()(*x)[0], before)
    if count == 1:  # dropout between noisy recurrent layers is drawn with their weights
        vd.convert(net, vd.bayes_by_backprop(log_sigma2=-60.0)).eval()
        with vd.sampling(net):
            assert not torch.allclose(net(*x)[0], net(*x)[0])
        assert torch.equal(net(*x)[0], net(*x)[0])


def test_layers_inside_a_switched_module_are_converted_too():
    net = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True)
    vd.convert(net, vd.mc_dropout())
    vd.convert(net, vd.sparse_vd())
    kinds = {name: type(m).__name__ for name, m in net.named_modules()}
    assert kinds["self_attn"] == "SwitchedMultiheadAttention"
    assert type(net.linear1) is vd.Linear
    assert type(net.dropout) is vd.gates.Dropout


def test_a_rate_of_zero_is_no_dropout_and_a_subclass_of_torchs_attention_is_not_claimed():
    net = nn.Sequential(nn.MultiheadAttention(8, 2), nn.Dropout(0.0), nn.Dropout(0.5))
    assert "its rate is 0" in reasons(net)["1"]
    assert [s.name for s in vd.plan(net, vd.mc_dropout()).changes] == ["2"]
    without = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.0))
    assert_refused("that draws; pass .* or give `drop_rate`", vd.convert, without, vd.mc_dropout())
    assert type(vd.convert(without, vd.mc_dropout(0.5))[0]) is vd.Linear
    own = type("Own", (nn.MultiheadAttention,), {})(4, 2, dropout=0.5)
    assert "a subclass may ask for the mode" in reasons(nn.Sequential(own))["0"]


@pytest.mark.parametrize("name, recipe, kind", [
    ("lstm", vd.mc_dropout(), "SwitchedLSTM"),
    ("lstm", vd.bayes_by_backprop(), ".*"),
    ("attention", vd.bayes_by_backprop(), ".*"),
])  # fmt: skip
def test_a_function_is_not_drawn_where_code_draws_for_every_call(name, recipe, kind):
    net = vd.convert(INSIDE[name][0](), recipe)
    assert_refused(f"dropout inside {kind}, which draws again in every call", vd.draw, net)


def test_the_switch_of_code_is_seen_by_the_compiler():
    net = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True)
    vd.convert(net, vd.mc_dropout(), include="self_attn").eval()
    compiled, x = torch.compile(net, backend="eager", fullgraph=True), torch.randn(2, 3, 8)
    with vd.sampling(net):
        assert not torch.equal(compiled(x), compiled(x))
    assert torch.equal(compiled(x), compiled(x))
    torch.testing.assert_close(compiled(x), net(x))


# ---- dropout in code that is not under the switch


@pytest.mark.parametrize("recipe", [vd.mc_dropout(), vd.bayes_by_backprop(log_sigma2=-60.0)])
def test_predictions_draw_dropout_in_code(recipe):
    net = nn.Sequential(OwnRate(), nn.Dropout(0.1), nn.Linear(4, 2)).eval()
    vd.convert(net, recipe)
    net[0].after.p = net[1].p = 0.0
    kinds = [type(m) for m in net.modules()]
    predictor = vd.Predictor(net, 8, likelihood=vd.Values())
    for predict in (predictor, vd.freeze(net, 8, likelihood=vd.Values())):
        assert predict(X, seed=0).std.max() > 0.01
    assert [type(m) for m in net.modules()] == kinds
    net[0].attention_dropout = 0.0
    assert spread(net) < 1e-3


@pytest.mark.parametrize("recipe", [vd.mc_dropout(), vd.bayes_by_backprop()])
def test_prediction_refuses_dropout_that_it_would_leave_out(recipe):
    net = vd.convert(nn.Sequential(Scaling(), nn.Dropout(0.5), nn.Linear(4, 2)), recipe).eval()
    told = r"dropout of 0.5 in the code of module '0' .Scaling.*torch.nn.Dropout\(0.5\); or .*register_function"
    assert_refused(told, vd.predict, net, X, samples=4)
    assert_refused(told, next, iter(vd.predict_batches(net, [X], samples=4)))
    assert_refused(told, vd.freeze(net), X)
    vd.predict(net, X, mode="mean")
    net[0].attention_dropout = 0.0
    vd.predict(net, X, samples=4)
    net[0].attention_dropout = 0.25  # after the net was looked at
    assert_refused("dropout of 0.25 in the code", vd.predict, net, X, samples=4)


def test_dropout_that_code_always_draws_is_part_of_predictions():
    always = Parts(lambda net, x: functional.dropout(x, 0.5))
    net = vd.convert(nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.1), always), vd.mc_dropout())
    assert reasons(net, X)["2"]
    net[1].p = 0.0
    assert spread(net) > 0


class Learning(nn.BatchNorm1d):
    """Writes into what it holds whenever it is in training mode."""

    def __init__(self):
        super().__init__(4)
        self.inner, self.count = nn.Linear(4, 4), 0
        self.average = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, x):
        if self.training:
            self.count += 1
            self.steps += 1
            self.inner.weight.data[0] = 7.0
            self.inner.bias.data = self.inner.bias.data + 1
            torch.lerp(self.average, x.mean(0), 0.5, out=self.average)
        return functional.dropout(super().forward(self.inner(x)), 0.5, self.training)


@pytest.mark.parametrize("mode", [True, False])
def test_the_pass_that_looks_for_dropout_leaves_the_net_alone(mode):
    net, x = nn.Sequential(Learning(), nn.BatchNorm1d(4), nn.Dropout(0.1)).train(mode), X.flatten(1)
    x = x[:, :4].repeat(3, 1)
    kept, generator = x.clone(), torch.get_rng_state()
    with assert_unchanged(net):
        assert vd.gates.find_functional_dropout(net, x) == {"0": 0.5}
    assert net[0].count == 0
    assert torch.equal(x, kept)
    assert torch.equal(torch.get_rng_state(), generator)


FUNCTIONS = [
    functional.dropout, functional.dropout2d, functional.alpha_dropout,
    functional.feature_alpha_dropout,
    lambda x, p, on: x * torch.bernoulli(torch.full_like(x, 1 - p)) if on else x,
    lambda x, p, on: x * torch.empty_like(x).bernoulli_(1 - p) if on else x,
    lambda x, p, on: functional.scaled_dot_product_attention(x, x, x, dropout_p=p * on),
]  # fmt: skip


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("rate", [0.5, 0.1])
def test_every_function_is_found_with_its_rate(function, rate):
    net = nn.Sequential(Parts(lambda net, x: function(x, rate, net.training)))
    assert vd.gates.find_functional_dropout(net, torch.randn(2, 3, 4, 4)) == {"0": rate}
    jitter = Parts(lambda net, x: x + torch.randn_like(x) if net.training else x)
    assert vd.gates.find_functional_dropout(jitter, X) == {}  # other noise of training
    vd.predict(vd.convert(nn.Sequential(jitter, nn.Dropout(0.5)), vd.mc_dropout()), X, samples=2)


class Registered(OwnRate):
    pass


def test_a_registered_class_follows_the_switch(tmp_path):
    vd.gates.register_functional_dropout(Registered, lambda m: {"rate": m.attention_dropout})
    net = nn.Sequential(Registered(0.25), nn.Linear(4, 2)).eval()
    plain = net(X)
    assert spread(net) > 0
    net[0].after.p = 0.0
    vd.convert(net, vd.mc_dropout())
    assert type(net[0]).__name__ == "SwitchedRegistered"
    assert torch.equal(net(X), plain)
    with vd.sampling(net):
        assert not torch.equal(net(X), net(X))
    assert spread(net) > 0
    again = nn.Sequential(Registered(0.25), nn.Linear(4, 2))
    again[0].after.p = 0.0
    assert type(reload(net, again, tmp_path)[0]) is type(net[0])
    assert type(vd.revert(net)[0]) is Registered
    derived = nn.Sequential(type("Derived", (Registered,), {})())
    assert "a subclass may ask for the mode" in reasons(derived)["0"]


def test_code_that_cannot_run_in_training_mode_says_the_remedy():
    def run(net, x):
        if net.training:
            raise ValueError("no targets")
        return net.drop(x)

    kind = type("Detector", (Parts,), {})
    net = vd.convert(kind(run, drop=nn.Dropout(0.5)), vd.mc_dropout())
    with pytest.raises(ValueError, match="no targets") as raised:
        vd.predict(net, X, samples=2)
    assert "register_functional_dropout(kind, lambda module: {})" in str(raised.value)
    vd.gates.register_functional_dropout(kind, lambda module: {})
    assert vd.predict(net, X, samples=2).probs.shape == X.shape
