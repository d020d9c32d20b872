"""One pass over the weights for all draws and the KL gives the gradient of the two apart."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import vardrop as vd

DRAWS = vd.Recipe(vd.AdditiveGaussian(-3.0), vd.LogUniform(), vd.weight_sample)
RECIPES = {
    "local": vd.sparse_vd(log_sigma2=-3.0),
    "draws": DRAWS,
    "flipout": vd.Recipe(vd.AdditiveGaussian(-3.0), vd.LogUniform(), vd.flipout),
    "normal": vd.bayes_by_backprop(log_sigma2=-3.0),
    "ard": vd.ard(log_sigma2=-3.0),
    "sigmoid": vd.sparse_vd(log_sigma2=-3.0, form="sigmoid"),
}


class Twice(nn.Module):
    """Uses one layer twice, and ends in a layer whose weight is tied to it."""

    def __init__(self):
        super().__init__()
        self.layer, self.tied = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.tied.weight = self.layer.weight

    def forward(self, x):
        return self.tied(torch.relu(self.layer(torch.relu(self.layer(x)))))


def dense():
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4))


def convolution():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten())


def last(net):
    return net.to(memory_format=torch.channels_last)


NETS = {
    "dense": (dense, torch.randn(7, 6)),
    "twice": (Twice, torch.randn(7, 6)),
    "convolution": (convolution, torch.randn(7, 3, 6, 6)),
    "channels-last": (lambda: last(convolution()), last(torch.randn(7, 3, 6, 6))),
}
Y = torch.randint(4, (7,))


def gradients(loss, net):
    found = torch.autograd.grad(loss, [p for p in net.parameters() if p.requires_grad])
    return torch.cat([g.flatten() for g in found])


def apart(net, x, samples, num_data):
    """The loss with nothing shared between the draws and the KL, from the same noise."""
    fits = [vd.Categorical()(net(x), Y) for _ in range(samples)]
    return sum(fits) / samples + vd.kl(net) / num_data


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", NETS)
def test_gradient_is_that_of_draws_and_kl_apart(name, recipe, samples):
    make, x = NETS[name]
    net = vd.convert(make(), RECIPES[recipe])
    elbo = vd.ELBO(net, vd.Categorical(), num_data=3, samples=samples)
    with torch.random.fork_rng():
        out = elbo(x, Y)
    with torch.random.fork_rng():
        loss = apart(net, x, samples, 3)
    torch.testing.assert_close(out.loss, loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradients(out.loss, net), gradients(loss, net), rtol=1e-4, atol=1e-6)


def test_gradients_accumulate_and_a_graph_may_be_used_again():
    net, x = vd.convert(dense(), RECIPES["local"]), NETS["dense"][1]
    elbo = vd.ELBO(net, vd.Categorical(), num_data=3)
    losses = [elbo(x, Y).loss for _ in range(2)]
    for loss in losses:
        loss.backward(retain_graph=True)
    gathered = torch.cat([p.grad.flatten() for p in net.parameters()])
    torch.testing.assert_close(gathered, sum(gradients(loss, net) for loss in losses))


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("value", [True, False])
def test_kl_alone_against_float64(value, transposed):
    weight, log_sigma2 = torch.randn(300, 301), 4 * torch.randn(300, 301) - 3
    if transposed:
        weight = weight.T.contiguous().T
    weight, log_sigma2 = weight.requires_grad_(), log_sigma2.requires_grad_()
    wide = [t.detach().double().requires_grad_() for t in (weight, log_sigma2)]
    mine = vd.functional.log_uniform_kl_additive(weight, log_sigma2, value=value)
    exact = vd.functional.log_uniform_kl_additive(*wide)
    if value:
        assert float(mine.detach()) == pytest.approx(float(exact.detach()), rel=2e-5)
    for a, b in zip(
        torch.autograd.grad(mine, (weight, log_sigma2)),
        torch.autograd.grad(exact, wide),
        strict=True,
    ):
        nonzero = b.abs() > 1e-30
        assert float((a.double() / b - 1).abs()[nonzero].max()) <= 2e-5


def test_kl_of_weights_whose_product_of_ratios_overflows():
    weight, log_sigma2 = torch.full((6,), 1e3), torch.full((6,), -40.0)
    value = vd.functional.log_uniform_kl_additive(weight, log_sigma2)
    exact = vd.functional.log_uniform_kl_additive(weight.double(), log_sigma2.double())
    assert float(value) == pytest.approx(float(exact), rel=2e-5)


def test_activation_checkpointing():
    class Checkpointed(nn.Module):
        def __init__(self, body):
            super().__init__()
            self.body = body

        def forward(self, x):
            return checkpoint(self.body, x, use_reentrant=False)

    body = vd.convert(dense(), RECIPES["local"])
    x = NETS["dense"][1]
    results = []
    for net in (body, Checkpointed(copy.deepcopy(body))):
        with torch.random.fork_rng():
            loss = vd.ELBO(net, vd.Categorical(), num_data=3)(x, Y).loss
            results.append(gradients(loss, net))
    torch.testing.assert_close(*results)


def test_nothing_is_shared_after_a_step_or_an_error():
    net = vd.convert(dense(), RECIPES["local"])
    elbo = vd.ELBO(net, vd.Categorical(), num_data=3)
    elbo(NETS["dense"][1], Y)
    with pytest.raises(RuntimeError):
        elbo(torch.randn(7, 5), Y)
    assert all(m._shared is None and not m._sharing for m in net if isinstance(m, vd.Linear))
