"""Heads of attention that are dead are cut out, whatever is around them."""

import pytest
import torch
from torch import nn

import vardrop as vd
from tests.compression.nets import Classifier, check_cut
from tests.refusals import assert_refused
from vardrop.compression import zero_pruned_weights
from vardrop.compression.modules.pruned_attention import SlimAttention


def sentences():
    x = torch.randint(1, 20, (4, 6), generator=torch.Generator().manual_seed(0))
    x[0, 4:] = 0
    x[2, 2:] = 0
    return x


@torch.no_grad()
def close_gates(net, *units):
    """Shut some units of every gate, and open the others."""
    for gate in (m for m in net.modules() if isinstance(m, vd.Gate)):
        gate.logit.fill_(5.0)
        gate.logit[list(units)] = -20.0


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("pool", ["mean", "first"])
def test_an_encoder_loses_heads_and_units_and_is_read_again(norm_first, pool, tmp_path):
    net = Classifier(norm_first, pool)
    vd.convert(net, vd.l0(), include="*self_attn")
    vd.convert(net, vd.l0(), include="*linear2")
    close_gates(net, 1)
    x = sentences()
    small, plan = vd.shrink(net, x)
    layer = small.encoder.layers[0]
    assert isinstance(layer.self_attn, SlimAttention)
    assert (layer.self_attn.num_heads, layer.self_attn.heads.tolist()) == (3, [0, 2, 3])
    assert (layer.linear1.out_features, layer.linear2.in_features) == (19, 19)
    assert "'encoder.layers.1.self_attn' keeps 3 of 4 heads." in plan.notes
    assert "Equal on the example and on 5 random inputs" in plan.proof
    torch.testing.assert_close(small(x), net.eval()(x))
    vd.save(small, tmp_path / "small.safetensors")
    again = vd.load(tmp_path / "small.safetensors", into=Classifier(norm_first, pool))
    assert torch.equal(again(x), small(x))
    vd.pack(vd.Shrunk(small, plan), tmp_path / "small.vdp")
    rounded = vd.unpack(tmp_path / "small.vdp", into=Classifier(norm_first, pool))
    assert [p.shape for p in rounded.parameters()] == [p.shape for p in small.parameters()]
    assert rounded.encoder.layers[1].self_attn.heads.tolist() == [0, 2, 3]


GATES = (vd.l0, vd.beta_bernoulli, vd.structured_pruning, vd.bayesian_compression)


@pytest.mark.parametrize("method", GATES)
def test_every_kind_of_gate_takes_heads_and_units_out(method):
    net, x = Classifier(), sentences()
    vd.convert(net, method(), include="*self_attn")
    vd.convert(net, method(), include="*linear*")
    with torch.no_grad():
        for gate in (m for m in net.modules() if isinstance(m, vd.Gate)):
            for tensor in gate.parameters():
                tensor.add_(torch.randn_like(tensor))
    scores = {name: r.score for name, r in vd.relevance(net).items()}
    middle = {n: float(s.median()) for n, s in scores.items() if "attn" in n or "linear" in n}
    small = vd.shrink(net, x, threshold=middle).net
    for layer in small.encoder.layers:
        assert layer.self_attn.num_heads < 4
        assert layer.linear1.out_features < 20
    torch.testing.assert_close(small(x), zero_pruned_weights(net, middle)[0](x))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_encoder_that_keeps_its_heads_keeps_torchs_attention_and_its_fused_path(tmp_path):
    net, x = Classifier().eval(), sentences()
    for layer in net.encoder.layers:
        layer.linear2.weight.data[:, ::2] = 0
    sizes = {"encoder.use_nested_tensor": True, "encoder.layers.0.linear1.out_features": 10}
    sizes["encoder.layers.0.activation_relu_or_gelu"] = 1
    small = check_cut(net, x, Classifier(), tmp_path / "small", sizes, x).net
    assert type(small.encoder.layers[0].self_attn) is nn.MultiheadAttention


def small_encoder():
    net, x = vd.convert(Classifier(), vd.l0(), include="*self_attn"), sentences()
    close_gates(net, 0)
    return vd.shrink(net, x).net, x


def test_a_small_encoder_is_a_program():
    small, x = small_encoder()
    torch.testing.assert_close(vd.export_program(small, x).module()(x[:3]), small(x[:3]))


@pytest.mark.slow
def test_a_small_encoder_is_exported(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    small, x = small_encoder()
    vd.export_onnx(small, x, tmp_path / "small.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "small.onnx")
    (found,) = session.run(None, {session.get_inputs()[0].name: x[:2].numpy()})
    torch.testing.assert_close(torch.from_numpy(found), small(x[:2]).detach())


class Decoder(nn.Module):
    def __init__(self, batch_first):
        super().__init__()
        self.enter = nn.Linear(5, 8)
        self.layer = nn.TransformerDecoderLayer(8, 4, 12, batch_first=batch_first)
        self.leave = nn.Linear(8, 3)

    def forward(self, target, memory):
        size = target.shape[1 if self.layer.self_attn.batch_first else 0]
        mask = nn.Transformer.generate_square_subsequent_mask(size)
        y = self.layer(self.enter(target), self.enter(memory), tgt_mask=mask, tgt_is_causal=True)
        return self.leave(y)


@pytest.mark.parametrize("batch_first", [False, True])
def test_a_decoder_loses_heads_of_both_attentions(batch_first):
    net = vd.convert(Decoder(batch_first), vd.l0(), include="layer.*_at*n")
    close_gates(net, 0, 3)
    inputs = torch.randn(3, 4, 5), torch.randn(3, 4, 5)
    small = vd.shrink(net, inputs).net
    assert small.layer.self_attn.heads.tolist() == [1, 2]
    assert small.layer.multihead_attn.heads.tolist() == [1, 2]
    torch.testing.assert_close(small(*inputs), net.eval()(*inputs))


class Attending(nn.Module):
    """One attention layer with whatever arguments."""

    def __init__(self, arguments, call):
        super().__init__()
        self.attention = nn.MultiheadAttention(12, 3, **arguments)
        self.leave, self.call = nn.Linear(12, 4), call

    def forward(self, query, other):
        return self.leave(self.attention(query, other, other, **self.call)[0])


MASKS = {
    "none": {}, "no weights": {"need_weights": False},
    "every head's weights": {"average_attn_weights": False},
    "padding": {"key_padding_mask": torch.tensor([[False] * 4 + [True], [False] * 5])},
    "additive": {"attn_mask": torch.randn(5, 5)}, "by head": {"attn_mask": torch.randn(6, 5, 5)},
    "by head, hidden": {"attn_mask": torch.eye(5).bool().expand(6, 5, 5), "need_weights": False},
}  # fmt: skip


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    "arguments", [{}, {"bias": False}, {"kdim": 12, "vdim": 12, "add_zero_attn": True}]
)
def test_slim_attention_is_torchs_without_some_heads(arguments, mask, batch_first):
    net = Attending({**arguments, "batch_first": batch_first}, MASKS[mask]).eval()
    net.attention.out_proj.weight.data[:, 4:8] = 0
    x = torch.randn(2, 5, 12) if batch_first else torch.randn(5, 2, 12)
    small = vd.shrink(net, (x, x.flip(0))).net
    assert small.attention.heads.tolist() == [0, 2]
    torch.testing.assert_close(small(x, x.flip(0)), net(x, x.flip(0)))


def test_keys_and_values_of_other_widths_and_single_sequences():
    layer = nn.MultiheadAttention(12, 3, kdim=5, vdim=7, dropout=0.2).eval()
    slim = SlimAttention(layer)
    for sizes in ((6, 2), (6,)):
        query, key, value = (torch.randn(*sizes, n) for n in (12, 5, 7))
        for average in (True, False):
            found = slim(query, key, value, average_attn_weights=average)
            expected = layer(query, key, value, average_attn_weights=average)
            torch.testing.assert_close(found, expected)
    again = slim.recompose()
    assert again.state_dict().keys() == layer.state_dict().keys()
    torch.testing.assert_close(again(query, key, value), layer(query, key, value))
    refused = "Expected `attn_mask` where `is_causal` is True"
    assert_refused(refused, slim, *(torch.randn(2, 2, n) for n in (12, 5, 7)), is_causal=True)


def test_heads_whose_weights_are_returned_stay():
    class Showing(Attending):
        def forward(self, query, other):
            y, weights = self.attention(query, other, other)
            return self.leave(y), weights

    net, x = Showing({}, {}), torch.randn(4, 2, 12)
    net.attention.out_proj.weight.data[:, :4] = 0
    small, plan = vd.shrink(net, (x, x))
    assert type(small.attention) is nn.MultiheadAttention
    assert all(r.before.outputs == r.after.outputs for r in plan.layers)


def test_attention_with_keys_of_its_own_stays_whole():
    net, x = Attending({"add_bias_kv": True}, {}), torch.randn(4, 2, 12)
    net.attention.out_proj.weight.data[:, :4] = 0
    assert type(vd.shrink(net, (x, x)).net.attention) is nn.MultiheadAttention


def test_one_head_stays_where_all_are_dead():
    net, x = Attending({}, {}), torch.randn(4, 2, 12)
    net.attention.in_proj_bias.data.normal_()
    net.attention.out_proj.weight.data.zero_()
    small = vd.shrink(net, (x, x)).net
    assert small.attention.num_heads == 1
    torch.testing.assert_close(small(x, x), net.eval()(x, x))


def test_sparse_attention_keeps_the_deviations_of_its_weights_for_pack(tmp_path):
    net, x = vd.convert(Attending({}, {}), vd.sparse_vd()), torch.randn(4, 2, 12)
    net.attention.out_proj.log_sigma2.data[:, :4] = 10.0
    small, plan = vd.shrink(net, (x, x))
    assert {n: d.shape for n, d in plan.standard_deviations.items()} == {
        n: p.shape for n, p in small.named_parameters() if n.endswith("weight")
    }
    vd.pack(vd.Shrunk(small, plan), tmp_path / "small.vdp")
    net.attention.out_proj.log_sigma2.data.fill_(-10.0)
    whole = vd.shrink(net, (x, x))
    assert "attention.in_proj_weight" in whole.plan.standard_deviations
    vd.pack(whole, tmp_path / "whole.vdp")


def test_a_file_with_slim_attention_needs_attention_to_be_read_into(tmp_path):
    net, x = Attending({}, {}), torch.randn(4, 2, 12)
    net.attention.out_proj.weight.data[:, :4] = 0
    vd.save(vd.shrink(net, (x, x)).net, tmp_path / "small.safetensors")
    other = Attending({}, {})
    other.attention = nn.Linear(12, 12)
    refused = "'attention' of `into` to be nn.Multihead"
    assert_refused(refused, vd.load, tmp_path / "small.safetensors", into=other)
