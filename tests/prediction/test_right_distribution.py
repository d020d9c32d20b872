"""Draws have the distribution of the layers' estimators, whatever else happens in the call."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

import vardrop as vd
from tests.nets import Parts
from tests.prediction.nets import blocks, wrapped
from tests.refusals import assert_refused
from tests.z_scores import assert_mean, assert_variance, z_bound


def pooled_net():
    """Pooling over positions of one kernel: their covariance decides the variance."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.AvgPool2d(6), nn.Flatten())
    return vd.convert(net, vd.bayes_by_backprop(log_sigma2=-2.0))


@pytest.mark.parametrize("inside", [False, True])
def test_a_rows_uncertainty_does_not_depend_on_the_rows_beside_it(inside):
    net = wrapped(pooled_net()) if inside else pooled_net()
    x = torch.randn(1, 1, 8, 8).repeat(64, 1, 1, 1)
    n, options = 1000, {"likelihood": vd.Values()}
    alone = vd.predict(net, x[:1], n, seed=0, **options).draws[:, 0]
    assert_variance(vd.predict(net, x, n, seed=1, **options).draws[:, 0], alone.var(0).double())
    # Positions are independent: the variance of a mean of 36 is a 36th of the mean variance.
    squares = functional.avg_pool2d(functional.conv2d(x[:1].square(), torch.ones(1, 1, 3, 3)), 6)
    assert_variance(alone, (squares * math.exp(-2.0) / 36).flatten().double())


def test_whole_functions_keep_the_covariance_between_positions():
    net, x, n = pooled_net(), torch.ones(1, 1, 8, 8), 1000
    whole = vd.predict(net, x, n, draw="functions", likelihood=vd.Values(), seed=0).draws[:, 0]
    assert_variance(whole, torch.full((2,), 9 * math.exp(-2.0)).double())


NOISES = {  # that no module owns and no switch reaches
    "dropout": lambda net, x: functional.dropout(x, 0.5, training=True),
    "randn_like": lambda net, x: x + torch.randn_like(x),
    "randn": lambda net, x: x + torch.randn(x.shape),
}


@pytest.mark.parametrize("block", [1, 8, None])
@pytest.mark.parametrize("name", NOISES)
@pytest.mark.parametrize("chain", [True, False])
def test_noise_before_the_first_noisy_layer_is_drawn_for_every_draw(chain, name, block):
    net = nn.Sequential(Parts(NOISES[name]), nn.Linear(6, 1))
    vd.convert(net, vd.bayes_by_backprop(log_sigma2=-20.0), include="1")
    net[1].weight.data.fill_(1.0)
    net[1].bias.data.zero_()
    draws = blocks(net if chain else wrapped(net), torch.ones(2, 6), 1500, block)
    assert_mean(draws, 6.0)
    assert_variance(draws, torch.full((2, 1), 6.0).double())


@pytest.mark.parametrize("name", NOISES)
def test_noise_in_code_comes_from_the_seed_in_every_whole_function(name):
    net = nn.Sequential(nn.Linear(6, 6), Parts(NOISES[name]), nn.Linear(6, 1))
    vd.convert(net, vd.bayes_by_backprop(log_sigma2=-30.0))
    state, runs = torch.get_rng_state(), []
    for _ in range(2):
        p = vd.predict(net, torch.ones(2, 6), 8, draw="functions", likelihood=vd.Values(), seed=0)
        runs.append(p.draws)
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(*runs)
    assert runs[0].std(0).min() > 1e-3


@pytest.mark.parametrize("draw", ["estimator", "functions"])
@pytest.mark.parametrize("first", [nn.Dropout(0.5, inplace=True), nn.ReLU(inplace=True)])
def test_a_net_that_begins_in_place_leaves_the_input_alone(first, draw):
    net = nn.Sequential(first, nn.Dropout(0.5, inplace=True), nn.Linear(6, 1))
    net[2].weight.data.fill_(1.0)
    net[2].bias.data.zero_()
    x = torch.tensor([[1.0, -1.0] * 3]).repeat(3, 1)
    kept = x.clone()
    p = vd.predict(net, x, 600, draw=draw, likelihood=vd.Values(), seed=0)
    assert torch.equal(x, kept)
    assert_mean(p.draws, 3.0 if isinstance(first, nn.ReLU) else 0.0)
    for mode in ("mean", "moments"):
        vd.predict(net, x, mode=mode, likelihood=vd.Values())
        assert torch.equal(x, kept)


@pytest.mark.parametrize("draw", ["estimator", "functions"])
def test_a_forward_that_overwrites_its_input_starts_afresh_in_every_draw(draw):
    net = Parts(lambda net, x: net.layer(x.mul_(2).relu_()), layer=nn.Linear(3, 1))
    vd.convert(net, vd.bayes_by_backprop(log_sigma2=-20.0))
    x = torch.ones(2, 3)
    p = vd.predict(net, x, 64, draw=draw, likelihood=vd.Values(), seed=0)
    assert torch.equal(x, torch.ones(2, 3))
    torch.testing.assert_close(p.mean, net.layer(2 * x).detach(), atol=1e-3, rtol=1e-3)
    assert p.std.max() < 1e-3


@pytest.mark.parametrize("block", [1, 16, None])
def test_batch_statistics_are_those_of_one_draw(block):
    norm = nn.BatchNorm2d(2, track_running_stats=False, affine=False)
    net = vd.convert(nn.Sequential(nn.Conv2d(1, 2, 2), norm, nn.Flatten()), vd.sparse_vd(0.0))
    x, n = torch.randn(2, 1, 3, 3), 1500
    with torch.no_grad(), vd.sampling(net.eval()):
        loop = torch.stack([net(x) for _ in range(n)])
    draws = blocks(net, x, n, block, seed=1)
    # Statistics of one draw: every channel of every draw has mean zero and variance one.
    channels = draws.view(n, 2, 2, 4).transpose(1, 2).flatten(2)
    torch.testing.assert_close(channels.mean(2), torch.zeros(n, 2), atol=1e-5, rtol=0)
    torch.testing.assert_close(channels.var(2, unbiased=False), torch.ones(n, 2), atol=1e-3, rtol=0)
    difference = (draws.var(0) - loop.var(0)).abs()
    error = torch.stack([(d - d.mean(0)).square().var(0) / n for d in (draws, loop)]).sum(0).sqrt()
    assert (difference / error).max() < z_bound(difference.numel())


def test_rows_that_are_normalised_together_are_not_split():
    norm = nn.BatchNorm1d(4, track_running_stats=False)
    net = vd.convert(nn.Sequential(nn.Linear(3, 4), norm), vd.sparse_vd(log_sigma2=-40.0))
    x = torch.randn(8, 3)
    p = vd.predict(net, x, 4, memory=1, likelihood=vd.Values(), seed=0)
    torch.testing.assert_close(p.mean, net.eval()(x).detach(), atol=1e-3, rtol=1e-3)


def test_a_whole_function_is_one_function_of_all_batches():
    net = nn.Sequential(nn.Linear(5, 20), nn.ReLU(), nn.Dropout(0.3), nn.Linear(20, 1))
    vd.convert(net, vd.sparse_vd(log_sigma2=-2.0))
    x, options = torch.randn(4, 5), {"draw": "functions", "likelihood": vd.Values(), "seed": 0}
    for data, more in (([x, x], {}), (torch.cat([x, x]), {"memory": 2000})):
        draws = vd.predict(net, data, 8, **options, **more).draws
        torch.testing.assert_close(draws[:, :4], draws[:, 4:])
        torch.testing.assert_close(draws[:, :4], vd.predict(net, x, 8, **options).draws)


@pytest.mark.parametrize("rate", [0.0, 0.4])
def test_encoder_layers_draw_past_torchs_fused_path(rate):
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=rate, batch_first=True).eval()
    net = nn.Sequential(layer, nn.Flatten())
    if rate == 0:
        vd.convert(net, vd.sparse_vd(log_sigma2=-3.0), include="*linear*")
    p = vd.predict(net, torch.randn(2, 3, 8), 32, likelihood=vd.Values(), seed=0)
    assert (p.std > 1e-3).all()
    assert torch.backends.mha.get_fastpath_enabled()
    again = vd.predict(net, torch.randn(2, 3, 8), 32, likelihood=vd.Values(), seed=0)
    assert not torch.equal(p.mean, again.mean)


def test_densities_and_intervals_use_every_draw():
    net = vd.convert(nn.Linear(1, 1), vd.bayes_by_backprop(log_sigma2=0.0))
    options = {"likelihood": vd.Gaussian(0.1), "seed": 0}
    assert len(vd.predict(net, torch.ones(1, 1), 400, **options).draws) == 400
    assert len(vd.predict(net, torch.ones(1, 1), 400, keep=100, **options).draws) == 100


@pytest.mark.parametrize("likelihood, y, logits", [
    (vd.Bernoulli(), torch.zeros(1, 1), (15.0, 17.0, 20.0, 90.0, 300.0)),
    (vd.Bernoulli(), torch.ones(1, 1), (-15.0, -17.0, -20.0, -90.0, -300.0)),
    (vd.Categorical(), torch.tensor([1]), (20.0, 110.0, 1000.0)),
])  # fmt: skip
def test_probabilities_that_round_to_zero_or_one_have_finite_logarithms(likelihood, y, logits):
    outputs = 2 if isinstance(likelihood, vd.Categorical) else 1
    net = vd.convert(nn.Linear(1, outputs), vd.bayes_by_backprop(log_sigma2=-60.0))
    net.bias.data.zero_()
    net.weight.data.copy_(torch.tensor([[1.0], [0.0]])[:outputs])
    for logit in logits:
        p = vd.predict(net, torch.tensor([[logit]]), 8, likelihood=likelihood, seed=0)
        assert float(p.log_prob(y)) == pytest.approx(-abs(logit), rel=1e-4)
        assert p.entropy.isfinite().all()
        assert p.epistemic.isfinite().all()


def test_log_probabilities_of_several_blocks_of_draws():
    net = vd.convert(nn.Linear(1, 2, bias=False), vd.bayes_by_backprop(log_sigma2=4.0))
    p = vd.predict(net, torch.tensor([[50.0]]), 96, tolerance=1e-9, seed=0)  # in blocks of 32
    exact = p.draws.double().log_softmax(2).logsumexp(0) - math.log(96)
    torch.testing.assert_close(p.log_probs.double(), exact, rtol=1e-5, atol=1e-6)


def test_classes_of_probability_zero_have_finite_uncertainties():
    net = nn.Sequential(nn.Linear(5, 20), nn.ReLU(), nn.Linear(20, 4))
    vd.convert(vd.convert(net, vd.sparsemax(), include="2"), vd.sparse_vd(-2.0), include="0")
    p = vd.predict(net, 3 * torch.randn(4, 5), 64, seed=0)
    probs = p.draws.double().exp()
    assert (probs == 0).any()
    aleatoric = -torch.special.xlogy(probs, probs).sum(2).mean(0)
    entropy = -torch.special.xlogy(probs.mean(0), probs.mean(0)).sum(1)
    torch.testing.assert_close(p.aleatoric.double(), aleatoric, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(p.epistemic.double(), entropy - aleatoric, rtol=1e-4, atol=1e-5)
    assert not p.std.isnan().any()


def test_a_net_with_nan_predicts_nothing():
    net = vd.convert(nn.Linear(2, 3), vd.sparse_vd())
    net.weight.data[0, 0] = math.nan
    assert_refused("predictions, but got NaN .* in row 1", vd.predict, net, torch.ones(2, 2))


def test_an_objective_predicts_with_its_own_likelihood():
    net = vd.convert(nn.Linear(2, 1), vd.bayes_by_backprop())
    elbo, x = vd.ELBO(net, vd.Gaussian(0.3, learned=True), num_data=10), torch.ones(3, 2)
    p = vd.predict(elbo, x, 8, seed=0)
    torch.testing.assert_close(p.aleatoric, torch.full((3, 1), 0.09))
    assert torch.equal(p.draws, vd.predict(net, x, 8, likelihood=elbo.likelihood, seed=0).draws)
    before = p.interval(0.9)
    elbo.likelihood.log_std.data.fill_(3.0)
    assert torch.equal(p.interval(0.9).lower, before.lower)  # a prediction does not change later
    assert vd.distil(elbo, x, nn.Linear(2, 1), epochs=1)(x).shape == (3, 1)
