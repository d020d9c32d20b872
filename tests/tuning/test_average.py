"""Averaged parameters: their values, what the model holds between epochs, and resuming."""

import copy

import pytest
import torch

import vardrop as vd
from tests.tuning.shared import After
from vardrop.tuning import Loop


def loop(average, epochs=3, rate=None):
    torch.manual_seed(0)
    x, y = torch.randn(60, 4), torch.arange(60) % 3
    elbo = vd.ELBO(vd.convert(torch.nn.Linear(4, 3), vd.bayes_by_backprop()), vd.Categorical(), 60)
    optimizer = torch.optim.Adam(vd.parameter_groups(elbo, lr=1e-2))
    return Loop(elbo, optimizer, x, y, epochs, 10, rate=rate, average=average)


def trace(training):
    """The parameters after every step and every epoch."""
    steps, epochs = [], []
    record = lambda at: steps.append(flat(training))
    for _ in training.run(After(record)):
        epochs.append(flat(training))
    return steps, epochs


def flat(training):
    return torch.cat([p.detach().flatten() for p in training.elbo.parameters()])


def test_the_average_is_that_of_all_steps_and_the_training_goes_on_without_it():
    (plain, _), (steps, epochs) = trace(loop(False)), trace(loop(True))
    torch.testing.assert_close(torch.stack(steps), torch.stack(plain))
    # below 1000 steps the weight 1 / t makes the mean of all steps so far
    for epoch in range(3):
        expected = torch.stack(plain[: 6 * (epoch + 1)]).mean(0)
        torch.testing.assert_close(epochs[epoch], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stop", [1, 2])
def test_a_resumed_training_has_the_same_average(stop):
    whole = loop(True)
    list(whole.run())
    first = loop(True)
    running = first.run()
    for _ in range(stop):
        next(running)
    kept = (first.state(), first.elbo.state_dict(), first.optimizer.state_dict())
    (state, module, adam), second = copy.deepcopy(kept), loop(True)
    second.elbo.load_state_dict(module)
    second.optimizer.load_state_dict(adam)
    second.load_state(*state)
    list(second.run())
    torch.testing.assert_close(flat(second), flat(whole), rtol=0, atol=0)


def test_groups_may_have_rates_of_their_own():
    training = loop(False, 1, rate=lambda epoch: (0.0, 1.0))
    before = {n: p.detach().clone() for n, p in training.elbo.named_parameters()}
    list(training.run())
    moved = {n: not torch.equal(p, before[n]) for n, p in training.elbo.named_parameters()}
    assert moved == {"net.weight": False, "net.bias": False, "net.log_sigma2": True}
