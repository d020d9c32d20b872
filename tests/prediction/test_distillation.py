"""Distillation: a plain student gives the ensemble's distribution in one pass."""

import pytest
import torch
from torch import nn

import vardrop as vd
from tests.refusals import assert_refused


def teacher(outputs=3, log_sigma2=-1.5, scale=3.0):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, outputs))
    for p in net.parameters():
        p.data.mul_(scale)
    return vd.convert(net, vd.bayes_by_backprop(log_sigma2=log_sigma2))


def inputs():
    return torch.randn(256, 4, generator=torch.Generator().manual_seed(1))


def student(outputs=3):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, outputs))


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_a_student_learns_the_mean_probability(temperature):
    net, x, plain = teacher(), inputs(), student()
    optimizer = torch.optim.Adam(plain.parameters(), lr=1e-2)
    before = (plain(x).softmax(1) - vd.predict(net, x, 500, seed=9).probs).abs().mean()
    state = torch.get_rng_state()
    options = {"epochs": 40, "samples": 16, "optimizer": optimizer, "seed": 0}
    found = vd.distil(net, x.split(64), plain, temperature=temperature, **options)
    assert torch.equal(torch.get_rng_state(), state)
    assert found is plain
    after = (found(x).softmax(1) - vd.predict(net, x, 500, seed=9).probs).abs().mean()
    mean = (net.eval()(x).softmax(1) - vd.predict(net, x, 500, seed=9).probs).abs().mean()
    assert after < 0.2 * before
    assert after < 0.5 * mean  # nearer to the ensemble than the teacher's own mean weights are


def test_a_student_learns_mean_and_variance():
    net, x, plain = teacher(2, log_sigma2=-5.0, scale=1.5), inputs(), student(2)
    optimizer = torch.optim.Adam(plain.parameters(), lr=1e-2)
    likelihood, options = vd.HeteroscedasticGaussian(), {"optimizer": optimizer, "seed": 0}
    vd.distil(net, x.split(64), plain, epochs=150, samples=16, likelihood=likelihood, **options)
    p = vd.predict(net, x, 500, likelihood=likelihood, seed=9)
    mean, log_variance = plain(x).detach().chunk(2, -1)
    assert (mean - p.mean).square().mean() < 0.1 * p.mean.var()
    assert (log_variance - 2 * p.std.log()).abs().mean() < 0.3


@pytest.mark.parametrize("likelihood", [vd.Gaussian(), vd.Values(), vd.Bernoulli()], ids=repr)
def test_the_other_likelihoods_fall_in_loss(likelihood):
    net, x, plain = teacher(1), inputs(), student(1)
    reference = vd.predict(net, x, 500, likelihood=likelihood, seed=9)
    target = reference.probs if reference.classifies else reference.mean

    def distance():
        output = plain(x).sigmoid() if reference.classifies else plain(x)
        return float((output - target).square().mean().detach())

    before = distance()
    optimizer = torch.optim.Adam(plain.parameters(), lr=1e-2)
    vd.distil(net, x, plain, epochs=100, likelihood=likelihood, optimizer=optimizer, seed=0)
    assert distance() < 0.2 * before


@pytest.mark.parametrize("match, data, outputs, options", [
    ("`epochs` to be an integer of at least 1", inputs(), 3, {"epochs": 0}),
    ("`temperature` to be a finite number and above 0", inputs(), 3, {"temperature": 0.0}),
    (r"`student` to have shape \(256, 3\), but got \(256, 2", inputs(), 2, {}),
    ("an empty loader", [], 3, {}),
])  # fmt: skip
def test_bad_input(match, data, outputs, options):
    assert_refused(match, vd.distil, teacher(), data, student(outputs), **options)


@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_a_binary_students_loss_is_the_kl_at_the_temperature(temperature):
    likelihood, generator = vd.Bernoulli(), torch.Generator().manual_seed(0)
    p, q = torch.randn(6, 1, generator=generator), torch.randn(6, 1, generator=generator)
    log_probs = likelihood.parts(p[None]).log_probs[0]
    taught = vd.likelihoods.TeacherOutput(p, torch.ones_like(p), log_probs)
    a, b = (p / temperature).sigmoid(), (q / temperature).sigmoid()
    kl = a * (a / b).log() + (1 - a) * ((1 - a) / (1 - b)).log()
    found = likelihood.distillation_loss(q, taught, temperature)
    torch.testing.assert_close(found, temperature**2 * kl.mean())
