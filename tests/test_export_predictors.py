"""Predictors as graphs: they answer with the numbers of torch, outside of torch."""

import math
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import vardrop as vd
from tests.nets import Parts
from tests.refusals import assert_refused
from tests.z_scores import z_bound
from vardrop._core.errors import VardropError
from vardrop.export import export_program

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    onnxruntime = pytest.importorskip("onnxruntime")
onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 4, 3)
        self.pool, self.out = nn.AdaptiveAvgPool2d(1), nn.Linear(4, 3)

    def forward(self, x):
        return self.out(self.pool(self.b((x + self.a(x)).relu())).flatten(1))


class Attending(nn.Module):
    """Attention without dropout, over the pixels."""

    def __init__(self):
        super().__init__()
        own = {"dim_feedforward": 8, "dropout": 0.0, "batch_first": True, "norm_first": True}
        self.first = nn.Linear(2, 4)
        self.attention = nn.TransformerEncoderLayer(4, 2, **own)
        self.out = nn.Linear(4, 3)

    def forward(self, x):
        return self.out(self.attention(self.first(x.flatten(2).transpose(1, 2))).mean(1))


def chain():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(16, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 3),
    )  # fmt: skip


def trained(make):
    torch.manual_seed(0)
    return vd.convert(make(), vd.sparse_vd(log_sigma2=-3.0)).eval(), torch.randn(5, 2, 6, 6)


def session_of(path):
    return onnxruntime.InferenceSession(path)


def answers(path, *tensors):
    session = session_of(path)
    feed = {i.name: t.numpy() for i, t in zip(session.get_inputs(), tensors, strict=True)}
    names = [o.name for o in session.get_outputs()]
    return dict(zip(names, map(torch.from_numpy, session.run(None, feed)), strict=True))


def assert_answers(found, predictor, expected, atol=1e-5):
    for name, value in zip(predictor.output_names, expected, strict=True):
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=atol, msg=name)


def check_answers(path, predictor, x):
    """The file answers as the predictor does."""
    vd.export_onnx(predictor, x, path)
    assert_answers(answers(path, x), predictor, predictor.outputs(x))


@pytest.mark.parametrize("make", [Residual, pytest.param(chain, marks=pytest.mark.slow)])
def test_moments_are_one_graph_with_the_numbers_of_torch(tmp_path, make):
    net, x = trained(make)
    predictor = vd.freeze(net, mode="moments")
    size = vd.export_onnx(predictor, x[:1], tmp_path / "net.onnx")
    assert size == (tmp_path / "net.onnx").stat().st_size
    for batch in (x, torch.randn(1, 2, 6, 6)):
        found = answers(tmp_path / "net.onnx", batch)
        assert tuple(found) == predictor.output_names
        assert_answers(found, predictor, predictor.outputs(batch))


@pytest.mark.parametrize(
    "make", [Residual, *(pytest.param(m, marks=pytest.mark.slow) for m in (Attending, chain))]
)
def test_draws_are_those_of_the_noise_that_is_passed_in(tmp_path, make):
    net, x = trained(make)
    predictor = vd.freeze(net, samples=6)
    vd.export_onnx(predictor, x[:1], tmp_path / "net.onnx", noise="input")
    graph = predictor.graph(x, noise="input")
    noise = graph.noise_like(x)
    given = noise.clone()
    session = session_of(tmp_path / "net.onnx")
    assert [i.name for i in session.get_inputs()] == ["x", "noise"]
    assert session.get_inputs()[1].shape[2] == noise.shape[2]
    expected = [value.detach() for value in graph(x, noise)]
    assert torch.equal(noise, given)
    assert_answers(answers(tmp_path / "net.onnx", x, noise), predictor, expected)


def test_a_graph_with_given_noise_draws_as_predict_does():
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    net = vd.convert(net, vd.sparse_vd(log_sigma2=-2.0)).eval()
    x, draws = torch.randn(5, 4), 7
    predictor = vd.freeze(net, samples=draws)
    p = predictor(x, seed=3)
    # predict draws the numbers of a layer after those of the layer before, (draws N, units) each.
    from vardrop.functional import GeneratorNoise, draw_from, standard_normal

    with draw_from(GeneratorNoise(3)):
        first, second = (standard_normal((draws * 5, units), x) for units in (6, 3))
    noise = torch.cat([first.view(draws, 5, 6), second.view(draws, 5, 3)], 2)
    probs, epistemic = predictor.graph(x, ("probs", "epistemic"), "input")(x, noise)
    torch.testing.assert_close(probs, p.probs, rtol=0, atol=1e-6)
    torch.testing.assert_close(epistemic, p.epistemic, rtol=0, atol=1e-6)


ONE_LAYER = {
    "alone": (lambda: nn.Linear(4, 3), "*"),
    "last": (lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), "2"),
    "before a norm": (lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), "*"),
}


@pytest.mark.parametrize(
    "name", ["alone", "before a norm", pytest.param("last", marks=pytest.mark.slow)]
)
def test_one_noisy_layer_is_drawn_in_the_graph(tmp_path, name):
    make, where = ONE_LAYER[name]
    net = vd.convert(make(), vd.sparse_vd(log_sigma2=-2.0), where).eval()
    predictor = vd.freeze(net, samples=6)
    vd.export_onnx(predictor, torch.randn(2, 4), tmp_path / "net.onnx", noise="input")
    for batch in (1, 5):
        x = torch.randn(batch, 4)
        graph = predictor.graph(x, noise="input")
        noise = graph.noise_like(x)
        assert_answers(answers(tmp_path / "net.onnx", x, noise), predictor, graph(x, noise))


@pytest.mark.parametrize("make", [chain, pytest.param(Residual, marks=pytest.mark.slow)])
def test_draws_of_the_runtime_have_the_distribution_of_torch(tmp_path, make):
    net, x = trained(make)
    predictor, calls = vd.freeze(net, samples=500), 4
    vd.export_onnx(predictor, x[:1], tmp_path / "net.onnx", outputs=["probs"])
    session = session_of(tmp_path / "net.onnx")
    found = [torch.from_numpy(session.run(None, {"x": x.numpy()})[0]) for _ in range(calls)]
    assert not torch.equal(found[0], found[1])  # drawn anew
    expected = [predictor(x, seed=s) for s in range(calls)]
    mean = torch.stack([p.probs for p in expected]).mean(0)
    error = expected[0].standard_error * math.sqrt(2 / calls)
    z = (torch.stack(found).mean(0) - mean).abs() / error
    assert float(z.max()) < z_bound(2 * z.numel())


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["l0", "concrete_dropout", "variational_dropout"])
def test_gates_are_drawn_in_the_graph(tmp_path, recipe):
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    net = vd.convert(net, getattr(vd, recipe)()).eval()
    x, predictor = torch.randn(5, 4), vd.freeze(net, samples=4)
    vd.export_onnx(predictor, x, tmp_path / "net.onnx", noise="input")
    graph = predictor.graph(x, noise="input")
    noise = graph.noise_like(x)
    with torch.no_grad():
        expected = graph(x, noise)
    assert_answers(answers(tmp_path / "net.onnx", x, noise), predictor, expected)


LIKELIHOODS = {
    "bernoulli": (vd.Bernoulli(), 2), "gaussian": (vd.Gaussian(0.3), 2),
    "heteroscedastic": (vd.HeteroscedasticGaussian(), 2), "values": (vd.Values(), 1),
    "tempered": (vd.Categorical(temperature=2.0), 3),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [n if n == "gaussian" else pytest.param(n, marks=pytest.mark.slow) for n in LIKELIHOODS]
)
def test_every_likelihood_answers(tmp_path, name):
    likelihood, outputs = LIKELIHOODS[name]
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, outputs))
    net = vd.convert(net, vd.bayes_by_backprop(log_sigma2=-3.0)).eval()
    predictor = vd.freeze(net, samples=8, mode="moments", likelihood=likelihood)
    check_answers(tmp_path / "net.onnx", predictor, torch.randn(5, 4))


def test_conformal_sets_and_metadata_are_in_the_file(tmp_path):
    net = vd.convert(nn.Linear(4, 3), vd.sparse_vd()).eval()
    held_out, y, x = torch.randn(40, 4), torch.randint(3, (40,)), torch.randn(5, 4)
    predictor = vd.freeze(net, mode="moments")
    rule = vd.conformal(predictor(held_out), y)
    predictor = vd.freeze(net, mode="moments", conformal=rule)
    vd.export_onnx(predictor, x, tmp_path / "net.onnx", outputs=("epistemic", "set"))
    found = answers(tmp_path / "net.onnx", x)
    assert list(found) == ["epistemic", "set"]
    assert torch.equal(found["set"], rule.classes(predictor(x)))
    about = session_of(tmp_path / "net.onnx").get_modelmeta().custom_metadata_map
    assert about["likelihood"] == "Categorical()"
    assert about["mode"] == "moments"
    assert about["noise"].startswith("AdditiveGaussian")
    assert about["vardrop"]


def test_a_program_of_torch_answers_too():
    net, x = trained(chain)
    predictor = vd.freeze(net, mode="moments")
    probs, lower = export_program(predictor, x[:1], outputs=("probs", "lower")).module()(x)
    expected = dict(zip(predictor.output_names, predictor.outputs(x), strict=True))
    torch.testing.assert_close(probs, expected["probs"])
    torch.testing.assert_close(lower, expected["lower"])


def dependent():
    """Rows that change each other."""
    return Parts(lambda net, x: net.inner(x - x.mean(0)), inner=nn.Linear(4, 3))


class Lacking(nn.Module):
    def forward(self, x):
        return torch.special.bessel_j0(x)


def drawing():
    return Parts(lambda net, x: net.inner(x + torch.randn_like(x)), inner=nn.Linear(4, 3))


def test_functions_are_members_of_a_graph(tmp_path):
    whole, x = vd.bayes_by_backprop(estimator=vd.weight_sample), torch.randn(5, 4)
    predictor = vd.freeze(vd.convert(nn.Sequential(nn.Linear(4, 3)), whole).eval(), 4)
    check_answers(tmp_path / "net.onnx", predictor, x)


def test_an_output_may_have_the_name_of_an_operation(tmp_path):
    net = vd.convert(averaging(), vd.sparse_vd()).eval()
    predictor = vd.freeze(net, mode="moments", likelihood=vd.Gaussian(0.5))
    check_answers(tmp_path / "net.onnx", predictor, torch.randn(5, 2, 4))


def averaging():
    return Parts(lambda net, x: net.inner(x.mean(1)), inner=nn.Linear(4, 1))


def test_what_a_graph_cannot_hold(tmp_path):
    x, path = torch.randn(5, 4), tmp_path / "net.onnx"

    def predictor(net, recipe=None, **options):
        return vd.freeze(vd.convert(net, recipe or vd.sparse_vd()).eval(), **options)

    refused = (
        "noise='input' is not supported for .* depends on the other examples.* noise='runtime'"
    )
    assert_refused(refused, vd.export_onnx, predictor(dependent()), x, path, noise="input")
    refused = "noise='input' is not supported for .* random functions of torch.* noise='runtime'"
    assert_refused(refused, vd.export_onnx, predictor(drawing()), x, path, noise="input")
    refused = (
        r"not supported for whole functions.* vardrop.Ensemble\(vardrop.draws\(net, samples\)\)"
    )
    assert_refused(
        refused, vd.export_onnx, predictor(nn.Linear(4, 3), draw="functions", memory=1), x, path
    )
    with pytest.raises(VardropError, match="ONNX has, but got `bessel_j0`"):
        vd.export_onnx(predictor(nn.Sequential(nn.Linear(4, 3), Lacking())), x, path)
    lacking = nn.Sequential(nn.Linear(4, 3), Lacking())
    refused = r"known moments, but got '1' \(Lacking\)"
    assert_refused(refused, vd.export_onnx, predictor(lacking, mode="moments"), x, path)
    refused = "`outputs` to be one of 'probs', .* but got 'mean'"
    assert_refused(refused, vd.export_onnx, predictor(nn.Linear(4, 3)), x, path, outputs=["mean"])
    refused = "`outputs` and `noise` require a predictor of vardrop.freeze"
    assert_refused(refused, vd.export_onnx, nn.Linear(4, 3), x, path, outputs=["probs"])
    assert not path.exists()


@pytest.mark.parametrize("make, recipe", [
    (dependent, vd.bayes_by_backprop(log_sigma2=-3.0)),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        (drawing, vd.bayes_by_backprop(log_sigma2=-3.0)),
        (lambda: nn.Sequential(nn.Linear(4, 3)), vd.beta_bernoulli()),
        (lambda: nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)), vd.mc_dropout()),
    )),
], ids=["examples together", "random functions", "gates of all examples", "dropout"])  # fmt: skip
def test_draws_that_are_passes_have_the_distribution_of_predictions(make, recipe, tmp_path):
    net, x = vd.convert(make(), recipe).eval(), torch.randn(5, 4)
    predictor = vd.freeze(net, samples=4, likelihood=vd.Values())
    vd.export_onnx(predictor, x, tmp_path / "net.onnx", outputs=["draws"])
    session = onnxruntime.InferenceSession(str(tmp_path / "net.onnx"))
    (name,) = (i.name for i in session.get_inputs())
    runs = [session.run(None, {name: x.numpy()})[0] for _ in range(128)]
    drawn = torch.from_numpy(np.concatenate(runs)).double()  # (512, 5, outputs)
    expected = vd.predict(net, x, samples=4096, seed=0, likelihood=vd.Values()).draws.double()
    error = (drawn.var(0) / len(drawn) + expected.var(0) / len(expected)).sqrt()
    assert ((drawn.mean(0) - expected.mean(0)).abs() / error.clamp_min(1e-6)).max() < 5
    ratio = drawn.std(0) / expected.std(0).clamp_min(1e-9)
    assert 0.75 < ratio.min() <= ratio.max() < 1.33


def test_a_shrunken_net_that_keeps_its_posterior_is_small_and_uncertain(tmp_path):
    net = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 3))
    net = vd.shrink(vd.convert(net, vd.l0()), torch.randn(4, 20)).net
    small = vd.convert(net, vd.bayes_by_backprop(log_sigma2=-4.0)).eval()
    x = torch.randn(5, 20)
    predictor = vd.freeze(small, mode="moments")
    vd.export_onnx(predictor, x, tmp_path / "net.onnx", outputs=("probs", "epistemic"))
    found = answers(tmp_path / "net.onnx", x)
    assert np.allclose(found["epistemic"], predictor(x).epistemic, atol=1e-5)


@pytest.mark.slow
def test_a_compiled_package_answers_as_torch_does(tmp_path):
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    net = vd.convert(net, vd.sparse_vd(log_sigma2=-3.0)).eval()
    predictor, x = vd.freeze(net, mode="moments"), torch.randn(7, 4)
    size = vd.export_package(predictor, x[:1], tmp_path / "net.pt2", outputs=("probs", "epistemic"))
    assert size == (tmp_path / "net.pt2").stat().st_size
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load = torch._inductor.aoti_load_package(str(tmp_path / "net.pt2"))
    for batch in (x, x[:1]):
        probs, epistemic = load(batch)
        torch.testing.assert_close(probs, predictor(batch).probs, rtol=0, atol=1e-5)
        torch.testing.assert_close(epistemic, predictor(batch).epistemic, rtol=0, atol=1e-5)


def test_a_package_without_a_compiler_is_told(tmp_path, monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("No working C++ compiler found")

    net = vd.convert(nn.Linear(4, 3), vd.sparse_vd()).eval()
    predictor, x = vd.freeze(net, mode="moments"), torch.randn(2, 4)
    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", fails)
    refused = "No working C\\+\\+ compiler found. This requires a C"
    assert_refused(refused, vd.export_package, predictor, x, tmp_path / "net.pt2")
    refused = r"`path` to end in .pt2, but got"
    assert_refused(refused, vd.export_package, predictor, x, tmp_path / "net.so")
    assert not list(tmp_path.iterdir())
