"""Nets trained side by side are trained as each would be alone."""

import copy

import pytest
import torch
from torch import nn

import vardrop as vd
from tests.nets import Parts
from vardrop.app.runs import fit
from vardrop.app.runs.run_callbacks import RunCallback
from vardrop.objective import parameter_groups
from vardrop.tuning import NotFiniteError, Position, minimize
from vardrop.tuning.stacked import StackedTraining

EPOCHS, BATCH, LR = 3, 5, 0.05


def groups(elbo):
    return parameter_groups(elbo, LR)


def objectives(recipe, likelihood, outputs, count=3):
    torch.manual_seed(0)
    found = []
    for _ in range(count):
        net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, outputs))
        if recipe is not None:
            vd.convert(net, recipe)
        found.append(vd.ELBO(net, likelihood(), 10, float(recipe is not None)))
    return found


def data(classes, counts=(10, 10, 10)):
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
    elbos, examples = objectives(recipe, likelihood, classes or 1), data(classes)
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
        for name, tensor in elbo.state_dict().items():
            assert torch.allclose(tensor, state[name], atol=2e-5), name


def test_each_draws_noise_of_its_own_and_a_seed_repeats_it():
    elbo = objectives(vd.bayes_by_backprop(), vd.Gaussian, 1, 1)[0]
    rows, found = data(0, (10,)) * 2, []
    for _ in range(2):
        torch.manual_seed(5)
        found.append(trained([copy.deepcopy(elbo) for _ in range(2)], rows, [lambda e: 1.0] * 2))
    first, second = (state["net.0.weight"] for state in found[0])
    assert not torch.equal(first, second)
    assert torch.equal(found[1][0]["net.0.weight"], first)


def test_sets_of_rows_may_differ_in_size():
    elbos = objectives(vd.sparse_vd(), vd.Gaussian, 1)
    states = trained(elbos, data(0, (10, 12, 11)), [lambda e: 1.0] * 3)
    assert all(bool(t.isfinite().all()) for state in states for t in state.values())


def test_a_loss_that_is_not_finite_is_told():
    rows = data(0)
    rows[1] = (rows[1][0], rows[1][1] * float("nan"), None)
    with pytest.raises(NotFiniteError, match="in epoch 1, step 1. Lower the learning rate"):
        trained(objectives(vd.sparse_vd(), vd.Gaussian, 1), rows, [lambda e: 1.0] * 3)


def recurrent():
    """A net that vmap cannot carry."""
    run = lambda net, x: net.last(net.cells(x.unsqueeze(-1))[0][:, -1])
    return Parts(run, cells=nn.LSTM(1, 4, batch_first=True), last=nn.Linear(4, 1))


class Told(RunCallback):
    def __init__(self):
        self.notes = []

    def trial(self, label):
        return self

    def note(self, text):
        self.notes.append(text)


def test_nets_that_cannot_run_side_by_side_run_one_after_the_other(tmp_path):
    told = Told()
    run = fit("diabetes", recurrent(), vd.bayes_by_backprop(), out=tmp_path / "r", epochs=1, callback=told)  # fmt: skip
    assert any(note.startswith("one after the other: ") for note in told.notes)
    assert run.results["metrics"]["rmse"] > 0
