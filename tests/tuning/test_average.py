"""Averaged parameters: their values, and what the model holds between epochs."""

import torch

from tests.tuning.shared import After, adam, data, objective
from vardrop.tuning import Loop


def flat(elbo):
    return torch.cat([p.detach().flatten() for p in elbo.parameters()])


def trace(average):
    """The parameters after every step and every epoch."""
    elbo, steps = objective(), []
    training = Loop(elbo, adam(elbo), *data(), 3, 10, average=average)
    torch.manual_seed(1)
    epochs = [flat(elbo) for _ in training.run(After(lambda at: steps.append(flat(elbo))))]
    return steps, epochs


def test_the_average_is_that_of_all_steps_and_the_training_goes_on_without_it():
    (plain, _), (steps, epochs) = trace(False), trace(True)
    torch.testing.assert_close(torch.stack(steps), torch.stack(plain))
    # below 1000 steps the weight 1 / t makes the mean of all steps so far
    for epoch in range(3):
        expected = torch.stack(plain[: 5 * (epoch + 1)]).mean(0)
        torch.testing.assert_close(epochs[epoch], expected, rtol=1e-5, atol=1e-6)
