import math

import mpmath as mp
import pytest
import torch
from scipy import integrate

import vardrop as vd
from tests.refusals import assert_refused
from tests.z_scores import assert_mean
from vardrop.divergence import kl_divergence, register_kl
from vardrop.posteriors import Axes, Bernoulli

AXES = Axes((1,), (0,))
WEIGHT = torch.tensor([[0.5, -1.0, 0.0], [2.0, 0.1, -0.3]], dtype=torch.float64)


def kl(q, p, weight=WEIGHT):
    return kl_divergence(q, p, weight, AXES, q.initial(weight, AXES), p.initial(weight))


def quadrature(mean, variance, log_prob):
    std = math.sqrt(variance)

    def f(z):
        w, log_q = mean + std * z, -0.5 * z * z - math.log(std) - 0.5 * math.log(2 * math.pi)
        density = math.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
        return density * (log_q - float(log_prob(torch.tensor(w, dtype=torch.float64), {})))

    return integrate.quad(f, -12, 12, limit=200)[0]


PROPER = [vd.Normal(), vd.Normal(0.3, 0.5), vd.StudentT(1.0), vd.StudentT(0.1, 0.2)]


@pytest.mark.parametrize("prior", PROPER)
def test_gaussian_posterior_against_quadrature(prior):
    q = vd.AdditiveGaussian(log_sigma2=-1.5)
    expected = sum(quadrature(float(w), math.exp(-1.5), prior.log_prob) for w in WEIGHT.flatten())
    assert float(kl(q, prior)) == pytest.approx(expected, rel=1e-6)


def test_student_bound_is_above_and_tends_to_ard():
    q = vd.AdditiveGaussian(log_sigma2=-1.0)
    assert kl(q, vd.StudentT(0.5, form="bound")) > kl(q, vd.StudentT(0.5))
    shifted = lambda w: kl(q, vd.StudentT(1e-9, form="bound"), w)
    zero = torch.zeros_like(WEIGHT)
    ard = kl(q, vd.ARD()) - kl(q, vd.ARD(), zero)
    assert float(shifted(WEIGHT) - shifted(zero)) == pytest.approx(float(ard), rel=1e-4)


def test_ard_is_the_best_normal():
    q = vd.AdditiveGaussian(log_sigma2=0.5)
    normal = lambda w: vd.Normal(std=math.sqrt(float(w) ** 2 + math.exp(0.5)))
    best = sum(kl(q, normal(w), w.view(1, 1)) for w in WEIGHT.flatten())
    assert float(kl(q, vd.ARD())) == pytest.approx(float(best), rel=1e-9)


@pytest.mark.parametrize("per, sharing", [("weight", 1), ("input", 2), ("output", 3), ("layer", 6)])
@pytest.mark.parametrize("prior", [vd.LogUniform(), vd.ARD(), vd.StudentT(1.0)])
def test_shared_alpha_counts_its_weights(per, sharing, prior):
    q = vd.MultiplicativeGaussian(alpha=0.7, per=per)
    assert q.initial(WEIGHT, AXES)["log_alpha"].numel() * sharing == WEIGHT.numel()
    one = kl(vd.MultiplicativeGaussian(alpha=0.7), prior)
    assert float(kl(q, prior)) == pytest.approx(float(one), rel=1e-9)


def test_additive_and_multiplicative_agree_at_equal_alpha():
    weight = torch.tensor([[1.0, -2.0]], dtype=torch.float64)
    tensors = {"log_sigma2": math.log(0.3) + 2 * weight.abs().log()}
    for prior in (vd.LogUniform(), vd.LogUniform("sigmoid"), vd.LogUniform("bound"), vd.ARD()):
        additive = kl_divergence(vd.AdditiveGaussian(), prior, weight, AXES, tensors, {})
        multiplicative = kl(vd.MultiplicativeGaussian(alpha=0.3), prior, weight)
        assert float(additive) == pytest.approx(float(multiplicative), rel=1e-9)


def test_monte_carlo_agrees_with_the_closed_form():
    q = vd.AdditiveGaussian(log_sigma2=-1.0)
    draws = torch.stack([kl(q, vd.MonteCarlo(vd.Normal(std=0.7))) for _ in range(4000)])
    assert_mean(draws, kl(q, vd.Normal(std=0.7)))


def test_scale_mixture_keeps_its_gradient_far_out():
    w = torch.tensor(50.0, requires_grad=True)
    vd.ScaleMixture(std1=1.0).log_prob(w, {}).backward()
    assert w.grad == pytest.approx(-50.0, rel=1e-4)


def test_zero_mean_is_the_constant_of_the_log_uniform():
    assert float(kl(vd.ZeroMean(), vd.LogUniform())) == 0.0


def test_second_registration_is_an_error():
    assert_refused("registered once", register_kl(vd.AdditiveGaussian, vd.ARD), lambda *a: None)


@pytest.mark.parametrize("q, p, match", [
    (vd.AdditiveGaussian(), vd.LogUniform("cubic"), "alpha <= 1 only.*max_alpha=1.0"),
    (vd.MultiplicativeGaussian(max_alpha=2.0), vd.LogUniform("cubic"), "alpha <= 1 only"),
    (vd.AdditiveGaussian(), vd.ScaleMixture(), r"\(AdditiveGaussian, ARD\).*MonteCarlo"),
    (vd.ZeroMean("sign"), vd.Normal(), "does not define `entropy`"),
    (Bernoulli(0.5), vd.Normal(0.5), r"fixed N\(0, std\^2\)"),
])  # fmt: skip
def test_refused_pairs(q, p, match):
    assert_refused(match, kl, q, p)


def test_cubic_with_a_bound():
    q = vd.MultiplicativeGaussian(alpha=0.5, max_alpha=1.0)
    expected = vd.functional.log_uniform_kl_cubic(torch.tensor(math.log(0.5))) * WEIGHT.numel()
    assert float(kl(q, vd.LogUniform("cubic"))) == pytest.approx(float(expected), rel=1e-6)


EXTREMES = [
    (1.0, -90.0), (1.0, -120.0), (1e3, -80.0), (1e-25, -100.0), (1e-25, -110.0), (0.0, -104.0),
    (0.0, -110.0), (1e19, 0.0), (3e19, 0.0), (1e-30, -140.0), (1.0, 60.0), (1.0, 100.0), (0.0, 89.0),
]  # fmt: skip


def exact_kl(weight, log_sigma2):
    """KL to the log-uniform prior and its gradients, by mpmath."""
    u = mp.mpf(weight) ** 2 * mp.exp(-mp.mpf(log_sigma2)) / 2
    root = mp.sqrt(u)
    if u > 1e4:
        value = mp.log(4 * u) / 2 + mp.euler / 2 - 1 / (4 * u)
        slope = 1 / (2 * u) + 1 / (4 * u**2)
    else:
        value = u * mp.hyp2f2(1, 1, mp.mpf(3) / 2, 2, -u)
        slope = mp.mpf(1) if u == 0 else mp.exp(-u) * mp.erfi(root) * mp.sqrt(mp.pi) / (2 * root)
    return value, slope * mp.mpf(weight) * mp.exp(-mp.mpf(log_sigma2)), -slope * u


def exact_ard(weight, log_sigma2):
    ratio = mp.mpf(weight) ** 2 * mp.exp(-mp.mpf(log_sigma2))
    share = ratio / (1 + ratio)
    return mp.log1p(ratio) / 2, 0 if weight == 0 else share / mp.mpf(weight), -share / 2


@pytest.mark.parametrize("weight, log_sigma2", EXTREMES)
@pytest.mark.parametrize("prior, exact", [(vd.LogUniform(), exact_kl), (vd.ARD(), exact_ard)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kl_of_additive_noise_at_its_extremes(prior, exact, weight, log_sigma2, dtype):
    w = torch.tensor([[weight]], dtype=dtype, requires_grad=True)
    s = torch.tensor([[log_sigma2]], dtype=dtype, requires_grad=True)
    value = kl_divergence(vd.AdditiveGaussian(), prior, w, AXES, {"log_sigma2": s}, {})
    found = [float(t.detach()) for t in (value, *torch.autograd.grad(value, (w, s)))]
    for mine, other in zip(found, exact(w.item(), s.item()), strict=True):
        # Under 1e-37 a number of single precision has fewer digits.
        assert mine == pytest.approx(float(other), rel=3e-5, abs=1e-37 if w.item() == 1 else 1e-27)


@pytest.mark.parametrize("log_alpha", [-300.0, -100.0, -88.5, 88.5, 100.0])
@pytest.mark.parametrize("prior, asymptote", [
    (vd.LogUniform(), 0.6351814), (vd.LogUniform("sigmoid"), 0.63576), (vd.ARD(), 0.0),
])  # fmt: skip
def test_kl_of_multiplicative_noise_at_its_extremes(prior, asymptote, log_alpha):
    t, q = torch.full((1, 1), log_alpha, requires_grad=True), vd.MultiplicativeGaussian(per="layer")
    value = kl_divergence(q, prior, torch.ones(3, 4), AXES, {"log_alpha": t}, {})
    (slope,) = torch.autograd.grad(value, t)
    expected = (asymptote - 0.5 * log_alpha, -0.5) if log_alpha < 0 else (0.0, 0.0)
    assert float(value.detach()) / 12 == pytest.approx(expected[0], rel=1e-5, abs=1e-30)
    assert float(slope) / 12 == pytest.approx(expected[1], rel=1e-5, abs=1e-30)


@pytest.mark.parametrize("prior", [vd.Normal(), vd.StudentT(), vd.MonteCarlo(vd.ScaleMixture())])
@pytest.mark.parametrize("weight", [0.0, 1e-30, 1.0])
def test_multiplicative_noise_at_a_small_weight(prior, weight):
    # The exact KL grows as -log |w| without end; at zero it stops at the smallest normal number.
    w, q = torch.full((2, 3), weight, requires_grad=True), vd.MultiplicativeGaussian(alpha=1.0)
    value = kl_divergence(q, prior, w, AXES, q.initial(w, AXES), {})
    (slope,) = torch.autograd.grad(value, w)
    assert value.isfinite()
    assert slope.isfinite().all()
    if weight == 1e-30 and isinstance(prior, vd.Normal):
        assert float(value.detach()) / 6 == pytest.approx(30 * math.log(10) - 0.5, rel=1e-5)
        torch.testing.assert_close(slope, torch.full_like(slope, -1e30))
    if weight == 0:
        assert (slope == 0).all()


@pytest.mark.parametrize("log_sigma2", [-90.0, -120.0])
def test_proper_priors_where_the_variance_underflows(log_sigma2):
    w, s = torch.full((1, 1), 0.5), torch.full((1, 1), log_sigma2, requires_grad=True)
    for prior in (vd.Normal(), vd.StudentT(3.0)):
        value = kl_divergence(vd.AdditiveGaussian(), prior, w, AXES, {"log_sigma2": s}, {})
        entropy = 0.5 * (math.log(2 * math.pi * math.e) + log_sigma2)
        cross = -float(prior.log_prob(torch.tensor(0.5), {}))
        assert float(value.detach()) == pytest.approx(cross - entropy, rel=1e-5)
        assert torch.autograd.grad(value, s)[0].item() == pytest.approx(-0.5)


@pytest.mark.parametrize("weight", [0.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("prior", [vd.LogUniform(), vd.ARD()])
def test_second_derivatives_at_a_zero_weight(prior, dtype, weight):
    w = torch.full((1, 2), weight, dtype=dtype, requires_grad=True)
    s = torch.full((1, 2), 2.0, dtype=dtype)
    value = kl_divergence(vd.AdditiveGaussian(), prior, w, AXES, {"log_sigma2": s}, {})
    (slope,) = torch.autograd.grad(value, w, create_graph=True)
    (second,) = torch.autograd.grad(slope.sum(), w)
    exact, step = {vd.LogUniform(): exact_kl, vd.ARD(): exact_ard}[prior], mp.mpf(10) ** -6
    with mp.workdps(30):
        up, down = (exact(weight + k * step, 2.0)[1] for k in (1, -1))
        expected = float((up - down) / (2 * step))
    torch.testing.assert_close(second, torch.full_like(second, expected), rtol=1e-4, atol=1e-6)
