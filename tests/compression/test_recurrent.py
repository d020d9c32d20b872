"""Units of recurrent layers that are dead are cut out, and torch's layers come back."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence
from torch.utils._pytree import tree_leaves

import vardrop as vd
from tests.compression.nets import check_cut
from tests.layers.test_recurrent import LAYERS
from tests.refusals import assert_refused
from vardrop.compression.modules.pruned_recurrent import Unrolled

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")


def numbers(output):
    return [t if isinstance(t, torch.Tensor) else t.data for t in tree_leaves(output)]


@pytest.mark.parametrize("name", LAYERS)
def test_an_unrolled_layer_is_torchs_and_comes_back(name):
    layer = LAYERS[name]()
    packed = pack_sequence([torch.randn(n, 4) for n in (3, 5, 2)], enforce_sorted=False)
    for x in (torch.randn(6, 7, 4), torch.randn(7, 4), packed):
        for other in (Unrolled(layer), Unrolled(layer).recompose()):
            found, expected = numbers(other(x)), numbers(layer(x))
            assert len(found) == len(expected)
            for a, b in zip(found, expected, strict=True):
                torch.testing.assert_close(a, b)
    assert type(Unrolled(layer).recompose()) is type(layer)


class Reader(nn.Module):
    """Words, a recurrent layer and a dense one on what is asked for."""

    def __init__(self, kind=nn.LSTM, take="last", **arguments):
        super().__init__()
        self.words = nn.Embedding(20, 6)
        self.layer = kind(6, 8, batch_first=True, **arguments)
        width = (self.layer.proj_size or 8) * (1 + self.layer.bidirectional)
        self.head, self.take = nn.Linear(width, 2), take

    def forward(self, x):
        words = self.words(x)
        if self.take == "packed":
            lengths = (x > 0).sum(1).clamp(min=1)
            words = pack_padded_sequence(words, lengths, batch_first=True, enforce_sorted=False)
        y, state = self.layer(words)
        if self.take in ("state", "packed"):
            return self.head((state[0] if isinstance(state, tuple) else state)[-1])
        return self.head(y[:, -1] if self.take == "last" else y)


def example():
    x = torch.randint(1, 20, (3, 5), generator=torch.Generator().manual_seed(0))
    x[1, 3:] = 0
    return x


@torch.no_grad()
def kill(net, *units):
    """Let nothing but themselves and each other read these units of every layer and direction."""
    layer, size = net.layer, 8
    blocks = range(0, net.head.in_features, size)
    net.head.weight[:, [b + u for b in blocks for u in units]] = 0
    for name, weight in layer.named_parameters():
        if name.startswith("weight_hh"):
            others = [i for i in range(len(weight)) if i % size not in units]
            for unit in units:
                weight[others, unit] = 0
        elif name.startswith("weight_ih") and "_l0" not in name:
            weight[:, [b + u for b in range(0, weight.shape[1], size) for u in units]] = 0


KINDS = {
    "lstm": {}, "gru": {"kind": nn.GRU}, "rnn": {"kind": nn.RNN, "nonlinearity": "relu"},
    "layers": {"num_layers": 2}, "directions": {"bidirectional": True},
    "both": {"kind": nn.GRU, "num_layers": 2, "bidirectional": True},
    "every step": {"take": "steps"}, "last state": {"take": "state"}, "packed": {"take": "packed"},
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_units_that_nothing_else_reads_go_and_the_net_is_read_again(name, tmp_path):
    net, x = Reader(**KINDS[name]).eval(), example()
    kill(net, 1, 4)
    with torch.no_grad():  # nothing reads one dimension of the words either
        for key, weight in net.layer.named_parameters():
            if key.startswith("weight_ih_l0"):
                weight[:, 2] = 0
    sizes = {"layer.input_size": 5, "layer.hidden_size": 6, "words.embedding_dim": 5}
    longer, into = torch.cat([x, x], 1), Reader(**KINDS[name])
    small, plan = check_cut(net, x, into, tmp_path / "small", sizes, longer)
    assert type(small.layer) is type(net.layer)
    assert plan.total("macs")[1] < 0.8 * plan.total("macs")[0]


def test_layers_of_one_size_keep_as_many_units_each():
    net, x = Reader(num_layers=2).eval(), example()
    kill(net, 0)
    net.head.weight.data[:, 1] = 0
    net.layer.weight_hh_l1.data[:, 1] = 0
    small, plan = vd.shrink(net, x)
    assert small.layer.hidden_size == 7
    assert "1 units stay to keep layers of equal width." in plan.notes


def test_units_of_a_projected_state_stay(tmp_path):
    net, x = Reader(proj_size=4).eval(), example()
    with torch.no_grad():
        net.layer.weight_hr_l0[:, :3] = 0
    sizes = {"layer.hidden_size": 8, "layer.proj_size": 4}
    plan = check_cut(net, x, Reader(proj_size=4), tmp_path / "small", sizes, x).plan
    assert "'layer' projects its state" in str(plan)


@torch.no_grad()
def silence(net, unit, value):
    """Give a unit no inputs, and a constant new value at every step."""
    for name, tensor in net.layer.named_parameters():
        if not name.startswith("weight_hr"):
            tensor[unit::8] = 0
    net.layer.bias_ih_l0[16 + unit] = value


@pytest.mark.parametrize("value, read_by_itself, left", [
    (0.0, True, 7), (1.0, True, 8), (1.0, False, 8),
])  # fmt: skip
def test_a_state_without_inputs_goes_only_where_it_is_zero(value, read_by_itself, left, tmp_path):
    net, x = Reader().eval(), example()
    silence(net, 3, value)
    if not read_by_itself:
        net.layer.weight_hh_l0.data[:, 3] = 0
    longer = torch.cat([x, x], 1)
    check_cut(net, x, Reader(), tmp_path / "small", {"layer.hidden_size": left}, longer)


def test_a_state_that_is_given_or_returned_stays():
    class Stateful(Reader):
        def forward(self, x, state):
            y, state = self.layer(self.words(x), (state, state))
            return self.head(y), state

    net, x = Stateful().eval(), example()
    kill(net, 1)
    assert vd.shrink(net, (x, torch.randn(1, 3, 8))).net.layer.hidden_size == 8


def test_one_step_tells_too_little():
    net = Reader().eval()
    kill(net, 1)
    small, plan = vd.shrink(net, example()[:, :1])
    assert small.layer.hidden_size == 8
    assert any("pass an example with two or more" in note for note in plan.notes)


def test_a_sparse_net_is_shrunk_and_packed(tmp_path):
    net, x = vd.convert(Reader(), vd.sparse_vd(), exclude="words"), example()
    with torch.no_grad():
        net.head.log_sigma2[:, 2] = 10.0
        net.layer.weight_hh_l0_log_sigma2[:, 2] = 10.0
        net.layer.weight_ih_l0_log_sigma2[:, 0] = 10.0
    small, plan = vd.shrink(net, x)
    assert (small.layer.input_size, small.layer.hidden_size) == (5, 7)
    assert plan.standard_deviations["layer.weight_hh_l0"].shape == (28, 7)
    vd.pack(vd.Shrunk(small, plan), tmp_path / "small.vdp")
    assert vd.unpack(tmp_path / "small.vdp", into=Reader()).layer.hidden_size == 7


def test_gates_on_inputs_and_state_take_units_out():
    net, x = vd.convert(Reader(), vd.l0(), exclude="words"), example()
    with torch.no_grad():
        net.head.gate.logit.fill_(5.0)[5] = -20.0
        net.layer.gate.logit.fill_(5.0)[[0, 6 + 5]] = -20.0
    small = vd.shrink(net, x).net
    assert (small.layer.input_size, small.layer.hidden_size) == (5, 7)


def test_a_file_with_a_recurrent_layer_needs_one_to_be_read_into(tmp_path):
    net = Reader().eval()
    kill(net, 1)
    vd.save(vd.shrink(net, example()).net, tmp_path / "small.safetensors")
    other = Reader()
    other.layer = nn.Linear(6, 8)
    refused = "'layer' of `into` to be nn.RNN or nn.LSTM"
    assert_refused(refused, vd.load, tmp_path / "small.safetensors", into=other)
    narrow = Reader()
    narrow.layer = nn.LSTM(6, 5, batch_first=True)
    assert_refused("from 1 to 5, but got 7", vd.load, tmp_path / "small.safetensors", into=narrow)
