"""What gates do in training: Beta-Bernoulli closes units, concrete dropout finds its rate."""

from pathlib import Path

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import vardrop as vd
from experiments import beta_bernoulli, concrete
from experiments.nets import mlp
from vardrop.data import Images, data_directory
from vardrop.noisy import relevance
from vardrop.objective import ELBO, Categorical
from vardrop.training import train

needs_mnist = pytest.mark.skipif(
    not (data_directory() / "mnist").is_dir(), reason="MNIST is not in the data directory"
)


def error(net: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return 100 * float((net.eval()(x).argmax(1) != y).float().mean())


def test_beta_bernoulli_closes_the_empty_pixels_of_the_digits() -> None:
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x).float() / 16, torch.tensor(y)
    data = Images(x[:1400], y[:1400])
    net = mlp(64, 32, 10)
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    for _ in train(ELBO(net, Categorical(), 1400, beta=0.0), optimizer, *data, 15):
        pass
    dense = error(net, x[1400:], y[1400:])
    elbo = ELBO(vd.convert(net, vd.beta_bernoulli()), Categorical(), 1400)
    optimizer = torch.optim.Adam(vd.parameter_groups(elbo, lr=1e-3, noise_lr=1e-1))
    for _ in train(elbo, optimizer, *data, 30, rate=lambda e: 1.0 if e < 15 else 0.1):
        pass
    kept = {name: r.kept for name, r in relevance(net).items()}
    always_off = (x == 0).all(0)
    assert not kept["1.gate"][always_off].any()
    assert kept["1.gate"][~always_off].float().mean() > 0.5
    assert error(net, x[1400:], y[1400:]) < dense + 3.0


def test_concrete_dropout_learns_a_lower_rate_from_more_data() -> None:
    few = concrete.run(10, seed=0, width=64, steps=400)
    many = concrete.run(2000, seed=0, width=64, steps=400)
    assert many["hidden_rate"] < few["hidden_rate"] - 0.02
    assert many["epistemic"] < few["epistemic"]
    assert many["rmse"] < 1.5


@pytest.mark.slow
def test_concrete_dropout_on_the_line(tmp_path: Path) -> None:
    done = concrete.sweep(tmp_path / "concrete.json", list(concrete.COUNTS))

    def mean(name: str, count: int) -> float:
        return sum(done[f"{count}/{seed}"][name] for seed in range(3)) / 3

    for name in ("hidden_rate", "epistemic"):
        values = [mean(name, n) for n in concrete.COUNTS]
        assert values[-1] < 0.75 * values[0], (name, values)
        assert values == sorted(values, reverse=True), (name, values)
    assert mean("aleatoric", 10_000) == pytest.approx(1.0, abs=0.1)
    assert mean("rmse", 10_000) == pytest.approx(1.0, abs=0.1)


@needs_mnist
@pytest.mark.slow
def test_beta_bernoulli_on_lenet_500_300() -> None:
    figures = beta_bernoulli.sparse_units(seed=0)["figures"]  # 15 dense epochs, 45 with gates
    assert figures["error, %"] <= figures["error of the dense net, %"] + 0.2
    assert figures["units 1"] <= 450
    assert figures["units 2"] + figures["units 3"] <= 2 / 3 * 800
