"""A frozen predictor answers as `predict` does, follows nothing, and says what it cannot freeze."""

import copy
import pickle
import re

import pytest
import torch
from torch import nn

import vardrop as vd
from tests.prediction.nets import trained
from tests.refusals import assert_refused
from vardrop.testing.cases import HEADS, LAYERS, RECIPES

NAMES = ("dense", "norms", "residual", "tapped", "recurrent", "encoder")
WAYS = [{}, {"draw": "functions"}, {"mode": "moments"}]
OPTIONS = pytest.mark.parametrize("options", WAYS, ids=str)


def outputs(predictor, x, seed):
    return dict(zip(predictor.output_names, predictor.outputs(x, seed=seed), strict=True))


def assert_same(net, x, **options):
    try:
        expected = vd.predict(net, x, 9, seed=4, **options)
    except vd.VardropError as error:
        refused = re.escape(str(error).partition(" Predict")[0])
        assert_refused(refused, vd.freeze(net, samples=9, **options), x, seed=4)
        return
    found = vd.freeze(net, samples=9, **options)(x, seed=4)
    torch.testing.assert_close(found.draws, expected.draws, rtol=2e-6, atol=1e-6)
    for name in ("probs", "aleatoric", "epistemic", "standard_error"):
        gap = (getattr(found, name) - getattr(expected, name)).abs().max()
        assert float(gap) <= 1e-6, (name, float(gap))


@OPTIONS
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_method_is_frozen_as_it_predicts(recipe, options):
    assert_same(*trained("dense", RECIPES[recipe]), **options)


@OPTIONS
@pytest.mark.parametrize("name", NAMES)
def test_every_net_is_frozen_as_it_predicts(name, options):
    assert_same(*trained(name), **options)


@pytest.mark.parametrize("name", ["conv1d", "conv2d", "conv2d_depthwise", "conv3d"])
@pytest.mark.parametrize("recipe", ["sparse_vd", "variance_layer", "own-noisy_bias"])
def test_convolutions_of_every_shape(name, recipe):
    case = LAYERS[name]
    net = nn.Sequential(case.make(), nn.Flatten())
    vd.convert(net, RECIPES[recipe]).eval()
    for options in ({}, {"mode": "moments"}):
        assert_same(net, *case.inputs(), **options)


@pytest.mark.parametrize("head", HEADS)
def test_heads(head):
    net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))
    net = vd.convert(net, HEADS[head]).eval()
    assert_same(net, torch.randn(6, 5))


def test_other_draws_and_likelihoods():
    recipe = vd.bayes_by_backprop(estimator=vd.weight_sample)
    assert_same(*trained("dense", recipe), draw="local")
    assert_same(*trained("dense"), likelihood=vd.Categorical(temperature=2.0))
    assert_same(*trained("dense"), likelihood=vd.Bernoulli())
    net = vd.convert(nn.Linear(5, 2), vd.bayes_by_backprop()).eval()
    elbo, x = vd.ELBO(net, vd.Gaussian(0.3, learned=True), num_data=10).eval(), torch.randn(4, 5)
    expected, predictor = vd.predict(elbo, x, seed=1), vd.freeze(elbo)
    assert torch.equal(predictor(x, seed=1).std, expected.std)
    assert predictor.output_names[0] == "mean"
    elbo.likelihood.log_std.data.add_(1.0)
    assert torch.equal(predictor(x, seed=1).std, expected.std)


@pytest.mark.parametrize("mode", ["sample", "moments"])
def test_it_is_made_of_buffers_and_follows_nothing(mode):
    net, x = trained("norms")
    predictor = vd.freeze(net, mode=mode, samples=5)
    before = predictor(x, seed=0)
    assert not any(p.requires_grad for p in predictor.parameters())
    assert "samples=5" in repr(predictor)
    for tensor in (*net.parameters(), *net.buffers()):
        tensor.data.add_(1)
    net.train()
    assert torch.equal(predictor.train()(x, seed=0).probs, before.probs)
    assert not any(m.training for m in predictor.modules())


@pytest.mark.parametrize("name", NAMES)
def test_copies_and_other_precisions(name):
    net, x = trained(name)
    predictor = vd.freeze(net, samples=5)
    expected = predictor(x, seed=0).probs
    for twin in (copy.deepcopy(predictor), pickle.loads(pickle.dumps(predictor))):
        assert torch.equal(twin(x, seed=0).probs, expected)
    assert vd.freeze(net, samples=5).double()(x.double(), seed=0).probs.dtype == torch.float64


def test_batches_and_loaders_are_those_of_predict_and_moments_see_one_row_at_a_time():
    net, x = trained("dense")
    predictor, moments = vd.freeze(net, samples=5), vd.freeze(net, mode="moments")
    torch.testing.assert_close(moments(x).probs[2:3], moments(x[2:3]).probs)
    loaded = predictor([(part,) for part in x.split(3)], seed=2)
    assert torch.equal(loaded.probs, vd.predict(net, x.split(3), 5, seed=2).probs)
    nan = torch.full((1, 5), torch.nan)
    assert_refused("Expected `x` to be finite, but got 5 values", predictor, nan)


def test_outputs_are_tensors_with_names():
    net, x = trained("dense")
    found, p = outputs(vd.freeze(net), x, 0), vd.predict(net, x, seed=0)
    assert list(found) == ["probs", "aleatoric", "epistemic", "entropy", "lower", "upper"]
    torch.testing.assert_close(found["epistemic"], p.epistemic)
    torch.testing.assert_close(found["upper"], p.interval(0.95).upper)


def test_conformal_rules_come_along():
    net, x = trained("dense")
    held_out, y = torch.randn(50, 5), torch.randint(3, (50,))
    rule = vd.conformal(vd.predict(net, held_out, seed=0), y)
    found = outputs(vd.freeze(net, conformal=rule), x, 1)
    assert torch.equal(found["set"], rule.classes(vd.predict(net, x, seed=1)))
    values = vd.convert(nn.Linear(5, 1), vd.bayes_by_backprop()).eval()
    p = vd.predict(values, held_out, likelihood=vd.Gaussian(0.5), seed=0)
    rule = vd.conformal(p, torch.randn(50, 1))
    predictor = vd.freeze(values, likelihood=vd.Gaussian(0.5), conformal=rule)
    upper = rule.interval(predictor(x, seed=1)).upper
    torch.testing.assert_close(outputs(predictor, x, 1)["upper"], upper)


def test_what_cannot_be_frozen():
    training, net = (trained("dense")[0] for _ in range(2))
    training[2].train()
    recurrent, x = trained("recurrent")
    for match, model, options in (
        (r"but got '2' \(Linear\) in training mode.*net.eval\(\)", training, {}),
        ("to have noisy modules or dropout, but got Linear", nn.Linear(2, 2).eval(), {}),
        ("`mode` to be one of 'sample', 'moments', but got 'mean'", net, {"mode": "mean"}),
        ("`samples` to be an integer of at least 1, but got 0", net, {"samples": 0}),
        ("`conformal` to be a rule of vardrop.conformal", net, {"conformal": 0.9}),
    ):
        assert_refused(match, vd.freeze, model, **options)
    assert_refused(r"moments, but got 'recurrent' \(LSTM", vd.freeze(recurrent, mode="moments"), x)
