"""Narrow types: noise and KL keep single precision, outputs keep the layer's, nothing vanishes."""

import pytest
import torch
from torch import nn

import vardrop as vd
from tests.z_scores import assert_mean, assert_variance
from vardrop.testing import HEADS, RECIPES

NARROW = (torch.bfloat16, torch.float16)


def make():
    """A convolution, two dense layers, and seeded noise."""
    torch.manual_seed(0)
    first = nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten()
    return nn.Sequential(*first, nn.Linear(144, 8), nn.ReLU(), nn.Linear(8, 3))


def rows(zero, dtype=torch.float32):
    x = torch.zeros(5, 1, 8, 8) if zero else torch.randn(5, 1, 8, 8)
    return x.to(dtype), torch.randint(3, (5,))


def assert_finite(net, loss):
    assert loss.isfinite()
    loss.backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all(), name


@pytest.mark.parametrize("zero", [False, True], ids=["inputs", "zero inputs"])
@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("head", HEADS)  # of layers it is a check of the contract
def test_a_step_of_a_head_under_autocast_is_finite(head, dtype, zero):
    net = vd.convert(make(), HEADS[head])
    elbo, (x, y) = vd.ELBO(net, vd.Categorical(), 50), rows(zero)
    with torch.autocast("cpu", dtype=dtype):
        loss = elbo(x, y).loss
    assert_finite(net, loss)


@pytest.mark.parametrize("dtype, cast, zero", [
    (torch.bfloat16, "before", True), (torch.float16, "after", False),
    pytest.param(torch.bfloat16, "before", False, marks=pytest.mark.slow),
    pytest.param(torch.float16, "after", True, marks=pytest.mark.slow),
])  # fmt: skip
@pytest.mark.parametrize("recipe", RECIPES | HEADS)
def test_a_step_of_a_narrow_net_is_finite(recipe, dtype, cast, zero):
    net = make().to(dtype) if cast == "before" else make()
    net = vd.convert(net, (RECIPES | HEADS)[recipe]).to(dtype)
    elbo, (x, y) = vd.ELBO(net, vd.Categorical(), 50), rows(zero, dtype)
    parts = elbo(x, y)
    assert parts.kl.dtype == torch.float32
    assert_finite(net, parts.loss)
    with torch.no_grad():
        assert net(x).dtype == (torch.float32 if recipe in HEADS else dtype)


@pytest.mark.parametrize("dtype, noise", [(torch.float16, torch.float32), (torch.float64, torch.float64)])  # fmt: skip
@pytest.mark.parametrize("recipe", RECIPES)
def test_noise_and_kl_have_single_precision_at_least(recipe, dtype, noise):
    plain = nn.Linear(6, 4).to(dtype)
    keys, net = set(plain.state_dict()), vd.convert(plain, RECIPES[recipe])
    state = net.state_dict()
    assert all(t.dtype == (dtype if k in keys else noise) for k, t in state.items())
    assert keys <= set(state)
    # A recipe without a KL has a plain zero.
    assert vd.kl(net).dtype == noise or not vd.kl(net)


@pytest.mark.parametrize("dtype", [*NARROW, torch.float64], ids=str)
@pytest.mark.parametrize("recipe", ["sparse_vd", "own-noisy_bias", "variance_layer", "dropconnect"])
def test_mean_mode_is_the_torch_layer(recipe, dtype):
    plain = nn.Linear(6, 4).to(dtype)
    net = vd.convert(nn.Linear(6, 4).to(dtype), RECIPES[recipe]).eval()
    x = torch.randn(3, 6, dtype=dtype)
    plain.load_state_dict({k: net.state_dict()[k] for k in plain.state_dict()})
    assert torch.equal(net(x), plain(x))


@pytest.mark.parametrize("name", ["bayes_by_backprop", "ard", "concrete_dropout", "beta_bernoulli",
                                  "l0", "structured_pruning", "sparse_vd"])  # fmt: skip
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_the_kl_of_a_narrow_net_is_that_of_its_numbers(name, dtype):
    net = vd.convert(nn.Linear(300, 300).to(dtype), RECIPES[name])
    wide = vd.convert(nn.Linear(300, 300), RECIPES[name])
    wide.load_state_dict(net.state_dict())
    torch.testing.assert_close(vd.kl(net), vd.kl(wide), rtol=1e-6, atol=1e-6)


def test_adam_moves_the_noise_of_a_bfloat16_net():
    moved = []
    for dtype in (torch.bfloat16, torch.float32):
        torch.manual_seed(0)
        net = vd.convert(nn.Linear(32, 32).to(dtype), vd.sparse_vd())
        optimizer = torch.optim.Adam(net.parameters(), 1e-3)
        for _ in range(50):
            optimizer.zero_grad()
            (vd.kl(net) / 10).backward()
            optimizer.step()
        moved.append(net.log_sigma2.detach() + 10)
    assert (moved[0] > 0).all()
    assert moved[0].mean() == pytest.approx(moved[1].mean().item(), rel=0.05)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("recipe", [
    vd.sparse_vd(log_sigma2=-14.0), vd.gaussian_dropout(0.5, "B"), vd.variance_layer(),
])  # fmt: skip
def test_small_variances_survive(recipe, dtype, autocast):
    # x^2 Var w is below 6e-8, the smallest number of float16.
    net = vd.convert(nn.Linear(16, 3, bias=False).to(torch.float32 if autocast else dtype), recipe)
    for tensor in (net.weight, getattr(net, "sigma", net.weight)):
        tensor.data.mul_(0.1)
    x = torch.full((4000, 16), 2e-3, dtype=net.weight.dtype)
    with vd.sampling(net), torch.no_grad(), torch.autocast("cpu", dtype, enabled=autocast):
        y = net(x).double()
    weight, variance = net.weight.detach().double(), net.variance().detach().double()
    scale = float(x[0, 0].double())
    expected = variance.sum(1) * scale**2 + 1e-8
    # Rounding of the output to the narrow type adds at most its spacing.
    spacing = torch.finfo(dtype).eps * float(y.abs().max())
    error = 5 * expected.sqrt() / 4000**0.5 + spacing
    assert ((y.mean(0) - scale * weight.sum(1)).abs() < error).all()
    assert (y.var(0) / expected - 1).abs().max() < 0.15


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("draw", ["local", "functions"])
def test_predict_of_a_narrow_net(dtype, draw):
    net = vd.convert(make().to(dtype), vd.sparse_vd(log_sigma2=-6.0))
    reference = vd.convert(make(), vd.sparse_vd(log_sigma2=-6.0))
    reference.load_state_dict(net.state_dict())
    x = torch.randn(4, 1, 8, 8).to(dtype)
    found = vd.predict(net, x, samples=256, seed=0, draw=draw)
    wanted = vd.predict(reference, x.float(), samples=256, seed=0, draw=draw)
    torch.testing.assert_close(found.probs.float(), wanted.probs, rtol=0.1, atol=0.03)
    torch.testing.assert_close(found.epistemic.float(), wanted.epistemic, rtol=0.5, atol=5e-3)


def test_moments_refuse_float16_and_take_bfloat16():
    net, x = vd.convert(make().bfloat16(), vd.sparse_vd(log_sigma2=-6.0)), torch.randn(4, 1, 8, 8)
    assert vd.predict(net, x.bfloat16(), mode="moments").probs.isfinite().all()
    with pytest.raises(vd.VardropError, match=r"`x` in a dtype that holds variances.*float16"):
        vd.predict(net.half(), x.half(), mode="moments")


def test_log_alpha_of_small_weights():
    q = vd.AdditiveGaussian()
    for dtype, small in ((torch.float16, 1e-3), (torch.float32, 1e-25), (torch.float64, 1e-200)):
        weight = torch.tensor([small, -small], dtype=dtype)
        found = q.log_alpha(weight, {"log_sigma2": torch.full((2,), -100.0)})
        wanted = -100 - 2 * weight.double().abs().log()
        torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=0)
    zero = torch.zeros(2, requires_grad=True)
    q.log_alpha(zero, {"log_sigma2": torch.zeros(2)}).sum().backward()
    assert zero.grad.tolist() == [0.0, 0.0]


def test_draws_of_a_narrow_layer_have_its_moments():
    for estimator in (vd.weight_sample, vd.per_example, vd.flipout, vd.local_reparameterization):
        recipe = vd.Recipe(vd.AdditiveGaussian(-2.0), estimator=estimator)
        layer, x = vd.convert(nn.Linear(5, 2).bfloat16(), recipe), torch.randn(1, 5).bfloat16()
        with vd.sampling(layer), torch.no_grad():
            draws = torch.vmap(layer, randomness="different")(x.expand(3000, 1, 5))
        draws = draws.double()
        # Dither the rounding of the outputs away, which adds a known variance.
        spacing = torch.exp2(torch.floor(torch.log2(draws.abs().clamp(min=1e-30))) - 7)
        draws = draws + (torch.rand_like(draws) - 0.5) * spacing
        variance = x.double().square() @ layer.variance().detach().double().T
        variance = variance + spacing.square().mean(0) / 6
        mean = x.double() @ layer.weight.detach().double().T + layer.bias.detach().double()
        error = 5.5 * (draws.std(0) / 3000**0.5) + spacing.mean(0)
        assert ((draws.mean(0) - mean).abs() < error).all()
        assert_variance(draws, variance)
        assert_mean(draws - draws.mean(0), torch.zeros_like(mean))
