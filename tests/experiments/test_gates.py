"""What gates do in training: Beta-Bernoulli closes units, concrete dropout finds its rate."""

from pathlib import Path

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import vardrop as vd
from experiments import concrete, lee_bb
from experiments.trainings import mlp
from vardrop.app.data import Images, data_directory
from vardrop.noisy import relevance
from vardrop.objective import ELBO, Categorical
from vardrop.tuning import train

needs_mnist = pytest.mark.skipif(
    not (data_directory() or Path()).joinpath("mnist").is_dir(),
    reason="MNIST is not in the data directory",
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
    found = concrete.line_fits(0, counts=(10, 2000), width=64, steps=400)["figures"]
    assert found["hidden rate, 2000 points"] < found["hidden rate, 10 points"] - 0.02
    assert found["epistemic deviation, 2000 points"] < found["epistemic deviation, 10 points"]
    assert found["error, 2000 points"] < 1.5


@pytest.mark.slow
def test_concrete_dropout_on_the_line() -> None:
    runs = [concrete.line_fits(seed)["curve"] for seed in range(3)]

    def means(name: str) -> list[float]:
        return [sum(r[name] for r in records) / 3 for records in zip(*runs, strict=True)]

    assert [record["points"] for record in runs[0]] == [10, 100, 1000, 10_000]
    for name in ("hidden rate", "epistemic deviation"):
        values = means(name)
        assert values[-1] < 0.75 * values[0], (name, values)
        assert values == sorted(values, reverse=True), (name, values)
    assert means("aleatoric deviation")[-1] == pytest.approx(1.0, abs=0.1)
    assert means("error")[-1] == pytest.approx(1.0, abs=0.1)


@needs_mnist
@pytest.mark.slow
def test_beta_bernoulli_on_lenet_500_300() -> None:
    figures = lee_bb.sparse_units(seed=0)["figures"]  # 15 dense epochs, 45 with gates
    assert figures["error, %"] <= figures["error of the dense net, %"] + 0.2
    assert figures["units 1"] <= 450
    assert figures["units 2"] + figures["units 3"] <= 2 / 3 * 800
