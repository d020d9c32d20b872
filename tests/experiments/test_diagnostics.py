"""Diagnostics against cases with a known answer, against quadrature and against samples."""

import math

import pytest
import torch
from scipy.integrate import quad
from scipy.stats import norm, t
from torch import nn

import vardrop as vd
from experiments import diagnostics
from experiments.diagnostics import accuracies, activation_alpha, gradient_variance
from tests.nets import assert_unchanged
from tests.refusals import assert_refused
from tests.replay import replay

covariances = diagnostics.likelihood_covariance
WEIGHTS, BATCH, SIGMA, SPREAD = 100, 5, 0.7, 1.3
ESTIMATORS = (vd.weight_sample, vd.per_example, vd.local_reparameterization, vd.flipout)


def linear(outputs, mean=0.0, sigma=SIGMA):
    net = vd.convert(nn.Linear(1, outputs, bias=False), vd.bayes_by_backprop()).double()
    net.weight.data.fill_(mean)
    net.log_sigma2.data.fill_(2 * math.log(sigma))
    return net


def classes(count, size=6):
    return [(torch.randn(size, 3), torch.randint(2, (size,))) for _ in range(count)]


# Gradient variance: y_k = w_k + noise, loss = 1/2 sum_k (w_k - y_k)^2. The gradient is the batch
# mean of w_ik - y_ik, with w_ik one draw per batch or one per example.


def half_square(output, target):
    return 0.5 * (output - target).square().sum(1).mean()


def noisy_targets(count, spread):
    x = torch.ones(BATCH, 1, dtype=torch.float64)
    return [(x, spread * torch.randn(BATCH, WEIGHTS).double()) for _ in range(count)]


PER_EXAMPLE = (SIGMA**2 + SPREAD**2) / BATCH


@pytest.mark.parametrize("estimator, noise, spread, name, expected", [
    (vd.weight_sample, True, SPREAD, "weight", SIGMA**2 + SPREAD**2 / BATCH),
    *((estimator, True, SPREAD, "weight", PER_EXAMPLE) for estimator in ESTIMATORS[1:]),
    (None, False, SPREAD, "weight", SPREAD**2 / BATCH),
    # Without data noise the gradient to log sigma^2 is the mean of sigma^2 zeta^2 / 2.
    (vd.weight_sample, True, 0.0, "log_sigma2", SIGMA**4 / 2),
    (vd.local_reparameterization, True, 0.0, "log_sigma2", SIGMA**4 / 2 / BATCH),
])  # fmt: skip
def test_gradient_variance_is_in_the_interval(estimator, noise, spread, name, expected):
    # Ten comparisons share the error rate of 1e-6.
    data = noisy_targets(200, spread)
    result = gradient_variance(linear(WEIGHTS), data, half_square, estimator, noise)[name]
    low, high = result.interval(1 - 1e-7)
    assert low < expected < high
    assert name == "log_sigma2" or high - low < 0.3 * expected  # the interval is narrow


def test_num_data_scales_by_its_square_and_repeats_add_pairs():
    net, data = linear(WEIGHTS), noisy_targets(4, 1.0)
    once = gradient_variance(net, data, half_square, noise=False)["weight"]
    options = {"noise": False, "num_data": 10, "repeats": 3}
    scaled = gradient_variance(net, data, half_square, **options)["weight"]
    assert scaled.value == pytest.approx(100 * once.value)
    assert (once.repetitions, scaled.repetitions) == (2, 6)


def test_frozen_and_unused_parameters():
    net = vd.convert(nn.Linear(3, 2), vd.variance_layer())
    assert set(gradient_variance(net, classes(4))) == {"sigma", "bias"}
    assert gradient_variance(net, classes(4), noise=False)["sigma"].value == 0


# Likelihood: L_i = w x_i with x_i ~ N(1, 0.6^2), so Var = mean^2 spread^2 + sigma^2 (1 +
# spread^2), and two examples share sigma^2 only if they share the draw of w.


def output_itself(output, target):
    return output.squeeze(1)


def noisy_inputs(count):
    x = 1 + 0.6 * torch.randn(count, 6, 1, dtype=torch.float64)
    return [(x[i], x[i]) for i in range(count)]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_likelihood_covariance_of_a_linear_case(estimator):
    result = covariances(linear(1, 0.8, 0.5), noisy_inputs(2000), output_itself, estimator)
    covariance = 0.5**2 if estimator == vd.weight_sample else 0.0
    variance = 0.8**2 * 0.6**2 + 0.5**2 * (1 + 0.6**2)
    limit = norm.isf(1e-6 / 2 / 8)  # eight comparisons
    for part, expected in ((result.covariance, covariance), (result.variance, variance)):
        assert abs(part.value - expected) < limit * part.standard_error
        assert part.standard_error < 0.05
    assert result.batch_size == 6
    assert covariances(vd.convert(nn.Linear(3, 2), vd.sparse_vd()), classes(5)).variance.value > 0


def test_the_parts_add_up_to_the_variance_of_the_batch_means():
    net, data = linear(1, 0.8, 0.5), noisy_inputs(50)
    arguments = net, data, output_itself, vd.weight_sample
    result = replay(diagnostics.likelihood_covariance, *arguments, num_data=7)
    net.estimator = vd.weight_sample
    means = torch.stack([7 * net(x).mean() for x, _ in data])
    assert result.falling + result.constant == pytest.approx(means.var().item())
    v, c = result.variance.value, result.covariance.value
    assert means.var().item() == pytest.approx(49 * (v / 6 + 5 / 6 * c))


def test_jackknife_error_is_the_spread_over_repetitions():
    # The spread of 60 repetitions is itself known to 1 / sqrt(2 * 59) = 9%, the mean of the
    # jackknifed errors to less; 5.5 standard errors make 50%.
    arguments = output_itself, vd.weight_sample
    net = linear(1, 0.8, 0.5)
    runs = [covariances(net, noisy_inputs(60), *arguments).covariance for _ in range(60)]
    spread = torch.tensor([r.value for r in runs]).std().item()
    stated = torch.tensor([r.standard_error for r in runs]).square().mean().sqrt().item()
    assert stated == pytest.approx(spread, rel=0.5)


@pytest.mark.parametrize("df", [3, 5, 10, 100])
def test_quantiles_and_intervals_are_those_of_student(df):
    for probability in (0.9, 0.975, 0.99):
        exact = t.ppf(probability, df)
        assert diagnostics.student_quantile(probability, df) == pytest.approx(exact, rel=0.01)
    estimate = diagnostics.Estimate(2.0, 0.1, 31)
    assert estimate.interval(0.95) == pytest.approx(t.interval(0.95, 30, 2.0, 0.1), rel=1e-4)
    assert str(estimate) == "2 (95 %: 1.8 to 2.2)"


# Noise behind a non-linearity.

FUNCTIONS = {"relu": lambda y: max(y, 0.0), "abs": abs, "identity": lambda y: y}


@pytest.mark.parametrize("activation", FUNCTIONS)
@pytest.mark.parametrize("mean, std", [(0.3, 1.0), (-2.0, 1.5), (4.0, 0.5), (-0.1, 0.02)])
def test_alpha_matches_quadrature(activation, mean, std):
    def moment(power):
        ends = (mean - 40 * std, mean + 40 * std)
        points, f = sorted({mean, min(max(0.0, ends[0]), ends[1])}), FUNCTIONS[activation]
        density = norm(mean, std).pdf
        weighed = lambda y: f(y) ** power * density(y)
        return float(quad(weighed, *ends, points=points, limit=500, epsabs=0)[0])

    first, second = moment(1), moment(2)
    alpha = activation_alpha(*torch.tensor([mean, std], dtype=torch.float64), activation)
    assert alpha.item() == pytest.approx((second - first**2) / first**2, rel=1e-6)


def test_zero_mean_constants_and_a_dead_unit():
    zero, std = torch.zeros(3).double(), torch.tensor([1e-3, 1.0, 1e3]).double()
    assert activation_alpha(zero, std, "abs").tolist() == pytest.approx([math.pi / 2 - 1] * 3)
    assert activation_alpha(zero, std, "relu").tolist() == pytest.approx([math.pi - 1] * 3)
    assert bool(activation_alpha(zero, std, "identity").isinf().all())
    assert activation_alpha(torch.tensor(-50.0), torch.tensor(1.0), "relu").item() == math.inf


@pytest.mark.parametrize("layer, shape", [
    (lambda: nn.Linear(6, 3, bias=False), (1, 6)),
    (lambda: nn.Conv1d(2, 3, 2, bias=False), (1, 2, 4)),
    (lambda: nn.ConvTranspose1d(2, 3, 2, bias=False), (1, 2, 2)),
])  # fmt: skip
@pytest.mark.parametrize("activation", ["relu", "abs"])
def test_layer_matches_its_samples(layer, shape, activation):
    net, x, draws = layer().double(), torch.randn(shape).double(), 40_000
    vd.convert(net, vd.variational_dropout(per="layer", drop_rate=0.9, max_alpha=None))
    alpha = diagnostics.noise_level(net, x, activation)[""]
    with torch.no_grad(), vd.sampling(net):
        y = net(x.expand(draws, *x.shape[1:]))
    y = y.relu() if activation == "relu" else y.abs()
    # Delta method: the variance of s^2 / m^2 from its influence function.
    m, v = y.mean(0), y.var(0)
    error = (((y - m).square() - v) / m**2 - 2 * v * (y - m) / m**3).std(0) / draws**0.5
    limit = norm.isf(1e-6 / 2 / 60)  # fewer than sixty outputs in all cases together
    assert ((v / m**2 - alpha[0]).abs() / error).max() < limit


# Permuted variances: the same multiset, the same means, another model.

RECIPES = {
    "variance": vd.variance_layer(), "sign": vd.variance_layer("sign"), "sparse": vd.sparse_vd(),
    "layer": vd.variational_dropout(per="layer"), "dropconnect": vd.dropconnect(),
}  # fmt: skip


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("layer", [lambda: nn.Linear(6, 5), lambda: nn.Conv2d(2, 3, 2)])
def test_variances_move_and_means_stay(name, layer):
    net = vd.convert(layer().double(), RECIPES[name])
    if name == "sparse":
        net.log_sigma2.data.normal_()
    before = net.variance().detach().clone()
    generators = [torch.Generator().manual_seed(seed) for seed in (3, 3, 4)]
    after, again, other = (diagnostics.permute_variances(net, g).variance() for g in generators)
    assert not torch.equal(after, before)
    assert torch.equal(after, again)
    assert not torch.equal(after, other)
    assert torch.equal(after.flatten().sort().values, before.flatten().sort().values)
    assert torch.equal(diagnostics.permute_variances(net).weight, net.weight)
    assert torch.equal(net.variance(), before)
    assert not isinstance(net.posterior, diagnostics.Permuted)


@pytest.mark.parametrize("estimator", [vd.weight_sample, vd.per_example, vd.flipout])
def test_draws_have_the_permuted_variance(estimator):
    net = vd.convert(nn.Linear(3, 2, bias=False).double(), vd.variance_layer("sign", estimator))
    shuffled = diagnostics.permute_variances(net, torch.Generator().manual_seed(1))
    with torch.no_grad(), vd.sampling(shuffled):
        y = shuffled(torch.eye(3).double())  # signs: |y| is the standard deviation of each weight
    assert torch.allclose(y.abs(), shuffled.variance().sqrt().T)


def test_tied_layers_share_their_permutation():
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    net[1].weight = net[0].weight
    after = diagnostics.permute_variances(vd.convert(net, vd.variance_layer()))
    assert torch.equal(after[0].variance(), after[1].variance())


def test_scores_before_and_after_a_permutation():
    net = vd.convert(nn.Linear(4, 4), vd.variance_layer())
    result = diagnostics.permutation_test(net, lambda m: m.variance()[0, 0].item(), permutations=7)
    assert result.before == net.variance()[0, 0].item()
    assert result.after.shape == (7,)
    assert result.drop == pytest.approx(result.before - result.after.mean().item())
    assert str(result).startswith(f"{result.before:.4f} -> {result.after.mean().item():.4f} +- ")


# Accuracies of mean, draw and ensemble, and the shares of alpha.


def test_ensemble_averages_probabilities():
    # Three unequal draws of a classifier: the votes go to class 1, the mean probability to class 0.
    class Scripted(vd.noisy.Noisy):
        outputs = iter([[0.9, 0.1], [0.4, 0.6], [0.4, 0.6]])

        def forward(self, x):
            row = next(self.outputs) if self.is_sampling else [0.0, 1.0]
            return torch.tensor([row]).log().expand(len(x), 2)

    result = accuracies(Scripted(), [(torch.zeros(4, 1), torch.zeros(4).long())], samples=3)
    assert (result.deterministic, result.ensemble) == (0.0, 1.0)
    assert result.sample == pytest.approx(1 / 3)


def test_batches_of_different_size_are_weighted():
    net = vd.convert(nn.Linear(1, 2, bias=False), vd.bayes_by_backprop(log_sigma2=-40.0))
    net.weight.data.copy_(torch.tensor([[1.0], [-1.0]]))
    x = torch.ones(3, 1)
    loader = [(x, torch.tensor([0, 0, 0])), (x[:1], torch.tensor([1]))]
    assert accuracies(net, loader, samples=2).ensemble == 0.75


def test_shares_of_alpha():
    net = vd.convert(nn.Linear(4, 2, bias=False), vd.sparse_vd())
    with torch.no_grad():
        net.weight.fill_(1.0)
        net.log_sigma2.copy_(torch.tensor([[-1.0, -2.0, 0.0, 1.0], [2.9, 3.0, 4.0, math.inf]]))
        state = diagnostics.transition(net, [(torch.ones(1, 4), torch.zeros(1).long())], samples=1)
    assert (state.below_one, state.between, state.above) == (0.25, 0.375, 0.375)
    assert str(state).startswith("alpha < 1: 25.0%, 1..e^3: 37.5%, >= e^3: 37.5% | accuracy det ")


@pytest.mark.parametrize("measure", [
    lambda net, data: gradient_variance(net, data, estimator=vd.per_example),
    lambda net, data: diagnostics.noise_level(net, data[0][0]),
    lambda net, data: accuracies(net, data, samples=2),
    lambda net, data: diagnostics.likelihood_covariance(net, data, estimator=vd.weight_sample),
])  # fmt: skip
def test_the_model_is_left_unchanged(measure):
    net = nn.Sequential(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    vd.convert(net, vd.variance_layer("sign"), include="0")
    vd.convert(net, vd.sparse_vd(), include="3")
    net[1].eval()
    net[3].weight.grad = torch.ones(2, 4)
    with assert_unchanged(net):
        result = measure(net, classes(4))
    assert torch.equal(net[3].weight.grad, torch.ones(2, 4))
    assert net[0].sigma.grad is None
    assert (net[0].estimator, net[3].estimator) == (vd.flipout, vd.local_reparameterization)
    assert (net[0].sampling, len(net[0]._forward_pre_hooks)) == (None, 0)
    if isinstance(result, dict) and "0" in result:  # the noise level of each layer
        assert {k: tuple(v.shape) for k, v in result.items()} == {"0": (6, 4), "3": (6, 2)}
        assert torch.allclose(result["0"], torch.tensor(math.pi - 1), atol=1e-4)


def test_the_estimator_is_restored_after_an_error():
    net, uneven = linear(WEIGHTS), noisy_targets(4, 1.0)
    uneven[3] = tuple(part[:2] for part in uneven[3])
    assert_refused("but got 5 and 2", gradient_variance, net, uneven, half_square, vd.flipout)
    assert net.estimator == vd.local_reparameterization


@pytest.mark.parametrize("error, measure, net, arguments", [
    ("at least 4 batches", gradient_variance, linear(WEIGHTS), (noisy_targets(3, 1.0), half_square)),
    ("an estimator that fits the posterior", gradient_variance, vd.convert(nn.Linear(2, 2), vd.dropconnect()), ([], None, vd.flipout)),
    ("`net` to have noisy modules", gradient_variance, nn.Linear(2, 2), ([],)),
    ("`loss` to give one value for each", diagnostics.likelihood_covariance, linear(1), (noisy_inputs(3), lambda output, _: output.mean())),
    ("at least 3 batches", diagnostics.likelihood_covariance, linear(1), (noisy_inputs(2), output_itself)),
    ("`net` to have noisy weights", diagnostics.permute_variances, vd.convert(nn.Linear(2, 2), vd.binary_dropout()), ()),
    (r"shape \(8,\) in `loader`, but got \(8, 1\)", accuracies, linear(2).float(), ([(torch.zeros(8, 1), torch.zeros(8, 1).long())],)),
    ("`loader` to have examples", accuracies, linear(2), ([],)),
])  # fmt: skip
def test_errors(error, measure, net, arguments):
    assert_refused(error, measure, net, *arguments)
