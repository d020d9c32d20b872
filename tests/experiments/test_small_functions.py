"""Functions that experiments are made of: data, figures, thresholds, attacks."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence

import vardrop as vd
from experiments import concrete, lee_dropmax, molchanov, neklyudov_uses as uses, uci
from experiments.corruptions import CORRUPTIONS, corrupted, rotated
from experiments.lee_bb import active_units, units
from experiments.neklyudov import _exceeded_by, to_variance
from experiments.trainings import mlp
from tests.experiments.test_functions import few_rows
from tests.nets import digits
from tests.refusals import assert_refused
from tests.replay import replay
from vardrop.app.data import Images
from vardrop.tuning import train


def test_four_gaussians_sit_at_their_centres():
    x, y = uses.gaussians(20_000, torch.Generator().manual_seed(0))
    centres = torch.stack([x[y == k].mean(0) for k in range(4)])
    # Eight means with a standard error of 0.007, 5.7 of them.
    assert (centres - torch.tensor([[3.0, 3], [3, 10], [10, 3], [10, 10]])).abs().max() < 0.04


def test_first_of_each_class_keeps_the_order_of_the_file():
    y = torch.tensor([2, 0, 1, 0, 2, 1, 0, 2])
    chosen = lee_dropmax.first_of_each_class(Images(torch.arange(8.0).view(8, 1), y), 2)
    assert chosen.x.flatten().tolist() == [0, 1, 2, 3, 4, 5]
    assert chosen.y.tolist() == [2, 0, 1, 0, 2, 1]


def test_the_lowest_threshold_that_the_held_out_images_allow(monkeypatch):
    test, held = (torch.zeros(1, 1), torch.tensor(0)), (torch.zeros(1, 1), torch.tensor(1))
    by_weights = {4: (5.0, 2.0), 3: (6.0, 2.05), 2: (7.0, 2.1), 1: (8.0, 2.3)}  # test, held out

    def error(net, x, y):
        return by_weights[int(net.weight.count_nonzero())][int(y)]

    monkeypatch.setattr(molchanov, "error", error)
    net = nn.Linear(4, 1, bias=False)
    nn.init.ones_(net.weight)
    vd.convert(net, vd.sparse_vd()).log_sigma2.data.copy_(torch.tensor([[2.5, 1.5, 0.5, -1.0]]))
    found = molchanov._pruned(net, (2, 1, 0), test, held)
    assert (found["chosen threshold"], found["error, chosen threshold, %"]) == (1.0, 7.0)
    assert (found["compression, chosen threshold"], found["error, %"]) == (2.0, 5.0)
    assert found["error, threshold 0, %"] == 8.0


@pytest.mark.parametrize("noisy_bias", [False, True])
@pytest.mark.parametrize("posterior", [
    *(vd.MultiplicativeGaussian(0.5, per=per) for per in ("layer", "output", "weight")),
    vd.AdditiveGaussian(-3.0),
])  # fmt: skip
def test_the_swap_keeps_variances_and_returns_the_kl(posterior, noisy_bias):
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)).double()
    vd.convert(net, vd.Recipe(posterior, vd.LogUniform(), noisy_bias=noisy_bias), include="0")
    tensors = net[0].noisy_tensors().values()
    normals = [(t.mean.detach().clone(), t.variance().detach().sqrt()) for t in tensors]
    kls = [kl_divergence(Normal(mean, std), Normal(0 * mean, std)) for mean, std in normals]
    assert to_variance(net) == pytest.approx(sum(float(kl.sum()) for kl in kls), rel=1e-9)
    assert net[0].posterior == vd.ZeroMean()
    assert not net[0].weight.any()
    for tensor, (_, std) in zip(net[0].noisy_tensors().values(), normals, strict=True):
        torch.testing.assert_close(tensor.variance(), std.square().expand_as(tensor.mean))
    vd.revert(net)


def test_an_input_counts_while_one_of_its_weights_is_left():
    net = nn.Sequential(vd.convert(nn.Linear(3, 2), vd.sparse_vd()))
    net[0].weight.data.fill_(1.0)
    net[0].log_sigma2.data.copy_(torch.tensor([[5.0, 5.0, -5.0], [5.0, -5.0, -5.0]]))
    assert units(net) == [2.0]


def test_units_of_gates_and_what_is_open_for_an_input():
    net = nn.Sequential(vd.convert(nn.Linear(4, 2), vd.beta_bernoulli()))
    net[0].gate.raw_a.data[0] = -10.0  # E pi = 4.5e-5, below the threshold of 1e-3
    assert units(net) == [3.0]
    vd.convert(net, vd.dependent_beta_bernoulli())
    gate = net[0].gate
    with torch.no_grad():
        gate.running_mean.zero_()
        gate.running_var.fill_(1.0)
        gate.scale.fill_(1.0)
        gate.shift.copy_(torch.tensor([9.0, 9.0, -9.0, 0.0]))
    x = torch.tensor([[0.0, 0, 0, 1], [0, 0, 0, -1]])  # the last unit is open for the first row
    assert active_units(net, x) == [1.5]


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_the_exceeded_by_is_exceeded_by_the_share(share: float):
    sizes = torch.arange(1.0, 11.0)
    assert int((sizes > _exceeded_by(sizes, share)).sum()) == round(10 * share)


def linear() -> nn.Linear:
    net = vd.convert(nn.Linear(3, 2, bias=False), vd.bayes_by_backprop(log_sigma2=-40.0)).eval()
    net.weight.data.copy_(torch.tensor([[1.0, -1.0, 0.0], [0.0, 0.0, 2.0]]))
    return net


@pytest.mark.parametrize("samples", [0, 3])
def test_step_of_a_linear_classifier(samples: int):
    # d loss / dx = p_1 (w_1 - w_0) for class 0: signs (-, +, +).
    x = torch.full((1, 3), 0.5)
    found = uses.fgsm(linear(), x, torch.tensor([0]), 0.1, samples)
    assert torch.allclose(found, torch.tensor([[0.4, 0.6, 0.6]]))
    far = uses.fgsm(linear(), x, torch.tensor([0]), 0.8)
    assert torch.allclose(far, torch.tensor([[0.0, 1, 1]]))
    assert torch.equal(uses.fgsm(linear(), x, torch.tensor([0]), 0.0), x)


def test_ensembles_average_probabilities():
    net, x = vd.convert(nn.Linear(2, 2), vd.variance_layer()), torch.ones(1, 2)
    found = replay(uses.log_probabilities, net, x, 4).exp()
    assert torch.allclose(found, torch.stack([net(x).softmax(-1) for _ in range(4)]).mean(0))
    assert found.sum().item() == pytest.approx(1.0)


def test_modes_stay_and_errors():
    test = Images(torch.rand(9, 1, 8, 8), torch.arange(9))
    net = vd.convert(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), vd.sparse_vd())
    uses.attack_curve(net, test, (0.1,), samples=1)
    assert net.training
    assert_refused("Expected `epsilon` to be at least 0", uses.fgsm, net, test.x, test.y, -math.pi)


# Corruptions of images: ranges, strengths, and what each does to a picture that is known.


def picture(count: int = 3) -> torch.Tensor:
    """A bright bar left of the middle, on black."""
    x = torch.zeros(count, 1, 28, 28)
    x[:, :, 8:20, 10:13] = 0.9
    return x


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_images_stay_images_and_a_seed_decides(kind):
    x, before = picture(), torch.get_rng_state()
    found = [corrupted(kind, x, strength, seed=4) for strength in range(1, 6)]
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(x, picture())
    for image in found:
        assert image.shape == x.shape
        assert image.isfinite().all()
        assert image.min() >= 0
        assert image.max() <= 1 + 1e-6
    assert torch.equal(found[2], corrupted(kind, x, 3, seed=4))
    far = [float((image - x).square().mean()) for image in found]
    assert 0 < far[0] < far[4]


def test_geometry_is_that_of_pixels():
    x, right = picture(), torch.zeros(3, 1, 28, 28)
    right[:, :, 15:18, 8:20] = 0.9  # the bar, turned by a quarter
    turned = rotated(x, torch.full((3,), math.pi / 2))
    assert min(float((turned - t).abs().max()) for t in (right, right.flip(2))) < 1e-4
    moved = corrupted("translate", x, 2, seed=0)
    shifts = [x.roll((a, b), (2, 3)) for a in (-2, 2) for b in (-2, 2)]
    for image in moved:
        assert min(float((image - s[0]).abs().max()) for s in shifts) < 1e-4
    assert float(corrupted("scale", x, 5, seed=0).sum() / x.sum()) == pytest.approx(0.25, rel=0.05)
    assert float(corrupted("motion blur", x, 1, 0).sum() / x.sum()) == pytest.approx(1, rel=0.01)


def test_noise_has_the_amount_that_its_strength_says():
    grey = torch.full((50, 1, 28, 28), 0.5)
    count = grey.numel()
    flipped = (corrupted("impulse noise", grey, 4, seed=1) != 0.5).double().mean()
    assert abs(float(flipped) - 0.17) < 6 * math.sqrt(0.17 * 0.83 / count)
    shot = corrupted("shot noise", grey, 1, seed=1)
    assert abs(float(shot.var()) - 0.5 / 60) < 6 * 0.5 / 60 * math.sqrt(3 / count)


# What gates do in training: Beta-Bernoulli closes units, concrete dropout finds its rate.


def error(net: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return 100 * float((net.eval()(x).argmax(1) != y).float().mean())


def test_beta_bernoulli_closes_the_empty_pixels_of_the_digits() -> None:
    x, y = digits()
    data, net = Images(x[:1400], y[:1400]), mlp(64, 32, 10)
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    list(train(vd.ELBO(net, vd.Categorical(), 1400, beta=0.0), optimizer, *data, 15))
    dense = error(net, x[1400:], y[1400:])
    elbo = vd.ELBO(vd.convert(net, vd.beta_bernoulli()), vd.Categorical(), 1400)
    optimizer = torch.optim.Adam(vd.parameter_groups(elbo, lr=1e-3, noise_lr=1e-1))
    list(train(elbo, optimizer, *data, 30, rate=lambda e: 1.0 if e < 15 else 0.1))
    kept, always_off = {name: r.kept for name, r in vd.relevance(net).items()}, (x == 0).all(0)
    assert not kept["1.gate"][always_off].any()
    assert kept["1.gate"][~always_off].float().mean() > 0.5
    assert error(net, x[1400:], y[1400:]) < dense + 3.0


def test_concrete_dropout_learns_a_lower_rate_from_more_data() -> None:
    found = concrete.line_fits(0, counts=(10, 2000), width=64, steps=400)["figures"]
    assert found["hidden rate, 2000 points"] < found["hidden rate, 10 points"] - 0.02
    assert found["epistemic deviation, 2000 points"] < found["epistemic deviation, 10 points"]
    assert found["error, 2000 points"] < 1.5


# UCI splits: what is held out of what, and scores that can be worked out by hand.


METHOD = uci.Method("plain", hidden=4, batch=16, samples=4, members=1)


def parts(split):
    _, y, tests = few_rows("few")
    outer = uci._outer(*few_rows("few")[:2], tests[split])
    return y, tests[split], outer, uci._inner(outer, split)


def test_test_rows_are_those_of_the_split_and_the_rest_trains():
    y, tested, outer, inner = parts(1)
    rest = [k for k in range(120) if k not in tested]
    assert torch.allclose(outer.test_y, ((y[tested] - y[rest].mean()) / outer.unit).float())
    assert torch.allclose(outer.y, ((y[rest] - y[rest].mean()) / y[rest].std()).float(), atol=1e-6)
    assert (len(inner.x), len(inner.test_x)) == (104, 12)  # a tenth of 116


def test_inner_rows_are_training_rows_in_units_of_the_target():
    _, _, outer, inner = parts(0)
    # Standardising twice leaves distances in units of the target as they were.
    gaps = lambda y, unit: ((y.double() - y.double().mean()) * unit).flatten().sort().values
    both = torch.cat([inner.y, inner.test_y])
    assert torch.allclose(gaps(both, inner.unit), gaps(outer.y, outer.unit), atol=1e-4)


def test_scores_of_one_normal_are_those_of_the_formulas(monkeypatch):
    part = uci.Part(*(torch.zeros(2, 1),) * 3, torch.tensor([[0.0], [3.0]]), unit=2.0)
    draws = (torch.zeros(1, 2).double(), torch.ones(1, 2).double())
    monkeypatch.setattr(uci.Method, "_draws", lambda *_: draws)
    found = METHOD.scores([], part)
    assert found["RMSE"] == pytest.approx(2 * math.sqrt(4.5))
    assert found["NLL"] == pytest.approx(0.5 * math.log(2 * math.pi) + 9 / 4 + math.log(2))
    assert found["coverage"] == 0.5


def test_splits_side_by_side_are_trained_on_their_own_rows():
    outers = [parts(0)[2], parts(1)[2]]
    both = METHOD.train(uci.Choice(0, False, 400), outers, 0)
    wrong = [METHOD.scores(nets, part)["RMSE"] for nets, part in zip(both, outers, strict=True)]
    assert max(wrong) < 0.5  # the plane's noise is 0.1, the targets spread by more than 2


def test_a_missing_table_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("VARDROP_DATA", str(tmp_path))
    assert_refused(r"the file .*nowhere\.csv, but it is not there", uci.split_table, "nowhere")
