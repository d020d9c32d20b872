"""Text from one function of the posterior: the same noise for every word of a sequence."""

from functools import partial

import pytest
import torch
from torch import nn

import vardrop as vd
from tests.integrations.models import MODELS, batch_of, make, one_row
from tests.refusals import assert_refused, unchanged
from vardrop.prediction.functions import FixedNoise

RECIPES = {
    "weights": vd.bayes_by_backprop(log_sigma2=-3.0),
    "gates": vd.concrete_dropout(0.3),
    "gates on outputs": vd.structured_pruning(log_sigma=-0.5),
    "one factor per example": vd.Recipe(gate=vd.GaussianDropout(per="layer", granularity="example")),
    "dropout": vd.mc_dropout(),
}  # fmt: skip


def noisy(name, recipe):
    # Without dropout of attention, whose rate T5 has in common with other dropout.
    rates = {"gpt2": {"attn_pdrop": 0.0}, "llama": {"attention_dropout": 0.0}}
    model = make(name, **rates.get(name, {}))
    for module in model.modules():
        if isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0
    if name == "llama" and recipe == "dropout":  # which has no other
        return vd.convert(model, vd.mc_dropout(0.3))
    return vd.convert(model, RECIPES[recipe])


def text(model, **options):
    words = torch.randint(3, 64, (2, 4), generator=torch.Generator().manual_seed(1))
    size = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    more = {"output_logits": True, "return_dict_in_generate": True}
    given = {"input_ids": words, "attention_mask": torch.ones_like(words)}
    found = model.generate(**given, **size, **more, **options)
    return found.sequences, torch.stack(found.logits)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ["gpt2", *(pytest.param(n, marks=pytest.mark.slow) for n in ("t5", "llama"))])  # fmt: skip
def test_text_of_one_function(name, recipe):
    model = noisy(name, recipe)
    one, other = vd.draw(model, seed=0), vd.draw(model, seed=1)
    words, scores = text(one)
    for again in (text(one), text(vd.draw(model, seed=0))):
        assert torch.equal(again[0], words)
        assert torch.equal(again[1], scores)
    assert (text(other)[1] - scores).abs().max() > 1e-3
    uncached = text(one, use_cache=False)
    assert torch.equal(uncached[0], words)
    torch.testing.assert_close(uncached[1], scores, rtol=1e-4, atol=1e-5)


def test_text_of_one_function_is_what_the_function_says_of_the_whole():
    model = vd.draw(noisy("gpt2", "gates"), seed=0)
    words, scores = text(model)
    with torch.no_grad():
        whole = model(input_ids=words[:, :-1]).logits[:, 3:]
    torch.testing.assert_close(whole, scores.transpose(0, 1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("module", [
    vd.gates.Dropout(0.5),
    vd.Gate(vd.GaussianDropout(), 3),
    vd.Gate(vd.GaussianDropout(per="layer", granularity="example"), 3),
], ids=["dropout", "per element", "per example"])  # fmt: skip
def test_a_position_has_its_noise_in_whatever_piece_it_comes(module):
    held = FixedNoise(module)
    module.sampling = True
    held.seed = 3
    x = torch.randn(2, 200, 3)
    held.start = 0
    whole = held(x)
    for first, last in ((0, 1), (63, 65), (64, 200), (130, 131)):
        held.start = first
        torch.testing.assert_close(held(x[:, first:last]), whole[:, first:last])
    held.start, held.end = 100, 200
    torch.testing.assert_close(held(x[:, 199:]), whole[:, 199:])
    factors = whole / x
    alike = torch.isclose(factors[:, :64], factors[:, 64:128]).float().mean()
    assert alike == 1 if getattr(module, "noise", None) and module.noise.granularity == "example" else alike < 0.9  # fmt: skip


def test_dropout_of_attention_weights_is_no_function_of_a_sequence():
    model = vd.convert(MODELS["gpt2"](), vd.bayes_by_backprop())
    assert_refused(r"dropout inside GPT2Attention.*Set its `attn_dropout.p`", vd.draw, model)
    assert all(m.sampling is None for m in model.modules() if isinstance(m, nn.Linear))


# Language models whose head is their embedding: one weight, converted and shrunk as one.


qwen, gemma = (partial(make, name, attention_dropout=0.0) for name in ("qwen3", "gemma3"))


def batch():
    return {"input_ids": torch.randint(3, 60, (2, 7), generator=torch.Generator().manual_seed(0))}


def size(model):
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("tied", [qwen, gemma])
def test_a_tied_head_and_its_embedding_are_one_weight_after_shrinking(tied, tmp_path):
    model, x = vd.convert(tied().eval(), vd.sparse_vd()), batch()
    for name, module in model.named_modules():
        if name.endswith(("gate_proj", "up_proj")):
            module.log_sigma2.data[:8] = 8.0
    small, removed = vd.shrink(model, x).net, 2 * 3 * 8 * 32
    assert small.lm_head.weight is small.model.embed_tokens.weight
    assert size(small) == size(tied()) - removed
    with torch.no_grad():
        expected = small(**x).logits
        vd.save(small, tmp_path / "small.safetensors")
        again = vd.load(tmp_path / "small.safetensors", into=tied()).eval()
        assert again.lm_head.weight is again.model.embed_tokens.weight
        assert torch.equal(again(**x).logits, expected)


def test_a_head_that_loses_inputs_stays_tied():
    """An input that a head does not read is an entry that the embedding has all the same."""
    model, x = vd.convert(qwen().eval(), vd.sparse_vd()), batch()
    model.lm_head.weight.data[:, :4] = 0
    small = vd.shrink(model, x, drop_inputs=True).net
    assert small.lm_head.weight is small.model.embed_tokens.weight


def test_a_tied_weight_is_noisy_in_both_places_or_in_none():
    reasons = {s.name: s.reason for s in vd.plan(gemma(), vd.bayes_by_backprop()).skips}
    assert reasons["model.embed_tokens"] == "a subclass of Embedding with behaviour of its own"
    assert reasons["lm_head"] == "its weight is tied to 'model.embed_tokens', which stays plain"
    drawn = vd.draw(vd.convert(gemma(), vd.bayes_by_backprop(log_sigma2=-4.0)), seed=0)
    assert drawn.lm_head.weight is drawn.model.embed_tokens.weight
    both = vd.convert(qwen(), vd.bayes_by_backprop(log_sigma2=-4.0))
    assert both.lm_head.log_sigma2 is both.model.embed_tokens.log_sigma2
    drawn = vd.draw(both, seed=0)
    assert torch.equal(drawn.lm_head.weight, drawn.model.embed_tokens.weight)
    assert not torch.equal(drawn.lm_head.weight, both.lm_head.weight)


def test_a_head_with_a_plain_embedding_cannot_be_chosen():
    with pytest.raises(vd.VardropError, match="'lm_head' .*: its weight is tied to 'model.embed_"):
        vd.convert(gemma(), vd.bayes_by_backprop(), include="lm_head")
    gated = vd.plan(gemma(), vd.concrete_dropout(), include="lm_head")  # not on the weight
    assert [s.name for s in gated.changes] == ["lm_head"]


# Bad input to models of transformers: a clear error, and the net as it was.


Y = torch.zeros(3, dtype=torch.long)


def noisy_bad(name="bert"):
    return vd.convert(MODELS[name](), vd.bayes_by_backprop())


def both_refuse(net, batch, match, **options):
    """`predict` and the ELBO, with the net unchanged."""
    elbo = vd.ELBO(net, vd.Categorical(), num_data=10, **options)
    with unchanged(net, match=match):
        vd.predict(net, batch, samples=2, **options)
    with unchanged(net, match=match):
        elbo(batch, Y)


def test_rows_of_different_length():
    short = {**batch_of("bert"), "attention_mask": torch.ones(2, 7, dtype=torch.long)}
    told = "tensors of `x` to have one number of examples, but got"
    both_refuse(noisy_bad(), short, f"{told} 2 and 3")
    ragged = {"input_ids": [torch.ones(n, dtype=torch.long) for n in (3, 4, 4)]}
    both_refuse(noisy_bad(), ragged, f"{told} 3 and 4")
    both_refuse(noisy_bad(), {"input_ids": [[1, 2, 3], [1, 2], [1]]}, "Expected .* to be .*tensors")


@pytest.mark.parametrize("name", ["bert", "distilbert", "gpt2", "t5", "llama"])
def test_a_mask_that_hides_everything(name):
    batch = batch_of(name)
    batch["attention_mask"][1] = 0
    match = "`attention_mask` to leave a token in every row, but got one that hides all of row 1"
    both_refuse(noisy_bad(name), batch, match, output=one_row)


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
    for include, match in {
        "*.attention.self": r"`include` selects 'bert.encoder.layer.0.attention.self' \(BertSelfAttention\), .* without weights or heads of their own.* Name the layers inside",
        "*.word_embeddings": "an index has no features to gate",
        "*.LayerNorm": "no weights that can be noisy",
        nn.MultiheadAttention: "not selected by `include`",
    }.items():
        with unchanged(net, match=match):
            vd.convert(net, vd.l0(), include=include)
