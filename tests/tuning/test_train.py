"""The loop: the numbers of a hand-written one, schedules, checks, switches."""

import copy
import math

import pytest
import torch
from torch import nn

import vardrop as vd
from tests.nets import Parts
from tests.refusals import assert_refused
from tests.tuning.shared import After, adam, data, objective
from vardrop._core.processes import World
from vardrop.app.runs.run_callbacks import RunCallback
from vardrop.tuning import Loop, NotFiniteError, Position, minimize, train
from vardrop.tuning.stacked import StackedTraining


def test_schedules_are_followed():
    (x, y), elbo = data(), objective()
    optimizer, rates, betas = adam(elbo, lr=0.5), [], []
    for epoch in train(elbo, optimizer, x, y, 3, beta=lambda e: e / 10, rate=lambda e: 1 / (1 + e)):
        rates.append(optimizer.param_groups[0]["lr"])
        betas.append(epoch.beta)
    assert (rates, betas) == (pytest.approx([0.5, 0.25, 0.5 / 3]), pytest.approx([0.0, 0.1, 0.2]))


def test_groups_may_have_rates_of_their_own():
    (x, y), elbo = data(), objective()
    before = {n: p.detach().clone() for n, p in elbo.named_parameters()}
    list(train(elbo, adam(elbo), x, y, 1, rate=lambda epoch: (0.0, 1.0)))
    moved = {n for n, p in elbo.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {"net.0.log_sigma2", "net.2.log_sigma2"}


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
    norm = lambda: nn.utils.get_total_norm([p.grad for p in elbo.parameters()]).item()
    optimizer.register_step_pre_hook(lambda *_: seen.append(norm()))
    for max_norm in (None, 0.01):
        list(Loop(elbo, optimizer, x, y, 1, max_norm=max_norm).run())
    assert seen[0] > 0.1
    assert seen[1] == pytest.approx(0.01, rel=1e-3)


def test_mixed_precision_computes_in_bfloat16_and_keeps_weights_in_float32():
    (x, y), elbo, seen = data(), objective(), []
    elbo.net[0].register_forward_hook(lambda m, i, out: seen.append(out.dtype))
    (epoch,) = Loop(elbo, adam(elbo), x, y, 1, precision="bfloat16").run()
    assert (seen, elbo.net[0].weight.dtype) == ([torch.bfloat16], torch.float32)
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
    return steps, [flat(elbo) for _ in training.run(After(lambda at: steps.append(flat(elbo))))]


def test_the_average_is_that_of_all_steps_and_the_training_goes_on_without_it():
    (plain, _), (steps, epochs) = trace(False), trace(True)
    torch.testing.assert_close(torch.stack(steps), torch.stack(plain))
    # below 1000 steps the weight 1 / t makes the mean of all steps so far
    for epoch in range(3):
        expected = torch.stack(plain[: 5 * (epoch + 1)]).mean(0)
        torch.testing.assert_close(epochs[epoch], expected, rtol=1e-5, atol=1e-6)


# Nets trained side by side are trained as each would be alone.


EPOCHS, BATCH, LR = 3, 5, 0.05


def groups(elbo):
    return vd.parameter_groups(elbo, LR)


def objectives(recipe, likelihood, outputs, count=3):
    found = []
    for _ in range(count):
        net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, outputs))
        if recipe is not None:
            vd.convert(net, recipe)
        found.append(vd.ELBO(net, likelihood(), 10, float(recipe is not None)))
    return found


def data_stacked(classes, counts=(10, 10, 10)):
    generator, pairs = torch.Generator().manual_seed(1), []
    for count in counts:
        x = torch.randn(count, 4, generator=generator)
        y = torch.randint(classes, (count,), generator=generator) if classes else x[:, :1].sin()
        pairs.append((x, y, None))
    return pairs


def stack(elbos, examples, betas):
    rate = lambda epoch: 1 - epoch / EPOCHS
    return StackedTraining(elbos, examples, groups, EPOCHS, BATCH, betas, rate, seed=3)


def trained(*arguments):
    training = stack(*arguments)
    training.run()
    return training.states()


RECIPES = [None, vd.sparse_vd(), vd.bayes_by_backprop(prior=vd.Normal(learned=True))]


@pytest.mark.parametrize("classes", [0, 3])
@pytest.mark.parametrize("recipe", RECIPES)
def test_each_ends_where_it_would_alone(classes, recipe):
    """In mean mode there is no noise, so that the numbers are the same but for rounding."""
    likelihood = vd.Categorical if classes else lambda: vd.Gaussian(learned=True)
    elbos, examples = objectives(recipe, likelihood, classes or 1), data_stacked(classes)
    betas = [lambda e, k=k: 0.1 * k * min(e, 1) for k in range(3)]
    with vd.sampling(nn.ModuleList(elbos), False) if recipe is not None else torch.enable_grad():
        stacked, same_order = (stack(copy.deepcopy(elbos), examples, betas) for _ in range(2))
        stacked.run()
        order = [same_order.batches(Position(epoch)) for epoch in range(EPOCHS)]
        for k, elbo in enumerate(elbos):
            alone = torch.optim.Adam(groups(elbo))

            def loss(batch, at, k=k, elbo=elbo):
                elbo.set_beta(betas[k](at.epoch))
                indices = batch[k] - 10 * k
                return elbo(examples[k][0][indices], examples[k][1][indices]).loss

            rate = lambda at: [LR * (1 - at.epoch / EPOCHS)] * 2
            minimize(loss, lambda at: order[at.epoch], alone, epochs=EPOCHS, schedule=rate)
    for elbo, state in zip(elbos, stacked.states(), strict=True):
        torch.testing.assert_close(dict(elbo.state_dict()), dict(state), rtol=1e-5, atol=2e-5)


def test_each_draws_noise_of_its_own_and_a_seed_repeats_it():
    elbo = objectives(vd.bayes_by_backprop(), vd.Gaussian, 1, 1)[0]
    rows, found = data_stacked(0, (10,)) * 2, []
    for _ in range(2):
        torch.manual_seed(5)
        found.append(trained([copy.deepcopy(elbo) for _ in range(2)], rows, [lambda e: 1.0] * 2))
    first, second = (state["net.0.weight"] for state in found[0])
    assert not torch.equal(first, second)
    assert torch.equal(found[1][0]["net.0.weight"], first)


def test_sets_of_rows_may_differ_in_size():
    elbos = objectives(vd.sparse_vd(), vd.Gaussian, 1)
    states = trained(elbos, data_stacked(0, (10, 12, 11)), [lambda e: 1.0] * 3)
    assert all(bool(t.isfinite().all()) for state in states for t in state.values())


def test_a_loss_that_is_not_finite_is_told():
    rows = data_stacked(0)
    rows[1] = (rows[1][0], rows[1][1] * float("nan"), None)
    with pytest.raises(NotFiniteError, match="in epoch 1, step 1. Lower the learning rate"):
        trained(objectives(vd.sparse_vd(), vd.Gaussian, 1), rows, [lambda e: 1.0] * 3)


def recurrent():
    """A net that vmap cannot carry."""
    run = lambda net, x: net.last(net.cells(x.unsqueeze(-1))[0][:, -1])
    return Parts(run, cells=nn.LSTM(1, 4, batch_first=True), last=nn.Linear(4, 1))


def test_nets_that_cannot_run_side_by_side_run_one_after_the_other(tmp_path):
    watch, notes = RunCallback(), []
    watch.trial, watch.note = lambda label: watch, notes.append
    run = vd.fit("diabetes", recurrent(), vd.bayes_by_backprop(), out=tmp_path / "r", epochs=1, callback=watch)  # fmt: skip
    assert any(note.startswith("one after the other: ") for note in notes)
    assert run.results["metrics"]["rmse"] > 0
