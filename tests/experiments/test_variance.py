"""Variance networks: what the papers' tables show, at the bounds that we set in advance."""

import torch

import vardrop as vd
from experiments.neklyudov import (
    small_net,
    train_parameterisation,
)
from experiments.trainings import batches
from tests.experiments.digits import digits
from vardrop.diagnostics import accuracies
from vardrop.tuning import train


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
