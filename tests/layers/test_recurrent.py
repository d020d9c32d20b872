"""Recurrent layers: one draw of the weights per call, on torch's own kernels."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

import vardrop as vd
from tests.nets import Parts, assert_unchanged, reload
from tests.refusals import assert_refused

LAYERS = {
    "rnn": lambda: nn.RNN(4, 3, 2, nonlinearity="relu", bidirectional=True),
    "gru": lambda: nn.GRU(4, 3, 2, batch_first=True, bidirectional=True),
    "lstm": lambda: nn.LSTM(4, 5, 2, bias=False),
    "projected": lambda: nn.LSTM(4, 5, proj_size=2, batch_first=True),
}
CELLS = {"rnn": lambda: nn.RNNCell(4, 3), "gru": lambda: nn.GRUCell(4, 3, bias=False)}
CELLS["lstm"] = lambda: nn.LSTMCell(4, 3)
ALL = {**LAYERS, **{f"{name} cell": make for name, make in CELLS.items()}}
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")


def flat(output):
    return [output] if isinstance(output, torch.Tensor) else [t for o in output for t in flat(o)]


def inputs(name):
    return torch.randn((6, 4) if "cell" in name else (6, 7, 4)).double()


@pytest.mark.parametrize("recipe", [vd.bayes_by_backprop(log_sigma2=-2.0), vd.sparse_vd()])
@pytest.mark.parametrize("name", ALL)
def test_a_draw_is_the_torch_layer_of_the_drawn_weights(name, recipe):
    noisy, x = vd.convert(ALL[name]().double(), recipe), inputs(name)
    tensors = noisy.noisy_tensors()
    noise = {key: tensor.draw() for key, tensor in tensors.items()}
    plain = vd.revert(copy.deepcopy(noisy))
    for key, tensor in tensors.items():
        getattr(plain, key).data.copy_(tensor.sample(noise[key]))
    both = flat(noisy(x, noise=noise)), flat(plain(x))
    torch.testing.assert_close(*both, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ALL)
def test_every_sequence_of_a_call_sees_one_draw(name):
    noisy = vd.convert(ALL[name]().double(), vd.bayes_by_backprop(log_sigma2=-1.0)).train()
    x, axis = inputs(name), 0 if "cell" in name or getattr(noisy, "batch_first", False) else 1
    one = x.narrow(axis, 0, 1)
    both = flat(noisy(torch.cat([one, one], axis)))[0]
    torch.testing.assert_close(both.narrow(axis, 0, 1), both.narrow(axis, 1, 1))
    assert not torch.equal(flat(noisy(one))[0], flat(noisy(one))[0])


@pytest.mark.parametrize("name", LAYERS)
def test_packed_sequences_and_initial_states(name):
    noisy = vd.convert(LAYERS[name](), vd.sparse_vd(log_sigma2=-30.0))
    plain = vd.revert(copy.deepcopy(noisy))
    packed, x = pack_sequence([torch.randn(n, 4) for n in (5, 3, 2)]), torch.randn(6, 6, 4)
    near = {"rtol": 1e-3, "atol": 1e-4}
    torch.testing.assert_close(noisy(packed)[0].data, plain(packed)[0].data, **near)
    _, state = plain(x)
    torch.testing.assert_close(flat(noisy(x, state)), flat(plain(x, state)), **near)


def test_drawing_leaves_the_layer_as_it_is():
    noisy = vd.convert(nn.LSTM(4, 3), vd.sparse_vd()).train()
    before = [*noisy.parameters(), *noisy._flat_weights]
    with assert_unchanged(noisy):
        noisy(torch.randn(5, 2, 4))
    after = [*noisy.parameters(), *noisy._flat_weights]
    assert all(a is b for a, b in zip(after, before, strict=True))


def classifier():
    run = lambda net, words: net.last(net.lstm(net.embed(words))[0][:, -1])
    layers = {"embed": nn.Embedding(11, 6), "lstm": nn.LSTM(6, 5, batch_first=True)}
    return Parts(run, **layers, last=nn.Linear(5, 3))


def test_a_net_with_a_recurrent_layer_is_reported_drawn_and_saved(tmp_path):
    words, net = torch.randint(11, (8, 6)), vd.convert(classifier(), vd.sparse_vd())
    assert {"lstm.weight_ih_l0", "lstm.weight_hh_l0", "embed", "last"} == set(vd.log_alpha(net))
    before, drawn = net.eval()(words), vd.draw(net, seed=0)
    assert type(drawn.lstm) is nn.LSTM
    assert torch.equal(drawn(words), drawn(words))
    assert not torch.equal(drawn(words), before)
    assert torch.equal(reload(net, classifier(), tmp_path).eval()(words), before)


# ---- masks per sequence


GATES = [vd.recurrent_dropout(0.4), vd.recurrent_dropout(0.4, learned=True), vd.beta_bernoulli()]


@pytest.mark.parametrize("recipe", GATES, ids=repr)
@pytest.mark.parametrize("name", LAYERS)
def test_a_mask_is_one_set_of_weights_per_sequence(name, recipe):
    """Masks on inputs and state are masks on the columns of the weights, one per sequence."""
    noisy, x, masks = vd.convert(LAYERS[name]().double(), recipe).train(), inputs(name), []
    noisy.gate.register_forward_hook(lambda module, args, output: masks.append(output.detach()))
    found, axis = flat(noisy(x)), 0 if noisy.batch_first else 1
    assert masks[0].shape == (x.shape[axis], noisy.gate.units)
    assert len({tuple(m.tolist()) for m in masks[0]}) > 1
    for row, mask in enumerate(masks[0]):
        plain, state = LAYERS[name]().double(), noisy.state_dict()
        plain.load_state_dict({k: state[k] for k in plain.state_dict()})
        for key, weight in noisy.gated_weights().items():
            getattr(plain, key).data.copy_(weight * noisy.per_feature(mask, key))
        expected = flat(plain(x.narrow(axis, row, 1)))
        torch.testing.assert_close(found[0].narrow(axis, row, 1), expected[0])
        torch.testing.assert_close([a[:, row : row + 1] for a in found[1:]], expected[1:])


@pytest.mark.parametrize("name", LAYERS)
def test_masks_of_unbatched_sequences_and_given_states(name):
    noisy = vd.convert(LAYERS[name]().double(), vd.recurrent_dropout(0.0)).train()
    plain, x = vd.revert(copy.deepcopy(noisy)), inputs(name)
    torch.testing.assert_close(flat(noisy(x[:, 0])), flat(plain(x[:, 0])))
    _, state = plain(x)
    torch.testing.assert_close(flat(noisy(x, state)), flat(plain(x, state)))


def test_where_masks_go():
    plan = vd.plan(classifier(), vd.recurrent_dropout())
    assert [s.name for s in plan.changes] == ["lstm"]
    reasons = {s.name: s.reason for s in plan.skips}
    assert reasons["last"] == "one mask per sequence is for recurrent layers"
    assert_refused("a cell runs one step", vd.convert, nn.LSTMCell(4, 3), vd.recurrent_dropout())
    assert_refused("cannot depend on the input", vd.convert, nn.LSTM(4, 3), vd.standout())
    noisy = vd.convert(nn.LSTM(4, 3), vd.recurrent_dropout()).train()
    assert_refused("padded tensor.*PackedSequence", noisy, pack_sequence([torch.randn(3, 4)]))
    assert noisy.eval()(pack_sequence([torch.randn(3, 4)]))[0].data.shape == (3, 3)
