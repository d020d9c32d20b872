"""Noise fine-tuned on a trained net, and the width of its likelihood."""

import contextlib
import copy
import functools
import math
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional

import vardrop as vd
from tests.nets import assert_unchanged, is_same_state
from tests.prediction import nets
from tests.refusals import assert_refused
from vardrop.prediction import fit_log_scale
from vardrop.tuning.fine_tune import reduce_initial_noise


def problem(rows: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 5, generator=generator)
    logits = torch.stack([x[:, 0], x[:, 1] * x[:, 2], x[:, 3]], 1)
    return x, torch.multinomial(logits.softmax(1), 1, generator=generator).squeeze(1)


@functools.cache
def _trained() -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    return vd.fine_tune(net, [problem(400)] * 400, functional.cross_entropy, optimizer)


def trained() -> nn.Sequential:
    return copy.deepcopy(_trained())


def data():
    x, y = problem(400)
    return [(x[i : i + 100], y[i : i + 100]) for i in range(0, 400, 100)]


# ---- the width of the noise


@pytest.mark.parametrize("factor", [0.5, 1.0, 3.0])
def test_a_scaled_likelihood_is_that_of_scaled_outputs(factor):
    draws, y = torch.randn(4, 6, 4), torch.randn(6, 4)
    for kind, target in ((vd.Categorical, torch.randint(4, (6,))), (vd.Bernoulli, (y > 0).float())):
        found = kind().scaled(factor).log_prob(draws, target)
        torch.testing.assert_close(found, kind().log_prob(draws / factor, target))
    mean, log_variance = draws.chunk(2, 2)
    widths = vd.HeteroscedasticGaussian(), mean, (log_variance / 2).exp()
    for likelihood, location, width in ((vd.Gaussian(0.3), draws, 0.3), widths):
        target = y[:, : location.shape[2]]
        found = likelihood.scaled(factor).log_prob(draws, target)
        expected = torch.distributions.Normal(location, factor * width).log_prob(target).sum(2)
        torch.testing.assert_close(found, expected.logsumexp(0) - math.log(4))


def test_parts_and_samples_follow_the_temperature():
    draws, hot = torch.tensor([[[2.0, 0.0]]]), vd.Categorical(temperature=2.0)
    torch.testing.assert_close(hot.parts(draws).probs, torch.tensor([[[1.0, 0.0]]]).softmax(2))
    assert (hot.scaled(2.0).temperature, repr(hot)) == (4.0, "Categorical(temperature=2)")
    even = vd.Categorical(temperature=1e6).sample(torch.tensor([[50.0, 0.0]]).expand(2000, 2))
    assert abs(float(even.float().mean()) - 0.5) < 6 * 0.5 / 2000**0.5  # 6 standard errors
    for wrong in (0.0, -1.0, math.nan):
        assert_refused("`temperature`", vd.Categorical, wrong)


def test_the_factor_minimises_the_penalised_likelihood():
    net, (x, y) = trained(), problem(300, seed=1)
    found, p = vd.calibrate(net, (x, y)), vd.predict(net, x, mode="mean")

    def value(c):
        return 10 * c * c - float(p.rescale(math.exp(c)).log_prob(y).double().sum())

    best = math.log(found.temperature)
    assert best > 0.1, "the net was trained until it was too sure"
    assert all(value(best) <= value(best + step) for step in (-0.5, -0.01, 0.01, 0.5))
    assert fit_log_scale([(p, y, 1.0)]) == pytest.approx(best, abs=1e-6)


def test_few_rows_that_are_all_right_do_not_say_much():
    net, x = nn.Linear(2, 2), torch.randn(20, 2)
    assert vd.calibrate(net, (x, net(x).argmax(1).detach())).temperature > 0.3


def test_a_prediction_without_all_of_its_draws_is_not_rescaled():
    net = vd.convert(nn.Linear(2, 2), vd.bayes_by_backprop())
    p = vd.predict(net, torch.randn(3, 2), samples=8, keep=4)
    assert_refused("8 draws to be kept, but got 4.*without keep", p.rescale, 2.0)
    p = vd.predict(net, torch.randn(3, 2), likelihood=vd.Values())
    assert_refused("with noise, but got Values", p.rescale, 2.0)


# ---- fine-tuning


def test_a_noisy_net_is_tuned_by_its_elbo_and_calibrated():
    net, (x, y) = trained(), problem(1000, seed=2)
    plain = -float(vd.predict(net, x, mode="mean").log_prob(y).mean())
    noisy = vd.convert(net, vd.bayes_by_backprop(vd.Normal(learned=True))).eval()
    torch.manual_seed(0)
    held_out = problem(300, seed=1)
    elbo = vd.fine_tune(noisy, data(), epochs=100, beta=0.1, lr=1e-3, validation=held_out)
    assert elbo.net is noisy
    assert (elbo.num_data, float(elbo.beta)) == (400, pytest.approx(0.1))
    assert not noisy.training
    assert elbo.likelihood.temperature != 1.0
    assert -float(vd.predict(elbo, x, seed=0).log_prob(y).mean()) < plain - 0.05


def test_rates_that_nobody_trained_start_low_and_others_stay():
    net = vd.convert(trained(), vd.variational_dropout("B", per="layer"))
    noise = {n: t for n, t in net.named_parameters() if n.endswith(("log_sigma2", "log_alpha"))}
    for factor in (50.0, 1.0):
        before = {n: t.detach().clone() for n, t in noise.items()}
        vd.fine_tune(net, data()[:1], epochs=1, lr=1e-9)
        for name, now in noise.items():  # one step at the rate of the noise, 0.1 at most
            start = before[name] - math.log(factor)
            torch.testing.assert_close(now.detach(), start, atol=0.1, rtol=0)
            now.data.add_(1.0)


def test_the_zero_means_of_variance_layers_keep_their_noise():
    net = vd.convert(trained(), vd.variance_layer())
    before = {n: p.detach().clone() for n, p in net.named_parameters()}
    reduce_initial_noise(net)
    torch.testing.assert_close(dict(net.named_parameters()), before)


LOSS, TRAIN, WRONG = functional.cross_entropy, data(), [(x * math.nan, y) for x, y in data()]
X, Y = problem(20)


@pytest.mark.parametrize("arguments, message", [
    ((TRAIN,), "`loss` and `optimizer` for a plain net.*no loss"),
    ((None, LOSS, "SGD"), "Expected `data` to be tensors, or batches"),
    ((TRAIN, LOSS, "adam"), "Expected `optimizer` to be an optimizer"),
    ((TRAIN, LOSS, "of another net"), "Expected `optimizer` to hold parameters of `net`"),
    ((TRAIN, LOSS, "SGD", 0), "Expected `epochs` to be an integer of at least 1, but got 0"),
    ((WRONG, LOSS, "SGD"), "Expected a finite loss, but got nan in epoch 1, step 1"),
    (([], LOSS, "SGD"), "Expected batches in every epoch, but got none in epoch 1"),
    ((iter(TRAIN), LOSS, "SGD", 2), "batches that can be read again in every epoch"),
    (([(X, Y - 5)], LOSS, "SGD"), "`loss` or `data`"),
])  # fmt: skip
def test_what_fine_tune_refuses_of_a_plain_net(arguments, message):
    net, (batches, *others) = trained(), arguments
    if len(others) > 1 and others[1] != "adam":
        others[1] = torch.optim.SGD((net if others[1] == "SGD" else trained()).parameters(), 0.1)
    with assert_unchanged(net):
        assert_refused(message, vd.fine_tune, net, batches, *others)


@pytest.mark.parametrize("arguments, validation, message", [
    ((TRAIN, LOSS), None, "`likelihood` for a noisy net"),
    (([],), None, "`data` to give batches, but got none"),
    ((iter(TRAIN),), None, "`data` to be .* read again in every epoch"),
    ((WRONG,), None, "finite loss.*epoch 1, step 1"),
    ((TRAIN,), torch.ones(3), "`validation` to be a pair"), (([(X, Y)],), (X, Y - 5), "`y`"),
    (([(X, Y)],), (X, Y, Y), "`validation` to give pairs"),
    (([(X, Y, Y)],), None, "batches of `data` to be tensors .* weights too"),
    (((X, Y),), None, "batches of `data` to be tensors .* but got Tensor"),
    ((torch.tensor(1.0),), None, "Expected `data` to be tensors, or batches"),
])  # fmt: skip
def test_what_fine_tune_refuses_of_a_noisy_net(arguments, validation, message):
    noisy = vd.convert(trained(), vd.sparse_vd()).eval()
    with assert_unchanged(noisy) if arguments[0] is not WRONG else contextlib.nullcontext():
        assert_refused(message, vd.fine_tune, noisy, *arguments, validation=validation)


def cnn():
    """A model of images, and images that three pixels decide."""
    torch.manual_seed(0)
    net, x = nets.cnn(), torch.randn(400, 1, 6, 6)
    return net, x, x[:, 0, 0, :3].argmax(1)


def test_fine_tuning_moves_the_noise_and_draws_little_for_validation(monkeypatch):
    net, x, y = cnn()
    vd.convert(net, vd.bayes_by_backprop())
    before, cost = net.hidden.log_sigma2.detach().clone(), []

    def spy(elbo, data, samples, **options):
        cost.append(samples * sum(map(len, data)))
        return vd.predict(elbo, data, samples, **options)

    monkeypatch.setattr(sys.modules["vardrop.tuning.fine_tune"], "predict", spy)
    batches = list(zip(x.split(20), y.split(20), strict=True))
    elbo = vd.fine_tune(net, batches, epochs=10, validation=(x, y))
    assert float((net.hidden.log_sigma2.detach() - before).abs().mean()) > 1
    assert cost == [125, 2000]  # one plain pass, and half of the ten passes over 400 examples
    assert elbo.likelihood.temperature != 1.0
    net, _, _ = cnn()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=30)
    vd.convert(net, vd.bayes_by_backprop())
    again = vd.fine_tune(net, batches, epochs=10, validation=loader)
    assert cost[2:] == [125, 2000]
    assert again.likelihood.temperature == pytest.approx(elbo.likelihood.temperature, rel=0.2)


def test_a_model_that_gains_nothing_is_plain_again_with_a_temperature():
    net, (x, y) = trained(), problem(100, seed=1)
    before = copy.deepcopy(net.state_dict())
    plain = vd.calibrate(copy.deepcopy(net), (x, y)).temperature
    vd.convert(net, vd.bayes_by_backprop()).eval()
    wrong = [(x, torch.zeros_like(y)) for x, y in data()]
    with pytest.warns(UserWarning, match="on `validation` is .* with noise and .* without"):
        elbo = vd.fine_tune(net, wrong, epochs=20, validation=(x, y))
    assert elbo.net is net
    assert is_same_state(net, before)
    assert type(net[0]) is nn.Linear
    p = vd.predict(elbo, x)
    assert elbo.likelihood.temperature == pytest.approx(plain, rel=1e-3)
    torch.testing.assert_close(p.probs, (net(x) / plain).softmax(1), rtol=1e-3, atol=1e-4)
    assert p.epistemic.abs().max() < 1e-6


def test_a_model_without_a_plain_form_stays_noisy():
    net, (x, y) = trained(), problem(300, seed=1)
    vd.convert(net, vd.dropmax())
    wrong = [(x, torch.zeros_like(y)) for x, y in data()]
    assert vd.predict(vd.fine_tune(net, wrong, epochs=20, validation=(x, y)), x).epistemic.max() > 0


def test_an_interrupt_leaves_the_modes_and_a_model_that_predicts(capsys):
    net, x, y = cnn()
    vd.convert(net, vd.bayes_by_backprop()).eval()

    def batches():
        yield from zip(x.split(100), y.split(100), strict=True)
        raise KeyboardInterrupt

    reads = iter([zip(x.split(100), y.split(100), strict=True), batches()])
    data = type("Data", (), {"__iter__": lambda self: next(reads)})()
    with pytest.raises(KeyboardInterrupt):
        vd.fine_tune(net, data, progress=True)
    assert "fine_tune: 4/24" in capsys.readouterr().err
    assert not any(module.training for module in net.modules())
    assert vd.predict(net, x[:5]).probs.isfinite().all()


def test_noise_that_cannot_move_is_a_warning():
    elbo = vd.ELBO(vd.convert(nn.Linear(5, 3), vd.sparse_vd()), vd.Categorical(), 400)
    optimizer = torch.optim.Adam(elbo.parameters(), lr=1e-4)
    with pytest.warns(UserWarning, match="hardly moved in 240 steps"):
        list(vd.tuning.train(elbo, optimizer, *problem(400), epochs=12, batch_size=20))
