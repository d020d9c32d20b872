"""Variance networks: what the papers' tables show, at the bounds that we set in advance."""

import torch

from experiments.neklyudov import (
    train_parameterisation,
)
from tests.experiments.digits import digits


def test_a_short_run_logs_the_transition() -> None:
    data, test = digits()
    before = torch.get_rng_state()
    run = train_parameterisation("layer", data, test, epochs=3, samples=2, width=50)
    assert torch.equal(torch.get_rng_state(), before)
    assert [record["sixths of the training"] for record in run.curve] == [1, 2, 3]
    assert run.curve[0]["alpha below 1, %"] == 100.0
    assert run.elbo < 0
