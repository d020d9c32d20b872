"""Text from one function of the posterior: the same noise for every word of a sequence."""

import pytest
import torch
from torch import nn

import vardrop as vd
from tests.refusals import assert_refused
from vardrop.prediction.functions import FixedNoise

pytest.importorskip("transformers")

from tests.integrations.models import MODELS

RECIPES = {
    "weights": vd.bayes_by_backprop(log_sigma2=-3.0),
    "gates": vd.concrete_dropout(0.3),
    "gates on outputs": vd.structured_pruning(log_sigma=-0.5),
    "one factor per example": vd.Recipe(gate=vd.GaussianDropout(per="layer", granularity="example")),
    "dropout": vd.mc_dropout(),
}  # fmt: skip


def without_attention_dropout(model):
    for module in model.modules():
        for name in ("attention_dropout", "dropout", "attn_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
        if hasattr(module, "attn_dropout"):
            module.attn_dropout.p = 0.0
    return model


def noisy(name, recipe):
    torch.manual_seed(0)
    model = without_attention_dropout(MODELS[name]())
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
    held.redraw()
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
