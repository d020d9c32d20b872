"""The loop: the numbers of a hand-written one, schedules, checks, switches."""

import copy
import math

import pytest
import torch
from torch import nn

from tests.refusals import assert_refused
from tests.tuning.shared import After, adam, data, objective, same
from vardrop._core.processes import World
from vardrop.tuning import Loop, NotFiniteError, train


def test_it_gives_the_numbers_of_a_bare_loop():
    (x, y), bare, looped = data(), objective(), objective()
    optimizer = adam(bare)
    torch.manual_seed(1)
    order = torch.Generator().manual_seed(5)
    for _ in range(3):
        for batch in torch.randperm(50, generator=order).split(16):
            optimizer.zero_grad()
            bare(x[batch], y[batch]).loss.backward()
            optimizer.step()
    torch.manual_seed(1)
    epochs = list(train(looped, adam(looped), x, y, 3, batch_size=16, seed=5))
    assert same(bare, looped)
    assert [e.epoch for e in epochs] == [0, 1, 2]
    assert epochs[0].loss == pytest.approx(epochs[0].nll + epochs[0].kl / 50, rel=1e-5)


def test_schedules_are_followed():
    (x, y), elbo = data(), objective()
    optimizer, rates, betas = adam(elbo, lr=0.5), [], []
    for epoch in train(elbo, optimizer, x, y, 3, beta=lambda e: e / 10, rate=lambda e: 1 / (1 + e)):
        rates.append(optimizer.param_groups[0]["lr"])
        betas.append(epoch.beta)
    assert rates == pytest.approx([0.5, 0.25, 0.5 / 3])
    assert betas == pytest.approx([0.0, 0.1, 0.2])


def test_groups_may_have_rates_of_their_own():
    (x, y), elbo = data(), objective()
    before = {n: p.detach().clone() for n, p in elbo.named_parameters()}
    list(train(elbo, adam(elbo), x, y, 1, rate=lambda epoch: (0.0, 1.0)))
    moved = {n for n, p in elbo.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {"net.0.log_sigma2", "net.2.log_sigma2"}


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("stop", [1, 4, 5, 9])
def test_a_restored_state_goes_on_bit_for_bit(stop, average):
    def start(seed):
        elbo = objective()
        torch.manual_seed(seed)
        return Loop(elbo, adam(elbo), *data(), 3, batch_size=16, average=average)

    first, again, whole = start(1), start(99), start(1)
    expected = list(whole.run())
    torch.manual_seed(1)
    list(first.run(After(lambda at: 4 * at.epoch + at.step == stop)))
    states = first.elbo.state_dict(), first.optimizer.state_dict(), *first.state()
    weights, moments, tensors, values = copy.deepcopy(states)
    torch.manual_seed(99)
    again.elbo.load_state_dict(weights)
    again.optimizer.load_state_dict(moments)
    again.load_state(tensors, values)
    assert list(again.run()) == expected[values["epoch"] :]
    assert same(whole.elbo, again.elbo)


def test_other_processes_draw_their_own_noise_after_a_restart():
    (x, y), elbo = data(), objective()
    state, drawn = Loop(elbo, adam(elbo), x, y, 1).state(), []
    for rank in (0, 1):
        Loop(elbo, adam(elbo), x, y, 1, world=World(rank, 2)).load_state(*state)
        drawn.append(torch.rand(3))
    assert not torch.equal(*drawn)


def test_clipping_bounds_the_gradient():
    (x, y), elbo, seen = data(), objective(), []
    optimizer = torch.optim.SGD(elbo.parameters(), lr=0.0)
    optimizer.register_step_pre_hook(
        lambda *_: seen.append(nn.utils.get_total_norm([p.grad for p in elbo.parameters()]).item())
    )
    for max_norm in (None, 0.01):
        list(Loop(elbo, optimizer, x, y, 1, max_norm=max_norm).run())
    assert seen[0] > 0.1
    assert seen[1] == pytest.approx(0.01, rel=1e-3)


def test_mixed_precision_computes_in_bfloat16_and_keeps_weights_in_float32():
    (x, y), elbo, seen = data(), objective(), []
    elbo.net[0].register_forward_hook(lambda m, i, out: seen.append(out.dtype))
    (epoch,) = Loop(elbo, adam(elbo), x, y, 1, precision="bfloat16").run()
    assert seen == [torch.bfloat16]
    assert elbo.net[0].weight.dtype == torch.float32
    assert math.isfinite(epoch.loss)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # inside torch.compile
def test_a_compiled_step_gives_the_same_numbers():
    (x, y), plain, compiled = data(), objective(), objective()
    for elbo, switch in ((plain, False), (compiled, True)):
        for layer in (elbo.net[0], elbo.net[2]):  # the compiled generator draws in another order
            layer.sampling = False
        list(Loop(elbo, adam(elbo), x, y, 3, compile=switch).run())
    assert torch.allclose(plain.net[0].weight, compiled.net[0].weight, atol=1e-5)


def test_shares_of_processes_make_the_mean_of_the_batch():
    batch = torch.arange(5)
    shares = [World(rank, 3).slice(batch) for rank in range(3)]
    assert torch.cat([rows for rows, _ in shares]).tolist() == batch.tolist()
    values = torch.tensor([3.0, 1.0, 4.0, 1.0, 5.0])
    mean = sum(weight * values[rows].mean() for rows, weight in shares) / 3
    assert float(mean) == pytest.approx(float(values.mean()))
    rows, weight = World(2, 3).slice(torch.arange(2))
    assert (len(rows), weight) == (1, 0.0)


@pytest.mark.parametrize("break_it, text", [
    (lambda elbo, x: x.fill_(float("nan")), r"nan \(the inputs of the batch\)"),
    (lambda elbo, x: elbo.net[2].weight.data[0].fill_(float("inf")), r"parameter 'net.2.weight'"),
    (lambda elbo, x: elbo.net[0].weight.data.fill_(1e38), r"output of layer '0'"),
])  # fmt: skip
def test_a_loss_that_is_not_finite_names_step_and_layer(break_it, text):
    (x, y), elbo = data(), objective()
    break_it(elbo, x)
    with pytest.raises(NotFiniteError, match=f"{text}.* in epoch 1, step 1. Lower the learning"):
        list(train(elbo, adam(elbo), x, y, 1))


def test_bad_arguments_are_told():
    (x, y), elbo = data(), objective()
    start = lambda y=y, **options: Loop(elbo, adam(elbo), x, y, 1, **options)
    assert_refused("same positive length in all tensors, but got 50 and 49", start, y[1:])
    assert_refused("`batch_size` to be an integer of at least 1, but got 0", start, batch_size=0)
    assert_refused("Expected `max_norm`", start, max_norm=0.0)
    assert_refused("Expected `precision`", start, precision="float8")


# Averaged parameters: their values, and what the model holds between epochs.


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
