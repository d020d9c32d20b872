"""Models and predictors as graphs: they answer with the numbers of torch, outside of torch."""

import math
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import vardrop as vd
from tests.compression.nets import NETS, sparsen
from tests.nets import Parts
from tests.pairs import slow_but
from tests.prediction.nets import NETS as PREDICTED, trained
from tests.refusals import assert_refused
from tests.z_scores import z_bound
from vardrop.functional import GeneratorNoise, draw_from, standard_normal

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    onnxruntime = pytest.importorskip("onnxruntime")


session_of = onnxruntime.InferenceSession


def answers(path, *tensors):
    """What a file says of tensors, by the names of its outputs."""
    session = session_of(path)
    feed = {i.name: t.numpy() for i, t in zip(session.get_inputs(), tensors, strict=True)}
    names = [o.name for o in session.get_outputs()]
    return dict(zip(names, map(torch.from_numpy, session.run(None, feed)), strict=True))


def answer(path, *tensors):
    return next(iter(answers(path, *tensors).values()))


def shrunken(name):
    make, shape = NETS[name]
    net = sparsen(make(), torch.Generator().manual_seed(0))
    return vd.shrink(net, torch.zeros(1, *shape), drop_inputs=True).net, shape


@pytest.mark.parametrize("name", slow_but(NETS, "residual"))
def test_onnx_equals_torch(tmp_path, name):
    small, shape = shrunken(name)
    size = vd.export_onnx(small, torch.zeros(1, *shape), tmp_path / "net.onnx")
    assert size == (tmp_path / "net.onnx").stat().st_size
    for batch in (1, 5):
        x = torch.randn(batch, *shape)
        found = answer(tmp_path / "net.onnx", x)
        torch.testing.assert_close(found, small(x).detach(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", NETS)
def test_program_equals_the_net_at_any_batch(name):
    small, shape = shrunken(name)
    program = vd.export_program(small, torch.zeros(1, *shape))
    for batch in (2, 7):
        x = torch.randn(batch, *shape)
        assert torch.allclose(program.module()(x), small(x), atol=1e-6)


@pytest.mark.parametrize("rows", [1, 3])
def test_the_batch_size_of_the_example_is_not_fixed(tmp_path, rows):
    net = PREDICTED["tokens"][0]().eval()  # asks for the length of its batch
    vd.export_onnx(net, torch.randn(rows, 5, 4), tmp_path / "net.onnx")
    for batch in (1, 2, 3, 7):
        x = torch.randn(batch, 5, 4)
        found = answer(tmp_path / "net.onnx", x)
        torch.testing.assert_close(found, net(x).detach(), rtol=0, atol=1e-5)


def test_onnxruntime_quantises_the_file(tmp_path):
    quantization = pytest.importorskip("onnxruntime.quantization")
    net = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 4)).eval()
    size, x = vd.export_onnx(net, torch.zeros(1, 16), tmp_path / "net.onnx"), torch.randn(5, 16)
    quantization.quantize_dynamic(tmp_path / "net.onnx", tmp_path / "int8.onnx")
    assert (tmp_path / "int8.onnx").stat().st_size < 0.5 * size
    assert (answer(tmp_path / "int8.onnx", x) - net(x)).abs().max() < 0.05 * net(x).abs().max()


def test_inputs_of_a_graph_with_draws_have_names(tmp_path):
    class Two(Parts):
        def forward(self, x, context):
            return self.a(x) + self.b(context)

    net = vd.convert(Two(None, a=nn.Linear(4, 3), b=nn.Linear(2, 3)), vd.sparse_vd()).eval()
    example = (torch.zeros(1, 4), torch.zeros(1, 2))
    vd.export_onnx(vd.freeze(net, 2), example, tmp_path / "net.onnx", noise="input")
    session = session_of(tmp_path / "net.onnx")
    assert [i.name for i in session.get_inputs()] == ["x", "context", "noise"]
    assert [i.shape[0] for i in session.get_inputs()] == ["batch", "batch", 2]
    assert not [p for p in tmp_path.iterdir() if p.name != "net.onnx"]


def test_draws_are_those_of_the_layers():
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))
    vd.convert(net, vd.sparse_vd(log_sigma2=-2.0)).eval()
    x = torch.randn(5, 1, 4, 4)
    graph = vd.freeze(net, 2).graph(x, ["draws"], "input")
    noise = graph.noise_like(x)
    assert noise.shape == (2, 5, 2 * 4 + 3)
    (found,) = graph(x, noise)
    for s in range(2):
        hidden = net[0](x, noise=noise[s, :, :8].view(5, 2, 2, 2)).relu()
        expected = net[3](hidden.flatten(1), noise=noise[s, :, 8:])
        assert torch.allclose(found[s], expected, atol=1e-6)
    assert not torch.allclose(found[0], found[1])


# Predictors.


def mlp(outputs=3):
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, outputs))


def assert_answers(found, predictor, expected):
    expected = dict(zip(predictor.output_names, expected, strict=True))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def check_answers(path, predictor, x, *others):
    """The file answers as the predictor does."""
    assert vd.export_onnx(predictor, x, path) == path.stat().st_size
    for batch in (x, *others):
        found = answers(path, batch)
        assert tuple(found) == predictor.output_names
        assert_answers(found, predictor, predictor.outputs(batch))


@torch.no_grad()
def check_noise(path, predictor, x, *others):
    """The file answers as the graph of the predictor does with the noise that is passed in."""
    vd.export_onnx(predictor, x, path, noise="input")
    for batch in (x, *others):
        graph = predictor.graph(batch, noise="input")
        noise = graph.noise_like(batch)
        given = noise.clone()
        (_, last) = session_of(path).get_inputs()
        assert (last.name, last.shape[2]) == ("noise", noise.shape[2])
        expected = graph(batch, noise)
        assert torch.equal(noise, given)
        assert_answers(answers(path, batch, noise), predictor, expected)


@pytest.mark.parametrize("name", slow_but(["residual", "norms"], "residual"))
def test_moments_are_one_graph_with_the_numbers_of_torch(tmp_path, name):
    net, x = trained(name)
    check_answers(tmp_path / "net.onnx", vd.freeze(net, mode="moments"), x[:1], x, x[3:4])


@pytest.mark.parametrize("name", slow_but(["residual", "tokens", "norms"], "residual"))
def test_draws_are_those_of_the_noise_that_is_passed_in(tmp_path, name):
    net, x = trained(name)
    check_noise(tmp_path / "net.onnx", vd.freeze(net, samples=6), x[:1], x)


def test_a_graph_with_given_noise_draws_as_predict_does():
    net, x, draws = vd.convert(mlp(), vd.sparse_vd(log_sigma2=-2.0)).eval(), torch.randn(5, 4), 7
    predictor = vd.freeze(net, samples=draws)
    p = predictor(x, seed=3)
    # predict draws the numbers of a layer after those of the layer before, (draws N, units) each.

    with draw_from(GeneratorNoise(3)):
        first, second = (standard_normal((draws * 5, units), x) for units in (6, 3))
    noise = torch.cat([first.view(draws, 5, 6), second.view(draws, 5, 3)], 2)
    probs, epistemic = predictor.graph(x, ("probs", "epistemic"), "input")(x, noise)
    torch.testing.assert_close(probs, p.probs, rtol=0, atol=1e-6)
    torch.testing.assert_close(epistemic, p.epistemic, rtol=0, atol=1e-6)


@pytest.mark.parametrize("make, where", [
    (lambda: nn.Linear(4, 3), "*"),
    (lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), "*"),
    pytest.param(mlp, "2", marks=pytest.mark.slow),
], ids=["alone", "before a norm", "last"])  # fmt: skip
def test_one_noisy_layer_is_drawn_in_the_graph(tmp_path, make, where):
    net = vd.convert(make(), vd.sparse_vd(log_sigma2=-2.0), where).eval()
    batches = (torch.randn(rows, 4) for rows in (2, 1, 5))
    check_noise(tmp_path / "net.onnx", vd.freeze(net, samples=6), *batches)


@pytest.mark.parametrize("name", ["norms", pytest.param("residual", marks=pytest.mark.slow)])
def test_draws_of_the_runtime_have_the_distribution_of_torch(tmp_path, name):
    net, x = trained(name)
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
    net = vd.convert(mlp(), getattr(vd, recipe)()).eval()
    check_noise(tmp_path / "net.onnx", vd.freeze(net, samples=4), torch.randn(5, 4))


LIKELIHOODS = {
    "bernoulli": (vd.Bernoulli(), 2), "gaussian": (vd.Gaussian(0.3), 2),
    "heteroscedastic": (vd.HeteroscedasticGaussian(), 2), "values": (vd.Values(), 1),
    "tempered": (vd.Categorical(temperature=2.0), 3),
}  # fmt: skip


@pytest.mark.parametrize("name", slow_but(LIKELIHOODS, "gaussian"))
def test_every_likelihood_answers(tmp_path, name):
    likelihood, outputs = LIKELIHOODS[name]
    net = vd.convert(mlp(outputs), vd.bayes_by_backprop(log_sigma2=-3.0)).eval()
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
    assert (about["likelihood"], about["mode"]) == ("Categorical()", "moments")
    assert about["noise"].startswith("AdditiveGaussian")
    assert about["vardrop"]


def test_a_program_of_torch_answers_too():
    net, x = trained("norms")
    predictor = vd.freeze(net, mode="moments")
    probs, lower = vd.export_program(predictor, x[:1], outputs=("probs", "lower")).module()(x)
    expected = dict(zip(predictor.output_names, predictor.outputs(x), strict=True))
    torch.testing.assert_close(probs, expected["probs"])
    torch.testing.assert_close(lower, expected["lower"])


def dependent():
    """Rows that change each other."""
    return Parts(lambda net, x: net.inner(x - x.mean(0)), inner=nn.Linear(4, 3))


def drawing():
    return Parts(lambda net, x: net.inner(x + torch.randn_like(x)), inner=nn.Linear(4, 3))


@pytest.mark.parametrize("make, recipe, options, shape", [
    (lambda: nn.Sequential(nn.Linear(4, 3)), vd.bayes_by_backprop(), {"samples": 4, "draw": "functions"}, (5, 4)),
    (lambda: Parts(lambda net, x: net.inner(x.mean(1)), inner=nn.Linear(4, 1)), vd.sparse_vd(), {"mode": "moments", "likelihood": vd.Gaussian(0.5)}, (5, 2, 4)),
], ids=["functions are members", "an output has the name of an operation"])  # fmt: skip
def test_a_graph_answers(tmp_path, make, recipe, options, shape):
    predictor = vd.freeze(vd.convert(make(), recipe).eval(), **options)
    check_answers(tmp_path / "net.onnx", predictor, torch.randn(shape))


def lacking():
    return nn.Sequential(nn.Linear(4, 3), Parts(lambda net, x: torch.special.bessel_j0(x)))


INPUT = {"noise": "input"}


@pytest.mark.parametrize("make, frozen, options, message", [
    (dependent, {}, INPUT, "noise='input' is not supported for .* depends on the other examples.* noise='runtime'"),
    (drawing, {}, INPUT, "noise='input' is not supported for .* random functions of torch.* noise='runtime'"),
    (mlp, {"draw": "functions", "memory": 1}, {}, r"not supported for whole functions.* vardrop.Ensemble\(vardrop.draws\(net, samples\)\)"),
    (lacking, {}, {}, "ONNX has, but got `bessel_j0`"),
    (lacking, {"mode": "moments"}, {}, r"known moments, but got '1' \(Parts\)"),
    (mlp, {}, {"outputs": ["mean"]}, "`outputs` to be one of 'probs', .* but got 'mean'"),
    (mlp, None, {"outputs": ["probs"]}, "`outputs` and `noise` require a predictor of vardrop.freeze"),
])  # fmt: skip
def test_what_a_graph_cannot_hold(tmp_path, make, frozen, options, message):
    net, path = make(), tmp_path / "net.onnx"
    if frozen is not None:
        net = vd.freeze(vd.convert(net, vd.sparse_vd()).eval(), **frozen)
    assert_refused(message, vd.export_onnx, net, torch.randn(5, 4), path, **options)
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
    session = session_of(tmp_path / "net.onnx")
    (name,) = (i.name for i in session.get_inputs())
    runs = [session.run(None, {name: x.numpy()})[0] for _ in range(128)]
    drawn = torch.from_numpy(np.concatenate(runs)).double()  # (512, 5, outputs)
    expected = vd.predict(net, x, samples=4096, seed=0, likelihood=vd.Values()).draws.double()
    error = (drawn.var(0) / len(drawn) + expected.var(0) / len(expected)).sqrt()
    assert ((drawn.mean(0) - expected.mean(0)).abs() / error.clamp_min(1e-6)).max() < 5
    ratio = drawn.std(0) / expected.std(0).clamp_min(1e-9)
    assert 0.75 < ratio.min() <= ratio.max() < 1.33


@pytest.mark.slow
def test_a_compiled_package_answers_as_torch_does(tmp_path):
    net = vd.convert(mlp(), vd.sparse_vd(log_sigma2=-3.0)).eval()
    predictor, x = vd.freeze(net, mode="moments"), torch.randn(7, 4)
    program = vd.export_program(predictor, x[:1], outputs=("probs", "epistemic"))
    path = str(tmp_path / "net.pt2")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch._inductor.aoti_compile_and_package(program, package_path=path)
        load = torch._inductor.aoti_load_package(path)
    for batch in (x, x[:1]):
        probs, epistemic = load(batch)
        torch.testing.assert_close(probs, predictor(batch).probs, rtol=0, atol=1e-5)
        torch.testing.assert_close(epistemic, predictor(batch).epistemic, rtol=0, atol=1e-5)
