"""Variance networks: what the papers' tables show, at the bounds that we set in advance."""

from pathlib import Path

import pytest
import torch

import vardrop as vd
from experiments.diagnostics import accuracies
from experiments.kingma import gradient_variances
from experiments.neklyudov import (
    PARAMETERISATIONS,
    small_net,
    train_parameterisation,
    variance_lenet5,
)
from experiments.trainings import batches
from tests.experiments.digits import digits
from vardrop.app.data import data_directory, load_images
from vardrop.tuning import train

needs_mnist = pytest.mark.skipif(
    not (data_directory() or Path()).joinpath("mnist").is_dir(),
    reason="MNIST is not there (VARDROP_DATA)",
)


def test_a_short_run_logs_the_transition() -> None:
    data, test = digits()
    before = torch.get_rng_state()
    run = train_parameterisation("layer", data, test, epochs=3, samples=2, width=50)
    assert torch.equal(torch.get_rng_state(), before)
    assert [record["sixths of the training"] for record in run.curve] == [1, 2, 3]
    assert run.curve[0]["alpha below 1, %"] == 100.0
    assert run.elbo < 0


def test_a_variance_layer_on_digits() -> None:
    data, test = digits()
    net = vd.convert(small_net(64, 32, 100), vd.variance_layer(), where="4")
    elbo = vd.ELBO(net, vd.Categorical(), num_data=len(data.x))
    optimizer = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], lr=1e-2)
    for _ in train(elbo, optimizer, *data, 15):
        pass
    found = accuracies(net, batches(test))
    assert found.deterministic < 0.2
    assert found.ensemble > 0.9


@pytest.mark.slow
@needs_mnist
@pytest.mark.parametrize(
    ("noise", "least"), [("gaussian", 98.9), ("sign", 98.5), ("uniform", 98.5)]
)
def test_lenet5_with_a_variance_layer(noise, least: float) -> None:
    found = variance_lenet5(0, noise, epochs=8, samples=20)["figures"]
    assert found["one draw, %"] >= 97
    assert found["deterministic, %"] < 15
    assert found["ensemble, %"] >= least


@pytest.mark.slow
@needs_mnist
def test_four_parameterisations_and_the_swap() -> None:
    data, test = load_images("mnist"), load_images("mnist", "test")
    runs = {name: train_parameterisation(name, data, test) for name in PARAMETERISATIONS}
    last = {name: run.curve[-1] for name, run in runs.items()}
    for name in ("layer", "neuron"):
        assert last[name]["deterministic, %"] < 20
    for name in ("weight", "additive"):
        assert last[name]["deterministic, %"] > 80
    assert all(record["ensemble, %"] > 96 for record in last.values())
    elbo = {name: run.elbo for name, run in runs.items()}
    print(elbo, last)
    assert elbo["layer"] > elbo["neuron"] > elbo["additive"] > elbo["weight"]
    net = runs["layer"].net
    before = accuracies(net, batches(test), samples=50)
    vd.to_variance(net)
    after = accuracies(net, batches(test), samples=50)
    assert abs(after.ensemble - before.ensemble) < 0.003


@pytest.mark.slow
@needs_mnist
def test_order_of_gradient_variances() -> None:
    figures = gradient_variances(
        seed=0, epochs=3, width=100, batch=200, batches=40, example_batches=40, examples=20_000
    )["figures"]
    for layer in ("top", "bottom"):
        order = [
            figures[f"{name}, {layer}"] for name in ("none", "local", "per_example", "per_batch")
        ]
        assert order == sorted(order)
