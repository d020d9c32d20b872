"""Bad input to models of transformers: a clear error, and the net as it was."""

import pytest
import torch
from torch import nn

import vardrop as vd
from tests.refusals import assert_refused
from vardrop.likelihoods import Categorical

pytest.importorskip("transformers")


from tests.integrations.models import MODELS, batch_of, one_row

Y = torch.zeros(3, dtype=torch.long)


def noisy(name="bert"):
    return vd.convert(MODELS[name](), vd.bayes_by_backprop())


def snapshot(net):
    state = {k: v.clone() for k, v in net.state_dict().items()}
    return state, {n: (type(m), m.training) for n, m in net.named_modules()}


def both_refuse(net, batch, match, **options):
    """`predict` and the ELBO, with the net unchanged."""
    state, modules = snapshot(net)
    elbo = vd.ELBO(net, Categorical(), num_data=10, **options)
    assert_refused(match, vd.predict, net, batch, samples=2, **options)
    assert_refused(match, elbo, batch, Y)
    now, kinds = snapshot(net)
    assert kinds == modules
    assert all(torch.equal(v, state[k]) for k, v in now.items())


def test_rows_of_different_length():
    short = {**batch_of("bert"), "attention_mask": torch.ones(2, 7, dtype=torch.long)}
    both_refuse(noisy(), short, "tensors of `x` to have one number of examples, but got 2 and 3")
    ragged = {"input_ids": [torch.ones(n, dtype=torch.long) for n in (3, 4, 4)]}
    both_refuse(noisy(), ragged, "tensors of `x` to have one number of examples, but got 3 and 4")
    both_refuse(noisy(), {"input_ids": [[1, 2, 3], [1, 2], [1]]}, "Expected .* to be .*tensors")


@pytest.mark.parametrize("name", ["bert", "distilbert", "gpt2", "t5", "llama"])
def test_a_mask_that_hides_everything(name):
    batch = batch_of(name)
    batch["attention_mask"][1] = 0
    match = "`attention_mask` to leave a token in every row, but got one that hides all of row 1"
    both_refuse(noisy(name), batch, match, output=one_row)


@pytest.mark.parametrize("hidden", [True, float("-inf")])
@pytest.mark.parametrize("name", ["key_padding_mask", "attn_mask"])
def test_a_mask_of_torchs_attention_that_hides_everything(name, hidden):
    layer = vd.convert(nn.MultiheadAttention(8, 2, batch_first=True), vd.bayes_by_backprop())
    x, mask = torch.randn(2, 3, 8), torch.zeros(2 if name == "key_padding_mask" else 3, 3)
    mask = mask.bool() if hidden is True else mask
    mask[1] = hidden
    for on in (True, False):
        with vd.sampling(layer, on), pytest.raises(vd.VardropError, match=f"`{name}` to leave a key in every sequence, but got one that hides all of row 1"):  # fmt: skip
            layer(x, x, x, **{name: mask})


def test_a_gate_on_a_layer_without_heads():
    net = MODELS["bert"]()
    state, modules = snapshot(net)
    match = r"`include` selects 'bert.encoder.layer.0.attention.self' \(BertSelfAttention\), .* without weights or heads of their own.* Name the layers inside"
    assert_refused(match, vd.convert, net, vd.l0(), include="*.attention.self")
    with pytest.raises(vd.VardropError, match="an index has no features to gate"):
        vd.convert(net, vd.l0(), include="*.word_embeddings")
    assert_refused("no weights that can be noisy", vd.convert, net, vd.l0(), include="*.LayerNorm")
    assert_refused(
        "not selected by `include`", vd.convert, net, vd.l0(), include=nn.MultiheadAttention
    )
    now, kinds = snapshot(net)
    assert kinds == modules
    assert all(torch.equal(v, state[k]) for k, v in now.items())
