"""Every estimator has the closed-form mean and variance, on every layer kind."""

import math
from dataclasses import dataclass
from typing import Literal

import pytest
import torch
from torch import nn
from torch.nn import functional as TF

import vardrop as vd
from experiments.diagnostics import noise_level
from tests.refusals import assert_refused
from tests.z_scores import assert_mean, assert_variance
from vardrop.estimators import LocalReparameterization

DRAWS = 4000
LAYERS = {
    "linear": (lambda: nn.Linear(5, 3), (2, 5)),
    "conv1d_groups": (lambda: nn.Conv1d(4, 6, 3, groups=2, padding=1), (1, 4, 5)),
    "conv2d_dilated": (lambda: nn.Conv2d(2, 3, 2, dilation=2, stride=2), (2, 2, 5, 5)),
    "conv2d_depthwise": (lambda: nn.Conv2d(3, 6, 2, groups=3), (1, 3, 3, 3)),
    "conv2d_zeros": (lambda: nn.Conv2d(1, 2, 3, padding=1), (2, 1, 3, 3)),
    "conv2d_reflect": (lambda: nn.Conv2d(1, 2, 3, padding=1, padding_mode="reflect"), (2, 1, 3, 3)),
    "conv2d_replicate": (lambda: nn.Conv2d(1, 2, 3, padding=1, padding_mode="replicate"), (2, 1, 3, 3)),
    "conv2d_circular": (lambda: nn.Conv2d(1, 2, 3, padding=1, padding_mode="circular"), (2, 1, 3, 3)),
    "conv3d": (lambda: nn.Conv3d(1, 2, 2), (1, 1, 3, 3, 3)),
    "transposed1d": (lambda: nn.ConvTranspose1d(2, 4, 3, groups=2), (2, 2, 3)),
    "transposed2d": (lambda: nn.ConvTranspose2d(2, 2, 3, stride=2, padding=1, output_padding=1), (1, 2, 2, 2)),
    "transposed3d": (lambda: nn.ConvTranspose3d(1, 2, 2), (1, 1, 2, 2, 2)),
}  # fmt: skip
ESTIMATORS = {
    "weight_sample": vd.weight_sample, "per_example": vd.per_example,
    "local": vd.local_reparameterization, "flipout": vd.flipout,
}  # fmt: skip


def moments_by_matrix(layer, x):
    """The map x -> y is linear in the weights: read its matrix off, weight by weight."""
    with torch.no_grad(), vd.sampling(layer, on=False):
        mean, weight, columns = layer(x), layer.weight.detach().clone(), []
        for i in range(weight.numel()):
            basis = torch.zeros_like(weight)
            basis.view(-1)[i] = 1.0
            layer.weight.copy_(basis)
            shifted = layer(x)
            layer.weight.zero_()
            columns.append(shifted - layer(x))
        layer.weight.copy_(weight)
    return mean, torch.stack(columns, -1).square() @ layer.variance().detach().flatten()


def draws_of(layer, x, count=DRAWS):
    with vd.sampling(layer), torch.no_grad():
        if isinstance(layer, nn.Linear):
            return torch.stack([layer(x) for _ in range(count)])
        return torch.vmap(lambda _: layer(x), randomness="different")(torch.empty(count))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_bilinear_and_embedding(estimator):
    recipe = gaussian(estimator)
    bilinear = vd.convert(nn.Bilinear(3, 2, 2).double(), recipe)
    a, b = torch.randn(2, 3, dtype=torch.float64), torch.randn(2, 2, dtype=torch.float64)
    with vd.sampling(bilinear), torch.no_grad():
        draws = torch.vmap(lambda _: bilinear(a, b), randomness="different")(torch.empty(DRAWS))
    assert_mean(draws, TF.bilinear(a, b, bilinear.weight, bilinear.bias).detach())
    assert_variance(draws, TF.bilinear(a * a, b * b, bilinear.variance()).detach())
    table = vd.convert(nn.Embedding(4, 3, padding_idx=1).double(), recipe)
    index = torch.tensor([0, 2, 2])
    assert_mean(draws := draws_of(table, index), table.weight[index].detach())
    assert_variance(draws, table.variance()[index].detach())
    assert torch.equal(draws_of(table, torch.tensor([1]), 5), torch.zeros(5, 1, 3).double())


def test_noisy_bias_adds_its_variance():
    recipe = vd.Recipe(vd.AdditiveGaussian(-2.0), vd.Normal(), noisy_bias=True)
    layer = vd.convert(nn.Linear(2, 3).double(), recipe)
    draws = draws_of(layer, torch.zeros(1, 2, dtype=torch.float64))
    assert_mean(draws, layer.bias.detach())
    assert_variance(draws, torch.full((1, 3), float(torch.tensor(-2.0).exp()) + 1e-8))


@pytest.mark.parametrize("estimator, correlated", [
    ("weight_sample", True), ("per_example", False), ("local", False), ("flipout", False),
])  # fmt: skip
def test_examples_are_uncorrelated_but_for_a_shared_draw(estimator, correlated):
    recipe = vd.Recipe(vd.AdditiveGaussian(-1.0), estimator=ESTIMATORS[estimator])
    layer = vd.convert(nn.Linear(4, 1).double(), recipe)
    x = torch.randn(1, 4, dtype=torch.float64).expand(2, 4)  # the same example twice
    draws = draws_of(layer, x).squeeze(-1)
    product = (draws[:, 0] - draws[:, 0].mean()) * (draws[:, 1] - draws[:, 1].mean())
    variance = (x[0].square() * layer.variance()[0]).sum().detach()
    assert_mean(product, variance if correlated else torch.tensor(0.0))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_explicit_noise_repeats_output_and_gradient(estimator):
    layer, x = vd.convert(nn.Linear(5, 3), gaussian(estimator)), torch.randn(4, 5)
    weight_noise = (torch.randn(3, 5), None)
    noise = {
        "weight_sample": weight_noise,
        "per_example": (torch.randn(4, 3, 5), None),
        "local": torch.randn(4, 3),
        "flipout": (weight_noise, torch.ones(4, 5), -torch.ones(4, 3)),
    }[estimator]
    outs = [layer(x, noise=noise) for _ in range(2)]
    assert torch.equal(*outs)
    assert torch.equal(*[torch.autograd.grad(y.sum(), layer.log_sigma2)[0] for y in outs])


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_explicit_noise_of_another_estimator_is_an_error(estimator):
    layer, wrong = vd.convert(nn.Linear(5, 3), gaussian(estimator)), torch.randn(2, 4, 3)
    wrong = (wrong, None) if estimator == "local" else wrong
    assert_refused("Expected `noise` to be .*, but got", layer, torch.randn(4, 5), noise=wrong)


@dataclass(frozen=True)
class Laplace(vd.posteriors.Posterior):
    """A third party's posterior, w - weight ~ Laplace(exp(log_scale)), with what it declares."""

    noise_per: Literal["weight"] | None = None
    has_entropy: bool = False

    def initial(self, weight, axes):
        return {"log_scale": torch.full_like(weight, -1.0)}

    def variance(self, weight, tensors):
        return 2 * torch.exp(2 * tensors["log_scale"])

    def draw(self, weight, axes, batch=()):
        u = vd.functional.uniform((*batch, *weight.shape), weight) - 0.5
        return -u.sign() * torch.log1p(-2 * u.abs())

    def perturbation(self, weight, noise, tensors):
        return tensors["log_scale"].exp() * noise

    def log_alpha(self, weight, tensors):
        return self.log_variance(weight, tensors) - vd.functional.log_square(weight)

    def entropy(self, weight, tensors):
        return 1 + math.log(2) + tensors["log_scale"]


LIMIT, ENTROPIC = LocalReparameterization(central_limit=True), Laplace("weight", has_entropy=True)


@pytest.mark.parametrize("posterior, estimator, match", [
    (Laplace(), vd.local_reparameterization, "does not declare in `noise_per`.*Use per_example"),
    (Laplace(), LIMIT, "does not declare in `noise_per`"),
    (Laplace("weight"), vd.local_reparameterization, "not normal.*central_limit=True"),
    (vd.ZeroMean("sign"), vd.local_reparameterization, "not normal.*central_limit=True"),
    (vd.posteriors.Bernoulli(0.5), vd.local_reparameterization, "not normal"),
    (vd.posteriors.Bernoulli(0.5, per="input"), vd.local_reparameterization, "independent noise"),
    (vd.posteriors.Bernoulli(0.5, per="input"), LIMIT, "independent noise"),
    (vd.posteriors.Bernoulli(0.5), vd.flipout, "not symmetric.*Use per_example"),
])  # fmt: skip
def test_an_estimator_takes_what_it_fits(posterior, estimator, match):
    assert_refused(match, vd.Recipe, posterior, estimator=estimator)
    assert_refused(match, vd.Linear, 3, 2, posterior=posterior, estimator=estimator)


def gaussian(name):
    return vd.Recipe(vd.AdditiveGaussian(-2.0), estimator=ESTIMATORS[name])


SHARED = vd.Recipe(vd.posteriors.Bernoulli(0.3, per="input"), estimator=vd.per_example)
# Every layer with one estimator, every estimator and posterior with one layer of each family.
FAMILIES = ["linear", "conv2d_dilated", "transposed1d"]
MATCHED = [(kind, gaussian("local")) for kind in LAYERS]
MATCHED += [(k, gaussian(name)) for k in FAMILIES for name in ESTIMATORS if name != "local"]
MATCHED += [(kind, recipe) for kind in ("linear", "transposed1d") for recipe in (
    vd.variational_dropout("B", per="input"), vd.variational_dropout("B", per="output", drop_rate=0.2),
    vd.variance_layer("gaussian"), vd.variance_layer("gaussian", vd.flipout),
    vd.variance_layer("sign"), vd.variance_layer("sign", estimator=LIMIT),
    vd.variance_layer("uniform"), vd.variance_layer("uniform", vd.weight_sample),
    vd.dropconnect(0.3), vd.dropconnect(0.3, estimator=vd.per_example), SHARED,
)]  # fmt: skip
LIMITED = (Laplace("weight"), vd.ZeroMean("uniform"), vd.posteriors.Bernoulli(0.5))
MATCHED += [(k, vd.Recipe(q, estimator=LIMIT)) for k in FAMILIES[:2] for q in LIMITED]


@pytest.mark.parametrize("kind, recipe", MATCHED)
def test_mean_and_variance(kind, recipe):
    make, shape = LAYERS[kind]
    layer, x = vd.convert(make().double(), recipe), torch.randn(shape, dtype=torch.float64)
    mean, variance = moments_by_matrix(layer, x)
    assert_mean(draws := draws_of(layer, x), mean)
    if recipe != SHARED or kind == "linear":  # a mask shared over positions correlates the terms
        assert_variance(draws, variance, mean)


@pytest.mark.parametrize("make, shape, adds", [
    (lambda: nn.Linear(3, 2), (1, 3), True),
    (lambda: nn.Conv2d(2, 3, 1), (1, 2, 2, 2), True),
    (lambda: nn.Conv2d(2, 3, 2), (1, 2, 2, 2), False),
])  # fmt: skip
def test_moments_where_a_mask_serves_all_weights_of_an_input(make, shape, adds):
    recipe = vd.Recipe(vd.posteriors.Bernoulli(0.5, per="input"), estimator=vd.per_example)
    layer, x = vd.convert(make(), recipe), torch.randn(shape)
    assert layer.posterior.adds_variances(layer.weight, layer.axes) == adds
    if not adds:
        assert_refused("independent noise", noise_level, layer, x)
    given = {"mode": "moments", "likelihood": vd.Gaussian(1.0)}
    if isinstance(layer, nn.Conv2d):
        assert_refused("shared by the positions", vd.predict, layer, x, **given)
        return
    found, draws = vd.predict(layer, x, **given), draws_of(layer, x)
    assert_mean(draws, found.mean)
    assert_variance(draws, found.epistemic)


def test_an_own_posterior_with_an_entropy_has_a_sampled_kl():
    recipe = vd.Recipe(ENTROPIC, vd.MonteCarlo(vd.Normal()), vd.weight_sample)
    layer = vd.convert(nn.Linear(3, 2).double(), recipe)
    with torch.no_grad():
        draws = torch.stack([vd.kl(layer) for _ in range(4000)])
    scale = math.exp(-1.0)
    cross = 0.5 * (layer.weight.detach().square() + 2 * scale**2 + math.log(2 * math.pi))
    assert_mean(draws, (cross - (1 + math.log(2 * scale))).sum())


@pytest.mark.parametrize("posterior, prior, advice", [
    (ENTROPIC, vd.Normal(), True),
    (Laplace("weight"), vd.Normal(), False),
    (ENTROPIC, vd.LogUniform(), False),
])  # fmt: skip
def test_sampling_is_advised_only_where_it_works(posterior, prior, advice):
    with pytest.raises(vd.UnregisteredKLError, match="Add one with `register_kl`") as caught:
        vd.Recipe(posterior, prior, vd.weight_sample)
    assert ("MonteCarlo(prior)" in str(caught.value)) == advice
    if not advice and isinstance(prior, vd.Normal):
        with pytest.raises(vd.VardropError, match="does not define `entropy`"):
            vd.Recipe(posterior, vd.MonteCarlo(prior), vd.weight_sample)
