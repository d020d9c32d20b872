"""Language models whose head is their embedding: one weight, converted and shrunk as one."""

import pytest
import torch

import vardrop as vd

pytest.importorskip("transformers")

import transformers

SIZE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0,
    "tie_word_embeddings": True,
}  # fmt: skip


def qwen():
    torch.manual_seed(0)
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZE)).eval()


def gemma():
    torch.manual_seed(0)
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**SIZE)).eval()


def batch():
    return {"input_ids": torch.randint(3, 60, (2, 7), generator=torch.Generator().manual_seed(0))}


def size(model):
    return sum(p.numel() for p in model.parameters())


def without_units(model, count=8):
    """Let feed-forward units of a model with sparse VD be noise alone."""
    with torch.no_grad():
        for name, module in model.named_modules():
            if name.endswith(("gate_proj", "up_proj")):
                module.log_sigma2[:count] = 8.0
    return model


@pytest.mark.parametrize("make", [qwen, gemma])
def test_a_tied_head_and_its_embedding_are_one_weight_after_shrinking(make, tmp_path):
    model, x = without_units(vd.convert(make(), vd.sparse_vd())), batch()
    shrunk, removed = vd.shrink(model, x), 2 * 3 * 8 * SIZE["hidden_size"]
    for small in (shrunk.plan.apply(model), shrunk.net):
        assert small.lm_head.weight is small.model.embed_tokens.weight
        assert size(small) == size(make()) - removed
    with torch.no_grad():
        expected = small(**x).logits
        vd.save(small, tmp_path / "small.safetensors")
        again = vd.load(tmp_path / "small.safetensors", into=make()).eval()
        assert again.lm_head.weight is again.model.embed_tokens.weight
        assert torch.equal(again(**x).logits, expected)


def test_a_head_that_loses_inputs_stays_tied():
    """An input that a head does not read is an entry that the embedding has all the same."""
    model, x = vd.convert(qwen(), vd.sparse_vd()), batch()
    model.lm_head.weight.data[:, :4] = 0
    small = vd.shrink(model, x, drop_inputs=True).net
    assert small.lm_head.weight is small.model.embed_tokens.weight


def test_a_gate_that_differs_unties_the_head():
    model, x = vd.convert(qwen(), vd.concrete_dropout()), batch()
    small, plan = vd.shrink(model, x)
    assert small.lm_head.weight is not small.model.embed_tokens.weight
    assert "'lm_head' gets separate weights: its gate is folded in." in plan.notes


def test_a_tied_weight_is_noisy_in_both_places_or_in_none():
    plan = vd.plan(gemma(), vd.bayes_by_backprop())
    reasons = {s.name: s.reason for s in plan.skips}
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
