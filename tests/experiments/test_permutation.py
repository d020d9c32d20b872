"""Permuted variances: the same multiset, the same means, another net."""

import pytest
import torch
from torch import nn

import vardrop as vd
from experiments.diagnostics import Permuted, permutation_test, permute_variances

RECIPES = {
    "variance": vd.variance_layer(), "sign": vd.variance_layer("sign"), "sparse": vd.sparse_vd(),
    "layer": vd.variational_dropout(per="layer"), "dropconnect": vd.dropconnect(),
}  # fmt: skip


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("layer", [lambda: nn.Linear(6, 5), lambda: nn.Conv2d(2, 3, 2)])
def test_variances_move_and_means_stay(name: str, layer) -> None:
    net = vd.convert(layer().double(), RECIPES[name])
    if name == "sparse":
        net.log_sigma2.data.normal_()
    before = net.variance().detach().clone()
    after = permute_variances(net, torch.Generator().manual_seed(3))
    assert not torch.equal(after.variance(), before)
    assert torch.equal(after.variance().flatten().sort().values, before.flatten().sort().values)
    assert torch.equal(after.weight, net.weight)
    assert torch.equal(net.variance(), before)
    assert not isinstance(net.posterior, Permuted)


@pytest.mark.parametrize("estimator", [vd.weight_sample, vd.per_example, vd.flipout])
def test_draws_have_the_permuted_variance(estimator) -> None:
    net = vd.convert(nn.Linear(3, 2, bias=False).double(), vd.variance_layer("sign", estimator))
    shuffled = permute_variances(net, torch.Generator().manual_seed(1))
    x = torch.eye(3, dtype=torch.float64)
    with torch.no_grad(), vd.sampling(shuffled):
        y = shuffled(x)  # signs: |y| is the standard deviation of each weight
    assert torch.allclose(y.abs(), shuffled.variance().sqrt().T)


def test_noise_passed_explicitly_gives_the_same_deviation_elsewhere() -> None:
    q, weight, noise = vd.AdditiveGaussian(), torch.randn(2, 3), torch.randn(4, 2, 3)
    tensors = {"log_sigma2": torch.randn(2, 3)}
    plain, moved = (p.perturbation(weight, noise, tensors) for p in (q, Permuted(q, 5)))
    assert torch.equal(moved.flatten(1).sort(1).values, plain.flatten(1).sort(1).values)
    assert torch.equal(Permuted(q, 5).sample(weight, noise, tensors), weight + moved)


def test_tied_layers_share_their_permutation() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    net[1].weight = net[0].weight
    after = permute_variances(vd.convert(net, vd.variance_layer()))
    assert torch.equal(after[0].variance(), after[1].variance())


def test_generator_fixes_the_permutations() -> None:
    net = vd.convert(nn.Linear(8, 8), vd.variance_layer())
    a, b, c = (permute_variances(net, torch.Generator().manual_seed(s)) for s in (1, 1, 2))
    assert torch.equal(a.variance(), b.variance())
    assert not torch.equal(a.variance(), c.variance())


def test_scores_before_and_after() -> None:
    net = vd.convert(nn.Linear(4, 4), vd.variance_layer())
    found = permutation_test(net, lambda m: m.variance()[0, 0].item(), permutations=7)
    assert found.before == net.variance()[0, 0].item()
    assert found.after.shape == (7,)
    assert found.drop == pytest.approx(found.before - found.after.mean().item())
    assert str(found).startswith(f"{found.before:.4f} -> {found.after.mean().item():.4f} +- ")


def test_errors() -> None:
    with pytest.raises(vd.VardropError, match="Expected `net` to have noisy weights"):
        permute_variances(vd.convert(nn.Linear(2, 2), vd.binary_dropout()))
