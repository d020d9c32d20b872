import pytest
import torch
from torch import nn

import vardrop as vd
from tests.nets import Parts
from tests.refusals import assert_refused

X, Y = torch.randn(8, 4), torch.randint(3, (8,))


def noisy():
    return vd.convert(nn.Linear(4, 3), vd.sparse_vd(log_sigma2=-3.0))


def test_parts_add_up():
    elbo = vd.ELBO(noisy(), vd.Categorical(), num_data=50, beta=0.3)
    out = elbo(X, Y)
    torch.testing.assert_close(out.loss, out.nll + 0.3 * out.kl / 50)
    torch.testing.assert_close(out.kl, vd.kl(elbo.net))
    assert float(out.beta) == pytest.approx(0.3)


FIRST = {
    "dropout": lambda: nn.Dropout(0.5, inplace=True),
    "relu": lambda: nn.ReLU(inplace=True),
    "own": lambda: Parts(lambda _, x: x.add_(1)),
}


@pytest.mark.parametrize("samples", [1, 4])
@pytest.mark.parametrize("first", FIRST)
def test_a_net_that_begins_in_place_leaves_the_input_alone(first, samples):
    net = nn.Sequential(FIRST[first](), nn.Linear(4, 3))
    vd.convert(net, vd.sparse_vd(log_sigma2=-30.0))
    elbo, x = vd.ELBO(net, vd.Categorical(), num_data=50, samples=samples), X.clone()
    with torch.random.fork_rng():
        found = elbo(x, Y)
    assert torch.equal(x, X)
    with torch.random.fork_rng():
        draws = [vd.Categorical()(net(X.clone()), Y) for _ in range(samples)]
    torch.testing.assert_close(found.nll, sum(draws) / samples, rtol=1e-5, atol=1e-5)


def test_inputs_in_a_structure_are_left_alone_too():
    def run(net, batch):
        return net.layer(batch["x"].mul_(0) + batch["rest"][0].add_(1))

    net = vd.convert(Parts(run, layer=nn.Linear(4, 3)), vd.sparse_vd())
    elbo = vd.ELBO(net, vd.Categorical(), num_data=50, samples=2)
    batch = {"x": X.clone(), "rest": (X.clone(),), "name": "a"}
    elbo(batch, Y)
    assert torch.equal(batch["x"], X)
    assert torch.equal(batch["rest"][0], X)


def test_the_nll_is_that_of_predict():
    net = vd.convert(nn.Conv2d(1, 2, 1), vd.bayes_by_backprop(log_sigma2=-30.0))
    x, y = torch.randn(3, 1, 4, 4), torch.randint(2, (3, 4, 4))
    nll = vd.ELBO(net, vd.Categorical(), 3)(x, y).nll
    predicted = -vd.predict(net, x, samples=4).log_prob(y).mean()
    torch.testing.assert_close(nll.detach(), predicted, rtol=1e-4, atol=1e-4)


def test_a_plain_net_trains_by_likelihood_alone():
    out = vd.ELBO(nn.Linear(4, 3), vd.Categorical(), num_data=5, beta=0.0)(X, Y)
    torch.testing.assert_close(out.loss, out.nll)
    assert float(out.kl) == 0.0


def test_schedules():
    warm = vd.linear_warmup(5, 20)
    assert [warm(e) for e in (0, 5, 20, 100)] == [0.0, 0.0, 1.0, 1.0]
    assert (vd.cyclical(10, rise=1.0)(25), vd.constant(0.2)(7)) == (pytest.approx(0.5), 0.2)


def test_parameter_groups_keep_decay_off_the_noise():
    net = nn.Sequential(noisy(), nn.BatchNorm1d(3))
    elbo = vd.ELBO(net, vd.Gaussian(learned=True), num_data=5)
    weights, noise = vd.parameter_groups(elbo, lr=1e-3, noise_lr=1e-2, weight_decay=1e-4)
    assert noise["params"] == [net[0].log_sigma2]
    assert (noise["weight_decay"], noise["lr"]) == (0.0, 1e-2)
    assert (weights["weight_decay"], weights["lr"], len(weights["params"])) == (1e-4, 1e-3, 5)
    torch.optim.AdamW([weights, noise])


def test_bad_input():
    column = torch.zeros(3, 1)
    assert_refused("`std` to be a finite number and above 0", vd.Gaussian, std=0.0)
    assert_refused("broadcasting would mix examples", vd.Gaussian(), column, torch.zeros(3))
    assert_refused("even last axis", vd.HeteroscedasticGaussian(), torch.zeros(3, 3), column)


def test_a_loss_that_sums_over_examples_is_an_error():
    elbo = vd.ELBO(noisy(), nn.CrossEntropyLoss(reduction="sum"), 8)
    assert_refused("a mean over examples", elbo, X, Y)
    assert bool(vd.ELBO(noisy(), nn.CrossEntropyLoss(), 8)(X, Y).loss.isfinite())


def test_a_head_over_positions_needs_the_classes_last():
    x = torch.randint(7, (12, 6))
    net = torch.nn.Sequential(torch.nn.Embedding(7, 6), torch.nn.ReLU(), torch.nn.Linear(6, 5))
    vd.convert(net, vd.dropmax())
    assert_refused("class_axis=-1", vd.ELBO(net, vd.Categorical(), 12), x, x % 5)
    elbo = vd.ELBO(net, vd.Categorical(class_axis=-1), 12)
    elbo(x, x % 5).loss.backward()
    torch.testing.assert_close(vd.predict(elbo, x, 8, seed=0).probs.sum(-1), torch.ones(12, 6))
