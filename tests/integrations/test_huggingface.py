"""Models of transformers: what plan says, the recipes, files."""

import copy
import pickle
import subprocess
import sys

import pytest
import torch

import vardrop as vd
from vardrop.noisy import Noisy, noisy_modules
from vardrop.testing import check_layer

pytest.importorskip("transformers")

from tests.integrations.models import MODELS, batch_of

RECIPES = {
    "sparse_vd": vd.sparse_vd(),
    "bayes_by_backprop": vd.bayes_by_backprop(),
    "mc_dropout": vd.mc_dropout(),
    "concrete_dropout": vd.concrete_dropout(),
    "beta_bernoulli": vd.beta_bernoulli(),
    "l0": vd.l0(),
}
EVERY = [(m, r) for m in MODELS for r in RECIPES]


def tied_heads(name, recipe):
    """A gate cannot be folded into a weight that the embedding has too, so none is put there."""
    gated = getattr(RECIPES[recipe], "gate", None) is not None
    return "lm_head" if gated and name in ("gpt2", "t5") else None


def noisy(name, recipe):
    torch.manual_seed(0)
    return vd.convert(MODELS[name](), RECIPES[recipe], exclude=tied_heads(name, recipe)).eval()


def logits(model, batch):
    with torch.no_grad():
        return model(**batch).logits


@pytest.mark.parametrize(
    "recipe",
    [
        vd.sparse_vd(),
        vd.bayesian_compression(),
        vd.l0(),
        vd.structured_pruning(),
        vd.Recipe(vd.AdditiveGaussian(), vd.Normal(), vd.flipout, noisy_bias=True),
        vd.Recipe(vd.AdditiveGaussian(), vd.Normal(), vd.per_example),
        vd.Recipe(vd.MultiplicativeGaussian(per="output"), vd.LogUniform(), vd.weight_sample),
    ],
    ids=lambda r: (
        f"{type(r.posterior).__name__}-{type(r.gate).__name__}-{type(r.estimator).__name__}"
    ),
)
def test_conv1d_keeps_the_contract_of_layers(recipe):
    from transformers.pytorch_utils import Conv1D

    check_layer(lambda: Conv1D(3, 4), (torch.randn(5, 4),), recipe)


def test_conv1d_of_a_row_and_of_sequences():
    from transformers.pytorch_utils import Conv1D

    plain, x = Conv1D(3, 4), torch.randn(2, 5, 4)
    layer = vd.convert(copy.deepcopy(plain), vd.bayes_by_backprop())
    with vd.sampling(layer, False):
        assert torch.equal(layer(x), plain(x))
        assert torch.equal(layer(x[0, 0]), plain(x[0, 0]))
    assert layer(x[0, 0]).shape == (3,)


def test_layers_of_transformers_are_known_without_an_import():
    code = (
        "import vardrop as vd\n"
        "from transformers.pytorch_utils import Conv1D\n"
        "print(vd.plan(Conv1D(3, 4), vd.sparse_vd()).changes[0].becomes)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "vardrop.integrations.huggingface.Conv1D\n"


def of_one_module(model, module, batch):
    """Two outputs with the noise of one module alone, or of its weights where these are tied."""
    weights = {id(p) for p in module.parameters(recurse=False)}
    for m in noisy_modules(model).values():
        m.sampling = not weights.isdisjoint(id(p) for p in m.parameters(recurse=False))
    for m in module.modules() if module.encloses else (module,):
        m.sampling = True
    return logits(model, batch), logits(model, batch)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("recipe", ["mc_dropout", "bayes_by_backprop", "concrete_dropout"])
@pytest.mark.parametrize("name", MODELS)
def test_what_plan_says_is_noisy_draws_noise(name, recipe, attention):
    model, batch = MODELS[name]().eval(), batch_of(name)
    model.set_attn_implementation(attention)
    before = logits(model, batch)
    plan = vd.plan(model, RECIPES[recipe], exclude=tied_heads(name, recipe))
    assert len(plan.changes) > 1
    vd.convert(model, RECIPES[recipe], exclude=tied_heads(name, recipe))
    enclosed = {
        c for m in noisy_modules(model).values() if m.encloses for c in m.modules() if c is not m
    }
    handed = {
        c for m in noisy_modules(model).values() if not m.encloses for c in m.children()
        if isinstance(c, Noisy) and "dropout" in type(c).__name__.lower()
    }  # fmt: skip
    claimed = {s.module for s in plan.changes}
    assert set(noisy_modules(model).values()) - enclosed - handed <= claimed
    for step in plan.changes:
        a, b = of_one_module(model, step.module, batch)
        assert not torch.equal(a, b), step.name
    with vd.sampling(model, False):
        mean = logits(model, batch)
    if recipe != "concrete_dropout":  # the mean of a relaxed gate is not quite one
        assert torch.equal(mean, before)
    torch.testing.assert_close(logits(vd.revert(model), batch), mean)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_dropout_alone(attention):
    model, batch = MODELS["bert"]().eval(), batch_of("bert")
    model.set_attn_implementation(attention)
    vd.convert(model, vd.mc_dropout(), where="*.attention.self")
    assert {type(m).__name__ for m in noisy_modules(model).values()} == {
        "SwitchedBertSelfAttention", "Dropout",
    }  # fmt: skip
    with vd.sampling(model):
        assert not torch.equal(logits(model, batch), logits(model, batch))
    assert torch.equal(logits(model, batch), logits(model, batch))
    first = vd.predict(model, batch, samples=4, seed=0)
    assert torch.equal(vd.predict(model, batch, samples=4, seed=0).probs, first.probs)
    assert not torch.equal(vd.predict(model, batch, samples=4, seed=1).probs, first.probs)
    again = pickle.loads(pickle.dumps(model))
    with vd.sampling(again):
        assert not torch.equal(logits(again, batch), logits(again, batch))


def test_prediction_draws_the_attention_dropout_that_training_has():
    """Whatever the recipe: dropout of the net is part of what was trained."""
    quiet = {"hidden_dropout_prob": 0.0, "classifier_dropout": 0.0}
    import transformers

    config = transformers.BertConfig(**{**MODELS["bert"]().config.to_dict(), **quiet})
    model, batch = transformers.BertForSequenceClassification(config), batch_of("bert")
    vd.convert(model, vd.bayes_by_backprop(log_sigma2=-60.0), where="classifier")
    assert vd.predict(model, batch, samples=8, likelihood=vd.Values()).std.max() > 1e-6


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_a_gate_on_a_tied_head_is_not_folded_into_the_embedding(name):
    model = vd.convert(MODELS[name](), vd.concrete_dropout())
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(vd.VardropError, match="tied weights, into which the mean of one gate"):
        vd.revert(model)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
