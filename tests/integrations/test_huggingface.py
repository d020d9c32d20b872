"""Models of transformers: what plan says, the recipes, files."""

import copy
import functools

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

import vardrop as vd
from tests.integrations.models import MODELS, batch_of, make, one_row, without_dropout
from tests.nets import Named, is_same_state
from tests.refusals import assert_refused, unchanged
from tests.running import python
from tests.z_scores import z_bound
from vardrop._core.files import write_tensors
from vardrop.conversion import noise_names
from vardrop.integrations import huggingface
from vardrop.integrations.huggingface import from_pretrained, save_pretrained
from vardrop.noisy import Noisy, noisy_modules
from vardrop.testing import check_layer

RECIPES = {
    "sparse_vd": vd.sparse_vd(), "bayes_by_backprop": vd.bayes_by_backprop(),
    "mc_dropout": vd.mc_dropout(), "concrete_dropout": vd.concrete_dropout(),
    "beta_bernoulli": vd.beta_bernoulli(), "l0": vd.l0(),
}  # fmt: skip


def tied_heads(name, recipe):
    """A gate cannot be folded into a weight that the embedding has too, so none is put there."""
    gated = getattr(RECIPES[recipe], "gate", None) is not None
    return "lm_head" if gated and name in ("gpt2", "t5") else None


def noisy(name, recipe):
    return vd.convert(MODELS[name](), RECIPES[recipe], exclude=tied_heads(name, recipe)).eval()


def logits(model, batch):
    with torch.no_grad():
        return model(**batch).logits


CONTRACT = {
    "noisy bias": vd.bayesian_compression(),
    "gates on outputs": vd.structured_pruning(),
    "shared noise": vd.Recipe(vd.MultiplicativeGaussian(per="output"), vd.LogUniform(), vd.flipout),
}


@pytest.mark.parametrize("name", CONTRACT)
def test_conv1d_keeps_the_contract_of_layers(name):
    check_layer(lambda: Conv1D(3, 4), (torch.randn(5, 4),), CONTRACT[name])


def test_conv1d_of_a_row_and_of_sequences():
    plain, x = Conv1D(3, 4), torch.randn(2, 5, 4)
    layer = vd.convert(copy.deepcopy(plain), vd.bayes_by_backprop())
    with vd.sampling(layer, False):
        assert torch.equal(layer(x), plain(x))
        assert torch.equal(layer(x[0, 0]), plain(x[0, 0]))
    assert layer(x[0, 0]).shape == (3,)


def of_one_module(model, module, batch):
    """Two outputs with the noise of one module alone, or of its weights where these are tied."""
    weights = {id(p) for p in module.parameters(recurse=False)}
    for m in noisy_modules(model).values():
        m.sampling = not weights.isdisjoint(id(p) for p in m.parameters(recurse=False))
    for m in module.modules() if module.encloses else (module,):
        m.sampling = True
    return logits(model, batch), logits(model, batch)


WAYS = [("mc_dropout", "sdpa"), ("mc_dropout", "eager")]
WAYS += [("bayes_by_backprop", "sdpa"), ("concrete_dropout", "sdpa")]


@pytest.mark.parametrize(("recipe", "attention"), WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_what_plan_says_is_noisy_draws_noise(name, recipe, attention):
    model, batch = MODELS[name]().eval(), batch_of(name)
    model.set_attn_implementation(attention)
    before = logits(model, batch)
    plan = vd.plan(model, RECIPES[recipe], exclude=tied_heads(name, recipe))
    assert len(plan.changes) > 1
    vd.convert(model, RECIPES[recipe], exclude=tied_heads(name, recipe))
    own = [m for m in noisy_modules(model).values() if m.encloses]
    enclosed = {c for m in own for c in m.modules() if c is not m}
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


def test_no_dropout_of_the_models_is_left_in_their_code():
    for name, build in MODELS.items():
        assert vd.gates.find_functional_dropout(build(), batch_of(name)) == {}


def test_a_plain_model_is_predicted_with_the_dropout_of_its_attention():
    model = without_dropout(MODELS["t5"]())  # whose attention has a rate of its own
    found = vd.predict(model, batch_of("t5"), 4, output=one_row, likelihood=vd.Values())
    assert found.std.max() > 0


def test_dropout_around_a_model_is_part_of_predictions():
    """A model of transformers in a module of one's own, with dropout as a function."""
    dropout = nn.functional.dropout
    run = lambda net, **batch: dropout(net.model(**batch).logits, 0.3, net.training)
    net = without_dropout(vd.convert(Named(run, model=MODELS["distilbert"]()), vd.mc_dropout()))
    p = vd.predict(net, batch_of("distilbert"), samples=8, seed=0, likelihood=vd.Values())
    assert 0.1 < (p.draws == 0).float().mean() < 0.5


def test_prediction_draws_the_attention_dropout_that_training_has():
    """Whatever the recipe: dropout of the net is part of what was trained."""
    model = make("bert", hidden_dropout_prob=0.0, classifier_dropout=0.0)
    vd.convert(model, vd.bayes_by_backprop(log_sigma2=-60.0), include="classifier")
    assert vd.predict(model, batch_of("bert"), 8, likelihood=vd.Values()).std.max() > 1e-6


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_a_gate_on_a_tied_head_is_not_folded_into_the_embedding(name):
    skipped = {s.name: s.reason for s in vd.plan(MODELS[name](), vd.concrete_dropout()).skips}
    assert "its weight is tied" in skipped["lm_head"]
    model = vd.convert(MODELS[name](), vd.concrete_dropout(), include="lm_head")
    with unchanged(model, match="tied weights, into which the mean of one gate"):
        vd.revert(model)


def trained(model, name, batch):
    """Two steps on the ELBO of a batch of named arguments."""
    y = torch.randint(0, 3, (3,))
    elbo = vd.ELBO(model.train(), vd.Categorical(), num_data=100, output=one_row)
    optimizer, losses = torch.optim.Adam(vd.parameter_groups(elbo, lr=1e-2)), []
    for _ in range(2):
        optimizer.zero_grad()
        out = elbo(batch, y)
        out.loss.backward()
        optimizer.step()
        losses.append(out)
    assert all(out.loss.isfinite() for out in losses)
    return model.eval()


# Every model with two recipes, every recipe with two models; the other pairs are slow.
PAIRS = [
    pytest.param(name, recipe, marks=[] if (i - j) % 6 < 2 else pytest.mark.slow)
    for i, name in enumerate(MODELS)
    for j, recipe in enumerate(RECIPES)
]


@pytest.mark.filterwarnings("ignore:Predicting by a slower loop")  # where a model asks for values
@pytest.mark.parametrize("name, recipe", PAIRS)
def test_models_train_predict_and_come_back(name, recipe, tmp_path):
    model, batch = noisy(name, recipe), batch_of(name)
    before = copy.deepcopy(model.state_dict())
    trained(model, name, batch)
    assert not is_same_state(model, before)
    found = vd.predict(model, batch, samples=4, seed=0, output=one_row)
    assert found.probs.shape[0] == 3
    again = vd.predict(model, batch, samples=4, seed=0, output=one_row)
    assert torch.equal(again.probs, found.probs)
    mean = logits(model, batch)
    vd.save_noisy(model, tmp_path / "net.safetensors")
    again = vd.load_noisy(tmp_path / "net.safetensors", MODELS[name]()).eval()
    assert torch.equal(logits(again, batch), mean)
    assert float(vd.kl(again).detach()) == float(vd.kl(model).detach())
    plain = vd.revert(again)
    assert not any(isinstance(m, Noisy) for m in plain.modules())
    assert {type(m) for m in plain.modules()} == {type(m) for m in MODELS[name]().modules()}
    if getattr(RECIPES[recipe], "gate", None) is None:
        assert torch.equal(logits(plain, batch), mean)
    else:  # scaled weights round otherwise than scaled features
        torch.testing.assert_close(logits(plain, batch), mean, rtol=1e-3, atol=1e-5)


FRESH = """
import sys, torch, vardrop as vd
from tests.integrations.models import MODELS
assert "vardrop.integrations" not in sys.modules
becomes = {s.becomes for s in vd.plan(MODELS["gpt2"](), vd.sparse_vd()).changes}
assert "vardrop.integrations.huggingface.Conv1D" in becomes  # known without an import
from vardrop.integrations.huggingface import from_pretrained
for name in sys.argv[1:]:
    model = from_pretrained(type(MODELS[name]()), name)
    torch.save([model.state_dict(), vd.kl(model)], f"{name}/found.pt")
"""


@pytest.mark.slow
def test_a_fresh_process_loads_the_same_means_and_posteriors(tmp_path):
    models = {name: noisy(name, "sparse_vd") for name in ("gpt2", "vit")}
    for name, model in models.items():
        trained(model, name, batch_of(name))
        save_pretrained(model, tmp_path / name)
    python("-W", "ignore", "-c", FRESH, *models, cwd=tmp_path, check=True)
    for name, model in models.items():
        state, kl = torch.load(tmp_path / name / "found.pt", weights_only=True)
        assert is_same_state(state, model)
        assert torch.equal(kl, vd.kl(model).detach())


@pytest.mark.parametrize("name, recipe", PAIRS)
def test_a_checkpoint_of_transformers_keeps_the_noise(name, recipe, tmp_path):
    model, batch = noisy(name, recipe), batch_of(name)
    with torch.no_grad():
        for m in noisy_modules(model).values():
            for tensor in m.noise_tensors():
                tensor.add_(0.1 * torch.randn_like(tensor))
    save_pretrained(model, tmp_path)
    again = from_pretrained(type(model), tmp_path)
    assert not again.training
    assert is_same_state(again, model)
    kinds = {n: type(m) for n, m in model.named_modules()}
    assert {n: type(m) for n, m in again.named_modules()} == kinds
    plain = type(model).from_pretrained(tmp_path)  # which finds the means
    assert not any(isinstance(m, Noisy) for m in plain.modules())
    if getattr(RECIPES[recipe], "gate", None) is None:
        assert torch.equal(logits(plain, batch), logits(model, batch))
    assert {p.suffix for p in tmp_path.iterdir()} <= {".json", ".safetensors"}


def test_a_checkpoint_keeps_tied_weights(tmp_path):
    model = noisy("t5", "bayes_by_backprop")
    save_pretrained(model, tmp_path)
    again = from_pretrained(type(model), tmp_path)
    tables = [again.shared, again.encoder.embed_tokens, again.decoder.embed_tokens, again.lm_head]
    assert (len({id(m.weight) for m in tables}), len({id(m.log_sigma2) for m in tables})) == (1, 1)


def test_a_checkpoint_that_is_not_whole_is_refused(tmp_path):
    model = noisy("bert", "sparse_vd")
    save_pretrained(model, tmp_path)
    (tmp_path / "noise.safetensors").rename(tmp_path / "kept")
    load = functools.partial(from_pretrained, type(model), tmp_path)
    assert_refused(r"Expected noise.safetensors in .*, but it is not", load)
    (tmp_path / "noise.safetensors").write_bytes((tmp_path / "kept").read_bytes()[:-8] + bytes(8))
    assert_refused("damaged|checksum", load)
    write_tensors(tmp_path / "noise.safetensors", {"x": torch.zeros(1)}, {"format": "another"})
    assert_refused("to be a file of save_pretrained, but got another", load)


@pytest.mark.parametrize("name", MODELS)
def test_the_names_of_the_noise_are_those_that_a_plain_model_lacks(name):
    plain = MODELS[name]()
    for recipe in (*RECIPES.values(), vd.dropmax()):
        noisy_one = vd.convert(copy.deepcopy(plain), recipe)
        assert noise_names(noisy_one) == noisy_one.state_dict().keys() - plain.state_dict().keys()


@pytest.mark.parametrize("shards", [{}, {"max_shard_size": "20KB"}], ids=["one file", "shards"])
def test_new_means_with_the_noise_of_an_earlier_save_are_refused(shards, tmp_path, monkeypatch):
    model = noisy("bert", "sparse_vd")
    save_pretrained(model, tmp_path, **shards)
    model.bert.encoder.layer[1].output.dense.weight.data.add_(1)
    with monkeypatch.context() as patch:
        patch.setattr(huggingface, "write_noise", interrupt)  # between the two files
        with pytest.raises(KeyboardInterrupt):
            save_pretrained(model, tmp_path, **shards)
    assert_refused("to belong to model.*saves", from_pretrained, type(model), tmp_path)
    save_pretrained(model, tmp_path, **shards)
    again = from_pretrained(type(model), tmp_path)
    assert torch.equal(vd.kl(again).detach(), vd.kl(model).detach())


def interrupt(*_):
    raise KeyboardInterrupt


def test_other_nets_are_no_checkpoints_of_transformers(tmp_path):
    told, net = "a model of transformers or PEFT, but got a Lin", torch.nn.Linear(2, 2)
    assert_refused(told, save_pretrained, vd.convert(net, vd.sparse_vd()), tmp_path)
    assert_refused("to have noisy modules, but got", save_pretrained, MODELS["bert"](), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_prediction_has_the_distribution_of_attention_dropout(attention):
    """Rows and draws are as independent under `predict` as one after another under the switch."""
    model, batch, count = MODELS["bert"]().eval(), batch_of("bert"), 400
    model.set_attn_implementation(attention)
    for p in model.parameters():
        p.data.mul_(4 if p.dim() > 1 else 1)  # so that attention attends
    for name, m in model.named_modules():
        if isinstance(m, torch.nn.Dropout) and not name.endswith("self.dropout"):
            m.p = 0.0
    vd.convert(model, vd.mc_dropout())
    found = vd.predict(model, batch, samples=count, seed=0, likelihood=vd.Values())
    with vd.sampling(model):
        draws = torch.stack([logits(model, batch) for _ in range(count)]).double()
    spread = draws.var(0) * 2 / count  # of the difference of two means
    z = (found.mean - draws.mean(0)).abs() / spread.sqrt()
    assert z.max() < z_bound(z.numel())
    squares = (draws - draws.mean(0)).square()
    z = (found.std.square() - draws.var(0)).abs() / (squares.var(0) * 2 / count).sqrt()
    assert z.max() < z_bound(z.numel())
