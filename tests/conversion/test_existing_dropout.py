"""Dropout that a net has: what the switch reaches becomes noise, the rest is named with a reason."""

import copy
import functools
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional

import vardrop as vd
from vardrop.noisy import evaluating


def attend(q, k, v, dropout=0.0):
    return functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout)


class Attention(nn.Module):
    """As in transformers: the dropout module lends its rate to a function."""

    def __init__(self, rate=0.5):
        super().__init__()
        self.query, self.dropout = nn.Linear(4, 4), nn.Dropout(rate)

    def forward(self, x):
        return attend(self.query(x), x, x, dropout=0.0 if not self.training else self.dropout.p)


class RareCall(Attention):
    def upcast(self, weights):
        return self.dropout(weights)


class Called(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.dropout = nn.Linear(4, 4), nn.Dropout(0.5)

    def forward(self, x):
        assert 0 <= self.dropout.p < 1
        return self.dropout(self.query(x))


class PassedOn(Called):
    def forward(self, x):
        drop = self.dropout
        return [step(x) for step in (self.query, drop)][-1]


def logged(forward):
    @functools.wraps(forward)
    def wrapper(*args, **kwargs):
        return forward(*args, **kwargs)

    return wrapper


class Decorated(Attention):
    @logged
    def forward(self, x):
        return attend(x, x, x, self.dropout.p if self.training else 0.0)


class OwnRate(nn.Module):
    def __init__(self, rate=0.5):
        super().__init__()
        self.query, self.attention_dropout, self.after = nn.Linear(4, 4), rate, nn.Dropout(0.5)

    def forward(self, x):
        rate = self.attention_dropout if self.training else 0.0
        return self.after(attend(self.query(x), x, x, rate))


def reasons(net):
    return {s.name: s.reason for s in vd.plan(net, vd.mc_dropout()).steps}


@pytest.mark.parametrize("kind", [Attention, RareCall, Decorated])
def test_a_rate_that_is_handed_on_is_not_claimed(kind):
    net = nn.Sequential(kind(), nn.Dropout(0.5))
    found = reasons(net)
    assert "hands on its rate `p`" in found["0.dropout"]
    assert "set its p to 0" in found["0.dropout"]
    assert found["1"] == ""
    vd.convert(net, vd.mc_dropout())
    assert type(net[0].dropout) is nn.Dropout
    assert type(net[1]) is vd.gates.Dropout


def test_what_plan_says_is_true_of_the_net():
    """The switch leaves alone what plan skips, and reaches all that it claims."""
    x = torch.randn(2, 3, 4)
    for kind in (Attention, Called, PassedOn, OwnRate):
        net = nn.Sequential(kind(), nn.Dropout(0.5))
        claimed = [s.name for s in vd.plan(net, vd.mc_dropout()).changes]
        vd.convert(net, vd.mc_dropout()).eval()
        for name in claimed:
            only = net.get_submodule(name)
            with vd.sampling(only):
                assert not torch.equal(net(x), net(x)), (kind, name)


@pytest.mark.parametrize("kind", [Called, PassedOn])
def test_a_call_is_claimed(kind):
    assert reasons(nn.Sequential(kind()))["0.dropout"] == ""


def test_one_module_with_two_owners_is_claimed_where_one_calls_it():
    net = nn.ModuleDict({"attention": Attention(), "called": Called()})
    net["called"].dropout = net["attention"].dropout
    assert reasons(net)["attention.dropout"] == ""


def test_a_rate_of_the_owner_is_named():
    found = reasons(nn.Sequential(OwnRate()))
    assert "reads its rate `attention_dropout` while it is in training mode" in found["0"]
    assert found["0.after"] == ""
    assert "0" not in reasons(nn.Sequential(OwnRate(rate=0.0)))


def test_a_net_with_nothing_to_switch_says_so_once():
    net = nn.Sequential(*[Attention() for _ in range(12)])
    with pytest.raises(vd.VardropError, match="'0.dropout' .Dropout.,.* and 4 more: the mod") as e:
        vd.convert(net, vd.mc_dropout())
    assert str(e.value).count("hands on its rate") == 1


def test_a_net_without_dropout_gets_its_advice_once():
    net = nn.Sequential(*[nn.Linear(2, 2) for _ in range(19)])
    with pytest.raises(vd.VardropError, match="and 11 more: the net has no dropout module") as e:
        vd.convert(net, vd.mc_dropout())
    assert str(e.value).count("give `drop_rate`") == 1
    assert len(str(e.value)) < 400


INSIDE = {
    "attention": (lambda: nn.MultiheadAttention(4, 2, dropout=0.5), 3),
    "lstm": (lambda: nn.LSTM(4, 4, 2, dropout=0.5), 1),
    "gru": (lambda: nn.GRU(4, 4, 2, dropout=0.5), 1),
    "rnn": (lambda: nn.RNN(4, 4, 2, dropout=0.5), 1),
}


@pytest.mark.parametrize("name", INSIDE)
def test_dropout_inside_torchs_functions_follows_the_switch(name, tmp_path):
    make, count = INSIDE[name]
    net, x = make().eval(), torch.randn(6, 5, 4)
    before = net(*[x] * count)[0]
    assert "dropout=0.5" in vd.plan(net, vd.mc_dropout()).changes[0].becomes
    vd.convert(net, vd.mc_dropout())
    assert torch.equal(net(*[x] * count)[0], before)
    with vd.sampling(net):
        assert not torch.equal(net(*[x] * count)[0], net(*[x] * count)[0])
        with evaluating(net):  # leaves the mode as it was, not as the switch has it
            pass
    assert torch.equal(net(*[x] * count)[0], before)
    with vd.sampling(net.train(), False):
        assert torch.equal(net(*[x] * count)[0], net(*[x] * count)[0])
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert type(other) is type(net)
        assert torch.equal(other.eval()(*[x] * count)[0], before)
    vd.save_noisy(net, tmp_path / "net.safetensors")
    assert type(vd.load_noisy(tmp_path / "net.safetensors", make())) is type(net)
    wrong = make()
    wrong.dropout = 0.25
    with pytest.raises(
        vd.VardropError, match=r"the rates of '' are \{'dropout': 0.25\}, in the file"
    ):
        vd.load_noisy(tmp_path / "net.safetensors", wrong)
    assert type(vd.revert(net)) is type(make())
    assert torch.equal(net.eval()(*[x] * count)[0], before)


def test_layers_inside_a_switched_module_are_converted_too():
    net = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True)
    vd.convert(net, vd.mc_dropout())
    vd.convert(net, vd.sparse_vd())
    kinds = {name: type(m).__name__ for name, m in net.named_modules()}
    assert kinds["self_attn"] == "SwitchedMultiheadAttention"
    assert type(net.linear1) is vd.Linear
    assert type(net.dropout) is vd.gates.Dropout


@pytest.mark.parametrize("name", ["lstm", "gru", "rnn"])
def test_dropout_between_noisy_recurrent_layers_is_drawn_with_their_weights(name):
    net = vd.convert(INSIDE[name][0](), vd.bayes_by_backprop(log_sigma2=-60.0)).eval()
    x = torch.randn(6, 5, 4)
    with vd.sampling(net):
        assert not torch.allclose(net(x)[0], net(x)[0])
    assert torch.equal(net(x)[0], net(x)[0])


def test_a_subclass_of_torchs_attention_is_not_claimed():
    class Own(nn.MultiheadAttention):
        pass

    assert "runs inside one torch function" in reasons(nn.Sequential(Own(4, 2, dropout=0.5)))["0"]


def test_a_rate_of_zero_is_no_dropout():
    net = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.0), nn.Dropout(0.5))
    assert "its rate is 0" in reasons(net)["1"]
    without = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.0))
    with pytest.raises(vd.VardropError, match="no dropout module that draws; give `drop_rate`"):
        vd.convert(without, vd.mc_dropout())
    assert type(vd.convert(without, vd.mc_dropout(0.5))[0]) is vd.Linear


def test_a_function_is_not_drawn_where_code_draws_for_every_call():
    net = vd.convert(nn.LSTM(4, 4, 2, dropout=0.5), vd.mc_dropout())
    with pytest.raises(
        vd.VardropError, match="dropout inside SwitchedLSTM, which draws in every call"
    ):
        vd.draw(net)


@pytest.mark.parametrize("name", ["attention", "lstm"])
def test_a_function_is_not_drawn_without_the_dropout_inside_noisy_layers(name):
    net = vd.convert(INSIDE[name][0](), vd.bayes_by_backprop())
    with pytest.raises(vd.VardropError, match="dropout inside .*, which draws in every call"):
        vd.draw(net)


def test_the_switch_of_code_is_seen_by_the_compiler():
    net = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True)
    vd.convert(net, vd.mc_dropout(), where="self_attn").eval()
    compiled = torch.compile(net, backend="eager", fullgraph=True)
    x = torch.randn(2, 3, 8)
    with vd.sampling(net):
        assert not torch.equal(compiled(x), compiled(x))
    assert torch.equal(compiled(x), compiled(x))
    torch.testing.assert_close(compiled(x), net(x))
