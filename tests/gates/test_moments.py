"""Draws of every gate against their analytic moments, and KLs against quadrature."""

import math

import mpmath as mp
import pytest
import torch
from torch.distributions import Normal, kl_divergence

import vardrop as vd
from tests.z_scores import assert_mean, assert_variance
from vardrop.functional import concrete_mean_ratio

N = 100_000


def draws(noise, x=None):
    """Independent multipliers of one unit: N units with the same tensors, one example."""
    x = torch.ones(1, N) if x is None else x
    tensors = {**noise.initial(N), **noise.statistics(N)}
    with torch.no_grad():
        return noise.multiplier(x, -1, tensors).expand(1, N).flatten()


MOMENTS = [
    (vd.BinaryDropout(0.1), 1 / 9), (vd.BinaryDropout(0.1, "channel"), 1 / 9),
    (vd.BinaryDropout(0.8), 4.0), (vd.BinaryDropout(0.8, "channel"), 4.0),
    (vd.GaussianDropout(alpha=0.25), 0.25), (vd.NormalJeffreys(log_sigma2=math.log(0.25)), 0.25),
]  # fmt: skip


@pytest.mark.parametrize("noise, variance", MOMENTS)
def test_noise_of_mean_one(noise, variance):
    z = draws(noise)
    assert_mean(z, 1.0)
    assert_variance(z, variance)


@pytest.mark.parametrize("noise", [vd.BinaryDropout(0.5), vd.GaussianDropout(per="layer")])
def test_granularity(noise):
    x = torch.ones(64, 3, 4, 4)
    for granularity, same in [("element", ()), ("channel", (2, 3)), ("example", (1, 2, 3))]:
        value = type(noise)(**{**noise.__dict__, "granularity": granularity})
        z = value.multiplier(x, 1, value.initial(3)).expand_as(x)
        for axis in (1, 2, 3):
            assert bool((z == z.narrow(axis, 0, 1)).all()) == (axis in same), (granularity, axis)
        assert not (z == z[:1]).all(), "examples share their noise"


def test_standout_keeps_by_the_units_own_activation():
    x, noise = torch.full((1, N), 0.7), vd.Standout(scale=2.0, shift=-1.0)
    assert_mean(draws(noise, x), torch.sigmoid(torch.tensor(0.4)))
    torch.testing.assert_close(noise.mean(x, -1, {}), torch.sigmoid(2 * x - 1))


def test_concrete_dropout_drops_at_its_rate():
    assert_mean((draws(vd.ConcreteDropout(drop_rate=0.3)) > 0.5 / 0.7).float(), 0.7)


@pytest.mark.parametrize(("a", "b"), [(0.3133, 1.0), (2.127, 1.0), (0.5, 3.0)])
def test_beta_bernoulli_opens_with_the_mean_of_pi(a, b):
    noise = vd.BetaBernoulli(a=a, b=b)
    mean = noise.retain_probability(noise.initial(1))
    assert_mean((draws(noise) > 0.5).float(), mean.double())
    exact = b * math.exp(math.lgamma(1 + 1 / a) + math.lgamma(b) - math.lgamma(1 + 1 / a + b))
    assert mean.item() == pytest.approx(exact, rel=1e-5)


def test_beta_bernoulli_shares_pi_within_a_batch():
    noise = vd.BetaBernoulli(a=0.3133)
    z = noise.multiplier(torch.ones(20_000, 40), -1, noise.initial(40)) > 0.5
    # The frequency estimates pi of each unit, which varies far beyond the error.
    assert z.float().mean(0).std() > 0.2


def test_dependent_gate_opens_with_the_product_of_both_means():
    base = vd.BetaBernoulli(a=2.0, temperature=1e-3)
    noise = vd.DependentBetaBernoulli(base, joint=True, scale=0.3, shift=0.4, std=0.5)
    x = torch.full((1, N), 0.5)
    mean = 0.3 * 0.5 / math.sqrt(1 + 1e-5) + 0.4  # statistics at their start: mean 0, variance 1
    with mp.workdps(20):  # E clip(N(mean, 0.5^2), 0, 1)
        clipped = mp.quad(lambda v: max(0, min(1, v)) * mp.npdf(v, mean, 0.5), [-4, 0, 0.5, 1, 5])
    opened = (draws(noise, x) > 0.5).float()
    assert_mean(opened, float(clipped) * float(base.retain_probability(base.initial(1))))


@pytest.mark.parametrize(("mu", "log_sigma"), [(0.0, -5.0), (-3.0, 0.0), (-1.0, 2.0)])
def test_log_normal(mu, log_sigma):
    noise = vd.LogNormal(mu=mu, log_sigma=log_sigma, threshold=1e-9)
    tensors = noise.initial(1)
    mean, snr, z = noise.unit_mean(tensors), noise.relevance(tensors, 1).score, draws(noise)
    assert_mean(z, mean.double())
    assert_variance(z, (mean / snr).square().double())
    assert noise.multiplier(torch.ones(5, 3, 2, 2), 1, noise.initial(3)).shape == (1, 3, 1, 1)


@pytest.mark.parametrize("drop_rate", [0.2, 0.9])
def test_hard_concrete_is_open_with_its_probability(drop_rate):
    noise = vd.HardConcrete(drop_rate=drop_rate)
    z = draws(noise)
    assert_mean((z > 0).float(), noise.open_probability(noise.initial(1)).double())
    assert ((z >= 0) & (z <= 1)).all()
    assert (z == 0).any()
    assert (z == 1).any()


# ---- KL


def test_dependent_kl_keeps_the_constant_of_the_normal_kl():
    noise = vd.DependentBetaBernoulli(joint=True, shift=0.3, std=0.7)
    tensors = noise.initial(4)
    expected = 4 * kl_divergence(Normal(0.3, 0.7), Normal(0.0, math.sqrt(5.0)))
    torch.testing.assert_close(noise.kl(tensors, 4), expected + noise.base.kl(tensors, 4))
    staged = vd.DependentBetaBernoulli(shift=0.3, std=0.7)  # leaves the frozen base out
    torch.testing.assert_close(staged.kl(tensors, 4), torch.as_tensor(expected))
    at_prior = vd.DependentBetaBernoulli(joint=True, shift=0.0, std=math.sqrt(5.0))
    tensors = at_prior.initial(4)
    assert (at_prior.kl(tensors, 4) - at_prior.base.kl(tensors, 4)).abs() < 1e-5


@pytest.mark.parametrize("log_alpha", [-9.0, -3.0, 0.0, 3.0])
def test_normal_jeffreys_kl_is_that_of_the_log_uniform_prior(log_alpha):
    noise = vd.NormalJeffreys(log_sigma2=log_alpha)
    tensors = {k: v.double() for k, v in noise.initial(3).items()}
    u = torch.tensor(0.5 * math.exp(-log_alpha), dtype=torch.float64)
    exact = 3 * vd.functional.log_uniform_kl(u)  # which is tested against quadrature
    assert noise.kl(tensors, 3).item() == pytest.approx(exact.item(), rel=1e-6)


@pytest.mark.parametrize("rate", [0.05, 0.5, 0.9])
def test_concrete_kl_counts_the_entropy_once_a_unit(rate):
    noise = vd.ConcreteDropout(drop_rate=rate, length_scale=0.3)
    tensors, weight = noise.initial(7), torch.randn(5, 7)
    entropy = -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))
    assert noise.kl(tensors, 7).item() == pytest.approx(-7 * entropy, rel=1e-5)
    expected = 0.5 * 0.3**2 * weight.square().sum().item() / (1 - rate)
    assert noise.weight_kl(weight, tensors).item() == pytest.approx(expected, rel=1e-5)


def test_l0_counts_every_weight_of_an_open_unit():
    noise = vd.HardConcrete(penalty=0.1, drop_rate=0.5)
    tensors, weight = noise.initial(7), torch.randn(5, 7)
    total = noise.weight_kl(weight, tensors)
    open_probability = noise.open_probability(noise.initial(1)).item()
    assert total.item() == pytest.approx(0.1 * 35 * open_probability, rel=1e-5)


# ---- extremes


EXTREMES = {
    "a_1e-4": (vd.BetaBernoulli(), {"raw_a": math.log(1e-4)}),
    "b_50": (vd.BetaBernoulli(), {"raw_b": 50.0}),
    "b_small": (vd.BetaBernoulli(), {"raw_b": -30.0}),
    "retain_none": (vd.BetaBernoulli(), {"raw_a": -60.0}),
    "retain_all": (vd.BetaBernoulli(), {"raw_a": 60.0}),
    "dependent_closed": (vd.DependentBetaBernoulli(joint=True), {"shift": -50.0}),
    "dependent_open": (vd.DependentBetaBernoulli(joint=True), {"shift": 50.0}),
    "concrete_never": (vd.ConcreteDropout(), {"drop_logit": -1e4}),
    "concrete_always": (vd.ConcreteDropout(), {"drop_logit": 40.0}),
    "l0_closed": (vd.HardConcrete(), {"logit": -1e4}),
    "l0_open": (vd.HardConcrete(), {"logit": 1e4}),
    "log_normal_low": (vd.LogNormal(), {"mu": -90.0, "log_sigma": -40.0}),
    "log_normal_high": (vd.LogNormal(), {"mu": 50.0, "log_sigma": 40.0}),
    "jeffreys_zero": (vd.NormalJeffreys(), {"mu": 0.0, "log_sigma2": -20.0}),
}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("noise, values", EXTREMES.values(), ids=EXTREMES)
def test_everything_is_finite_at_the_extremes(noise, values, autocast):
    gate = vd.Gate(noise, units=3)
    for name, value in values.items():
        getattr(gate, name).data.fill_(value)
    x = torch.randn(4, 3, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        features = torch.mm(x, torch.eye(3))
        total = gate(features).float().sum() + gate.kl()
        weight = noise.weight_kl(torch.ones(2, 3), gate.tensors)
        total = total + gate.eval()(features).float().sum() + (0 if weight is None else weight)
    total.backward()
    assert torch.isfinite(total)
    assert torch.isfinite(x.grad).all()
    for name, parameter in gate.named_parameters():
        assert torch.isfinite(parameter.grad).all(), name


# ---- the gate itself


def test_relevance_follows_the_rule_of_each_method():
    for name, noise, values in (
        ("raw_a", vd.BetaBernoulli(), [3.0, -10.0]),
        ("mu", vd.NormalJeffreys(log_sigma2=-9.0), [1.0, 1e-3]),
        ("logit", vd.HardConcrete(), [3.0, -9.0]),
        ("log_sigma", vd.LogNormal(mu=-5.0), [-5.0, 3.0]),
        ("log_alpha", vd.GaussianDropout(), [0.0, 4.0]),
    ):
        gate = vd.Gate(noise, 2)
        getattr(gate, name).data.copy_(torch.tensor(values))
        assert gate.relevance().kept.tolist() == [True, False], name


def test_the_mean_closes_units_that_the_rule_removes():
    closed = {"raw_a": -10.0, "mu": -5.0, "log_sigma": 3.0}
    for noise in (vd.BetaBernoulli(), vd.LogNormal()):
        gate = vd.Gate(noise, 2).eval()
        for name in closed.keys() & dict(gate.named_parameters()).keys():
            getattr(gate, name).data[0] = closed[name]
        first, second = gate(torch.ones(1, 2))[0]
        assert first == 0 < second


def test_dependent_gate_sees_each_example():
    gate = vd.Gate(vd.DependentBetaBernoulli(joint=True, shift=0.5), units=2)
    x = torch.randn(256, 2) * 3 + 1
    for _ in range(3):
        gate(x)
    assert gate.running_mean.sub(x.mean(0)).abs().max() < 1e-5
    assert gate.running_var.sub(x.var(0, unbiased=False)).abs().max() < 1e-4
    factor = gate.eval()(x) / x
    assert (factor == 0).any()
    assert (factor > 0.1).any()
    before = gate.running_mean.clone()
    gate(x + 100)
    assert torch.equal(gate.running_mean, before), "evaluation changes the statistics"


@pytest.mark.parametrize("temperature", [0.1, 2 / 3, 1.0, 2.0])
@pytest.mark.parametrize("rate", [1e-4, 0.1, 0.3, 0.5, 0.9, 0.999])
def test_mean_of_a_relaxed_mask(rate, temperature):
    logit = math.log((1 - rate) / rate)
    with mp.workdps(30):
        expected = mp.quad(
            lambda y: 1 / (1 + mp.exp(-(logit - temperature * y))) / (2 * mp.cosh(y / 2)) ** 2,
            [-150, -40, -10, -3, 0, 3, 10, 40, 150],
        ) / (1 - rate)
    x = torch.tensor(logit, dtype=torch.float64, requires_grad=True)
    assert concrete_mean_ratio(x, temperature).item() == pytest.approx(float(expected), rel=1e-10)
    assert torch.autograd.gradcheck(lambda t: concrete_mean_ratio(t, temperature), x)


@pytest.mark.parametrize("shape, axis", [((40_000, 2), -1), ((40_000, 2, 1, 1), 1)])
@pytest.mark.parametrize("rate", [0.1, 0.9])
def test_concrete_dropout_multiplies_by_its_mean(rate, shape, axis):
    gate, x = vd.Gate(vd.ConcreteDropout(rate), units=2, axis=axis), torch.ones(shape)
    with torch.no_grad():
        draws, mean = gate.train()(x).flatten(1), gate.eval()(x[:1]).flatten()
    assert_mean(draws, mean)
    torch.testing.assert_close(gate.unit_mean(), mean)
    assert (mean - 1).abs().min() > 5e-4  # the relaxed mask is biased, and more so for channels


def test_a_gate_knows_its_temperature():
    assert vd.Gate(vd.ConcreteDropout(), 3).noise.temperature == 0.1
    assert vd.Gate(vd.ConcreteDropout(), 3, axis=1).noise.temperature == 2 / 3
    assert vd.Gate(vd.ConcreteDropout(granularity="element"), 3, axis=-3).noise.temperature == 0.1
    assert vd.Gate(vd.ConcreteDropout(temperature=0.3), 3, axis=1).noise.temperature == 0.3


@pytest.mark.parametrize("granularity, terms", [("example", 1), ("channel", 7), ("element", 7)])
def test_gaussian_kl_counts_every_noise_variable_once(granularity, terms):
    noise = vd.GaussianDropout(per="layer", prior=vd.LogUniform(), granularity=granularity)
    one = vd.Gate(vd.GaussianDropout(prior=vd.LogUniform()), 1).kl()
    torch.testing.assert_close(vd.Gate(noise, 7).kl(), terms * one)
