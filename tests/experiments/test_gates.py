"""What gates do in training: Beta-Bernoulli closes units, concrete dropout finds its rate."""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import vardrop as vd
from experiments import concrete
from experiments.trainings import mlp
from vardrop.app.data import Images
from vardrop.noisy import relevance
from vardrop.objective import ELBO, Categorical
from vardrop.tuning import train


def error(net: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return 100 * float((net.eval()(x).argmax(1) != y).float().mean())


def test_beta_bernoulli_closes_the_empty_pixels_of_the_digits() -> None:
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x).float() / 16, torch.tensor(y)
    data, net = Images(x[:1400], y[:1400]), mlp(64, 32, 10)
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    for _ in train(ELBO(net, Categorical(), 1400, beta=0.0), optimizer, *data, 15):
        pass
    dense = error(net, x[1400:], y[1400:])
    elbo = ELBO(vd.convert(net, vd.beta_bernoulli()), Categorical(), 1400)
    optimizer = torch.optim.Adam(vd.parameter_groups(elbo, lr=1e-3, noise_lr=1e-1))
    for _ in train(elbo, optimizer, *data, 30, rate=lambda e: 1.0 if e < 15 else 0.1):
        pass
    kept, always_off = {name: r.kept for name, r in relevance(net).items()}, (x == 0).all(0)
    assert not kept["1.gate"][always_off].any()
    assert kept["1.gate"][~always_off].float().mean() > 0.5
    assert error(net, x[1400:], y[1400:]) < dense + 3.0


def test_concrete_dropout_learns_a_lower_rate_from_more_data() -> None:
    found = concrete.line_fits(0, counts=(10, 2000), width=64, steps=400)["figures"]
    assert found["hidden rate, 2000 points"] < found["hidden rate, 10 points"] - 0.02
    assert found["epistemic deviation, 2000 points"] < found["epistemic deviation, 10 points"]
    assert found["error, 2000 points"] < 1.5
