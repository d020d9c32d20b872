"""One predictor for classes and Sequentials: the same numbers, the right distribution, its plan."""

import copy
import json
import sys

import pytest
import torch
from torch import nn

import vardrop as vd
from tests.nets import Named, Parts
from tests.prediction.nets import NETS, strategy_of, trained
from tests.refusals import assert_refused
from tests.running import ROOT, python
from tests.z_scores import assert_same_moments
from vardrop.functional import GeneratorNoise, draw_from
from vardrop.prediction.rows import RowDraws
from vardrop.prediction.strategies import FunctionDraws

BAYES = vd.bayes_by_backprop(log_sigma2=-3.0, estimator=vd.local_reparameterization)
FLIPOUT = vd.bayes_by_backprop(log_sigma2=-3.0, estimator=vd.flipout)


MODELS = ["conv", "skip", "tokens", "recurrent", "tied"]


def make(name, recipe=BAYES):
    return trained(name, recipe, examples=3)


COUNTS = pytest.mark.parametrize("count", [1000, pytest.param(20_000, marks=pytest.mark.slow)])


NOISY_BIAS = vd.Recipe(vd.AdditiveGaussian(-2.0), noisy_bias=True)
DRAWN = [(name, BAYES) for name in (*MODELS, "residual", "grouped", "rows")]
DRAWN += [("norms", NOISY_BIAS), ("conv", vd.variance_layer())]


@COUNTS
@pytest.mark.parametrize("name, recipe", DRAWN)
def test_draws_as_trained_are_those_of_a_loop_over_the_model(name, recipe, count):
    net, x = make(name, recipe)
    kept = x.clone()
    found = vd.predict(net.train(), x, 2 * count, likelihood=vd.Values(), seed=0).draws
    assert all(m.training for m in net.modules())
    assert torch.equal(x, kept)  # what is overwritten is never the input
    for module in net.eval().modules():
        module.training = isinstance(module, nn.Dropout)
    with torch.no_grad(), vd.sampling(net), draw_from(GeneratorNoise(1)):
        expected = torch.stack([net(x) for _ in range(count)])
    assert_same_moments(found, expected, 5)


FLATTENINGS = {  # which ask the input for the number of examples, or the output
    "size of the input": lambda x, y: y.view(x.size(0), -1),
    "shape of the input": lambda x, y: y.reshape(x.shape[0], -1),
    "size of the output": lambda x, y: y.view(y.size(0), -1),
    "len, a constant in the trace": lambda x, y: y.reshape(len(x), -1),
}


@pytest.mark.parametrize("name", FLATTENINGS)
def test_code_may_flatten_as_it_likes_after_batchnorm(name):
    layers = {"conv": nn.Conv2d(1, 4, 3), "norm": nn.BatchNorm2d(4), "head": nn.Linear(64, 3)}
    net = Parts(lambda net, x: net.head(FLATTENINGS[name](x, net.norm(net.conv(x)))), **layers)
    for tensor in (net.norm.running_mean, net.norm.weight.data, net.norm.bias.data):
        tensor.normal_(generator=torch.Generator().manual_seed(3))
    net.norm.running_var.fill_(2.5)
    vd.convert(net, vd.sparse_vd(log_sigma2=-30.0)).eval()
    x, predictor = torch.randn(200, 1, 6, 6), vd.Predictor(net, 4, likelihood=vd.Values())
    torch.testing.assert_close(predictor(x).mean, net(x).detach(), rtol=1e-3, atol=1e-3)
    assert predictor.plan(x).endswith("is shared") != name.startswith("len")


@COUNTS
@pytest.mark.parametrize("name", MODELS)
def test_functions_are_draws_of_the_posterior(name, count):
    net, x = make(name, FLIPOUT if name != "recurrent" else BAYES)
    found = vd.predict(net, x, count, draw="functions", likelihood=vd.Values(), seed=0).draws
    outputs, plain = [], vd.revert(copy.deepcopy(net))
    tensors = [(key, tensor) for _, key, tensor in vd.noisy.noisy_weights(net)]
    with torch.no_grad(), draw_from(GeneratorNoise(1)):
        for _ in range(count):
            drawn = {key: tensor.sample(tensor.draw()) for key, tensor in dict(tensors).items()}
            outputs.append(torch.func.functional_call(plain, drawn, x))
    assert_same_moments(found, torch.stack(outputs), 5)


def test_a_class_and_its_sequential_twin_draw_the_same_numbers():
    net, x = make("conv")
    twin = nn.Sequential(
        net.conv1, net.norm1, nn.ReLU(True), nn.MaxPool2d(2), net.conv2, net.norm2, nn.ReLU(True),
        nn.Flatten(), net.hidden, nn.ReLU(), net.last,
    )  # fmt: skip
    for draw in ("estimator", "functions"):
        predictions = [vd.predict(n, x, 9, draw=draw, seed=3) for n in (net, twin)]
        torch.testing.assert_close(*(p.draws for p in predictions))


def test_strategies():
    conv, images = make("conv")
    plan = "draws as further examples; the noise-free part is shared"
    assert vd.Predictor(conv).plan(images) == plan
    tokens, x = make("tokens")
    assert "is shared" in vd.Predictor(tokens).plan(x)
    assert isinstance(strategy_of(*make("skip")), RowDraws)


@pytest.mark.parametrize("recipe, kind", [(BAYES, RowDraws), (FLIPOUT, FunctionDraws)])
def test_one_draw_per_example_is_predicted_with_whole_functions(recipe, kind):
    net, x = make("conv", recipe)
    predictor = vd.Predictor(net)
    predictor.is_kept = False
    assert isinstance(predictor.strategy_for(x), kind)


@COUNTS
def test_flipout_next_to_dropout_is_predicted_with_whole_functions(count):
    run = lambda net, x: net.last(net.drop(net.relu(net.norm(net.conv(x))).flatten(1)))
    layers = {"norm": nn.BatchNorm2d(3), "relu": nn.ReLU(inplace=True), "drop": nn.Dropout(0.3)}
    net = Parts(run, conv=nn.Conv2d(1, 3, 3), **layers, last=nn.Linear(48, 2))
    vd.convert(net, vd.bayes_by_backprop(log_sigma2=-3.0)).eval()
    x, options = torch.randn(2, 1, 6, 6), {"likelihood": vd.Values(), "seed": 0}
    predictor = vd.Predictor(net)
    predictor.is_kept = False
    assert isinstance(predictor.strategy_for(x), FunctionDraws)
    drawn = torch.cat([vd.predict(net, row, count, **options).draws for row in x.split(1)], 1)
    net.drop.train()
    with torch.no_grad(), vd.sampling(net), draw_from(GeneratorNoise(1)):
        passes = [torch.cat([net(row) for row in x.split(1)]) for _ in range(count)]
    assert_same_moments(drawn, torch.stack(passes), 5)


@pytest.mark.parametrize("name", MODELS)
def test_a_seeded_prediction_does_not_depend_on_the_memory(name):
    net, _ = make(name)
    x = torch.randn(9000, *NETS[name][1])  # several blocks, and several parts of the batch
    small, large = (vd.predict(net, x, 40, memory=memory, seed=0) for memory in (2**23, 2**28))
    torch.testing.assert_close(small.draws, large.draws)


def test_batchnorm_behind_a_dense_layer_over_positions_is_not_folded():
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Flatten())
    net[1].running_mean.normal_()
    net[1].weight.data.normal_()
    net, x = vd.convert(net, vd.bayes_by_backprop(log_sigma2=-30.0)).eval(), torch.randn(2, 3, 4)
    expected = net(x)
    for found in (vd.predict(net, x, 4, likelihood=vd.Values()), vd.freeze(net)(x)):
        torch.testing.assert_close(found.mean, expected, rtol=1e-3, atol=1e-3)


def test_refresh_follows_the_model():
    net, x = make("skip")
    for draw in ("estimator", "functions"):
        predictor = vd.Predictor(net, 64, draw=draw, likelihood=vd.Values())
        before = predictor(x).mean
        net.last.bias.data.add_(100.0)
        assert (predictor(x).mean - before).abs().max() < 50
        predictor.refresh()
        assert (predictor(x).mean - before).min() > 50
        net.last.bias.data.sub_(100.0)


def test_kept_functions_are_the_same_in_every_call():
    net, x = make("conv", FLIPOUT)
    predictor = vd.Predictor(net, 5)
    first, second = predictor(x).draws, predictor(x).draws
    assert torch.equal(first, second)
    assert not torch.equal(first, predictor(x, seed=1).draws)
    torch.testing.assert_close(predictor(x, seed=1).draws, predictor(x, seed=1).draws)


def reuse(net, x):
    """Reads a value again after an in-place operation on it."""
    hidden = net.inner(x)
    return net.relu(hidden) + hidden


def test_in_place_operations_mean_what_they_do():
    net = Parts(reuse, inner=nn.Linear(4, 4), relu=nn.ReLU(inplace=True))
    vd.convert(net, vd.bayes_by_backprop(log_sigma2=-30.0)).eval()
    x = torch.randn(5, 4)
    for draw in ("estimator", "functions"):
        p = vd.predict(net, x, 3, draw=draw, likelihood=vd.Values())
        torch.testing.assert_close(p.mean, net(x), rtol=1e-3, atol=1e-3)


# Ensembles: a predictor whose draws are its members.


def members(count=3):
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)) for _ in range(count)]
    return [net.eval() for net in nets]


def test_plain_members_are_averaged_in_probability():
    nets, x = members(), torch.randn(5, 4)
    outputs = torch.stack([net(x) for net in nets]).detach()
    p = vd.Ensemble([net.train() for net in nets])(x)
    torch.testing.assert_close(p.probs, outputs.softmax(2).mean(0))
    torch.testing.assert_close(p.draws, outputs)
    assert all(net.training for net in nets)


def test_noisy_and_plain_members_have_the_same_weight():
    plain, other, base = members()
    noisy, x = vd.convert(other, vd.bayes_by_backprop(log_sigma2=-2.0)), torch.randn(5, 4)
    p = vd.Ensemble([plain, noisy, base], 3000, likelihood=vd.Values())(x, seed=0)
    assert len(p.draws) == 3000
    alone = vd.predict(noisy, x, 3000, likelihood=vd.Values(), seed=1)
    expected = (plain(x) + base(x) + alone.mean) / 3
    error = alone.std / 1000**0.5
    assert ((p.mean - expected).abs() / error).max() < 6  # of 15 comparisons, 3e-8 together


def test_it_is_calibrated_frozen_and_exported(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    nets, x, y = members(), torch.randn(60, 4), torch.arange(60) % 3
    likelihood = vd.calibrate(vd.Ensemble(nets), (x, y))
    rule = vd.conformal(vd.Ensemble(nets, likelihood=likelihood)(x), y)
    frozen = vd.freeze(vd.Ensemble(nets, likelihood=likelihood, conformal=rule))
    expected = frozen.outputs(x[:7])
    for net in nets:
        net[0].weight.data.zero_()
    for found, wanted in zip(frozen.outputs(x[:7]), expected, strict=True):
        assert torch.equal(found, wanted)
    vd.export_onnx(frozen, x[:1], tmp_path / "ensemble.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "ensemble.onnx")
    outputs = session.run(None, {"x": x[:7].numpy()})
    assert [o.name for o in session.get_outputs()] == list(frozen.output_names)
    for found, wanted in zip(outputs, expected, strict=True):
        torch.testing.assert_close(torch.as_tensor(found), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("models", [[], 3, [1], nn.Linear(2, 2)])
def test_bad_members_are_refused(models):
    assert_refused("`models` to be a list of models", vd.Ensemble, models)


# Predictions of models with packed sequences and of recurrent layers with gates.


def packed(net, x, lengths):
    """Embeds tokens, packs them by length and classifies the last state of an LSTM."""
    pack = nn.utils.rnn.pack_padded_sequence
    sequences = pack(net.embed(x), lengths, batch_first=True, enforce_sorted=False)
    return net.last(net.recurrent(sequences)[1][0][-1])


def padded(net, x, lengths):
    return net.last(net.recurrent(net.embed(x))[1][0][-1])


def of_tokens(run, recipe):
    layers = {"embed": nn.Embedding(20, 8), "recurrent": nn.LSTM(8, 12, 2, batch_first=True)}
    return vd.convert(Named(run, **layers, last=nn.Linear(12, 3)), recipe).eval()


BATCH = {
    "x": torch.randint(20, (4, 9), generator=torch.Generator().manual_seed(0)),
    "lengths": torch.tensor([9, 4, 7, 2]),
}


@pytest.mark.parametrize("recipe", [vd.bayes_by_backprop(), vd.sparse_vd()])
def test_packed_sequences_are_predicted_and_frozen(recipe):
    net = of_tokens(packed, recipe)
    assert vd.predict(net, BATCH, samples=4, seed=0).probs.shape == (4, 3)
    assert vd.predict(net, BATCH, 4, seed=0, draw="functions").probs.shape == (4, 3)
    assert vd.freeze(net, samples=4)(BATCH, seed=0).probs.shape == (4, 3)


def test_recurrent_dropout_by_whole_functions():
    net = of_tokens(padded, vd.recurrent_dropout(0.25))
    assert vd.predict(net, BATCH, 4, draw="functions").probs.shape == (4, 3)
    function, other = vd.draw(net, seed=0), vd.draw(net, seed=1)
    torch.testing.assert_close(function(**BATCH), function(**BATCH))
    assert not torch.allclose(function(**BATCH), other(**BATCH))


# The memory that prediction promises, as a ratio in one run.


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_memory_does_not_grow_with_the_draws():
    words = ROOT / "benchmarks" / "memory.py", "predict", "10000"
    run = python(*words, env={"MALLOC_MMAP_THRESHOLD_": "131072"}, check=True, timeout=3600)
    print(run.stdout)
    assert json.loads(run.stdout)["ratio"] < 1.2
