"""Streams: a loop over a loader, interrupted anywhere, goes on bit for bit."""

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from tests.refusals import assert_refused
from tests.tuning.test_train import adam, data, objective, same
from vardrop.app.runs import Recorder
from vardrop.app.runs.callbacks import ProgressBar
from vardrop.tuning import Loop, Step, train
from vardrop.tuning.processes import World

# torchdata calls what this torch warns about.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


class Rows(IterableDataset):
    """A stream without a length that draws from torch's generator row by row."""

    def __iter__(self):
        for x, y in zip(*data(), strict=True):
            yield x + 0.1 * torch.randn(6), y


def shuffled(**options):
    return DataLoader(TensorDataset(*data()), batch_size=16, shuffle=True, **options)


def stateful():
    module = pytest.importorskip("torchdata.stateful_dataloader")
    return module.StatefulDataLoader(TensorDataset(*data()), batch_size=16, shuffle=True)


LOADERS = {
    "shuffled": shuffled,
    "own generator": lambda: shuffled(generator=torch.Generator().manual_seed(9)),
    "iterable": lambda: DataLoader(Rows(), batch_size=16),
    "stateful": stateful,
}


def trained_by_hand(elbo, batches):
    """Two epochs of a bare loop."""
    optimizer = adam(elbo)
    torch.manual_seed(1)
    for batch in batches * 2:
        optimizer.zero_grad()
        elbo(*batch).loss.backward()
        optimizer.step()
    return elbo


def test_a_loader_in_order_gives_the_numbers_of_a_bare_loop():
    (x, y), looped = data(), objective()
    bare = trained_by_hand(objective(), list(zip(x.split(16), y.split(16), strict=True)))
    torch.manual_seed(1)
    loader = DataLoader(TensorDataset(x, y), batch_size=16)
    epochs = list(train(looped, adam(looped), loader, None, 2))
    assert same(bare, looped)
    assert [e.epoch for e in epochs] == [0, 1]


def test_weights_come_with_the_batches():
    batch, elbo = (*data(), torch.arange(50) / 10), objective()
    torch.manual_seed(1)
    list(train(elbo, adam(elbo), DataLoader(TensorDataset(*batch), 50), None, 2))
    assert same(elbo, trained_by_hand(objective(), [batch]))


@pytest.mark.parametrize("name", LOADERS)
def test_epochs_are_shuffled_apart_and_the_seed_decides(name):
    def trained(seed):
        elbo, seen = objective(), []
        step = Step(elbo, adam(elbo))

        def noted(x, y, share, weight):
            seen.append(x.clone())
            return step(x, y, share, weight)

        torch.manual_seed(1)
        list(Loop(elbo, step.optimizer, LOADERS[name](), None, 2, seed=seed, step=noted).run())
        return elbo, torch.cat(seen)

    (one, seen), (again, _), (other, _) = trained(0), trained(0), trained(4)
    assert same(one, again)
    assert not same(one, other)
    assert not torch.equal(seen[:50], seen[50:])


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("stop", [2, 4, 6, 8])
def test_an_epoch_that_was_interrupted_goes_on_bit_for_bit(tmp_path, name, stop):
    whole, first, second = objective(), objective(), objective()
    torch.manual_seed(1)
    expected = list(Loop(whole, adam(whole), LOADERS[name](), None, 2).run())

    torch.manual_seed(1)
    loop, recorder = Loop(first, adam(first), LOADERS[name](), None, 2), Recorder(tmp_path)
    recorder._pending, steps = [], 0

    def after():
        nonlocal steps
        steps += 1
        if steps == stop:
            recorder.save(loop)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(loop.run(after))
    torch.manual_seed(77)
    again = Loop(second, adam(second), LOADERS[name](), None, 2)
    Recorder(tmp_path).resume(again)
    assert list(again.run())[-1] == expected[-1]
    assert same(whole, second)


def begun(loader, steps):
    """A loop, and its state after some steps of its first epoch."""
    elbo = objective()
    loop = Loop(elbo, adam(elbo), loader, None, 1)
    batches = iter(loop._batches())
    for _ in range(steps):
        loop._step(next(batches))
    return loop, loop.state()


def test_a_loader_with_a_state_is_not_read_again(tmp_path):
    module, read = pytest.importorskip("torchdata.stateful_dataloader"), []

    class Noted(TensorDataset):
        def __getitem__(self, index):
            read.append(index)
            return super().__getitem__(index)

    loaders = (module.StatefulDataLoader(Noted(*data()), 10, shuffle=True) for _ in range(2))
    _, state = begun(next(loaders), 3)
    assert len(read) == 30
    elbo = objective()
    again = Loop(elbo, adam(elbo), next(loaders), None, 1)
    again.load_state(*state)
    list(again.run())
    assert sorted(read) == list(range(50))


def test_the_noise_of_a_training_is_apart_from_the_draws_of_its_stream():
    state, elbo = torch.get_rng_state(), objective()
    torch.set_rng_state(state)
    next(iter(Loop(elbo, adam(elbo), shuffled(), None, 1)._batches()))
    assert torch.equal(torch.get_rng_state(), state)


def test_steps_are_known_after_an_epoch_without_a_length(tmp_path):
    pytest.importorskip("rich")
    elbo = objective()
    loop = Loop(elbo, adam(elbo), DataLoader(Rows(), batch_size=16), None, 2)
    assert loop.steps is None
    Recorder(tmp_path, observer=ProgressBar()).run(loop)
    assert loop.steps == 4


def test_processes_share_each_batch():
    elbo = objective()
    loop = Loop(elbo, adam(elbo), shuffled(), None, 1)
    batch = next(iter(loop._batches()))
    parts = [loop.feed.take(batch, World(rank, 3)) for rank in range(3)]
    assert torch.equal(torch.cat([part.x for part in parts]), batch[0])
    assert [part.share for part in parts] == pytest.approx([6 * 3 / 16, 5 * 3 / 16, 5 * 3 / 16])


@pytest.mark.parametrize("given, text", [
    (iter([data()]), "read in every epoch anew, such as a DataLoader, but got list_iterator"),
    (3, "such as a DataLoader, but got int"),
    (torch.zeros(4, 6), "Expected `y` with tensors"),
    ([], "Expected at least 1 batches from list, but got 0"),
    ([torch.zeros(4)], r"Expected batches \(x, y\) or \(x, y, weight\).*but got Tensor"),
    ([(torch.zeros(4, 6), torch.zeros(3))], "same positive length, but got 4 and 3"),
])  # fmt: skip
def test_what_is_no_stream_is_refused(given, text):
    elbo = objective()
    assert_refused(text, lambda: list(train(elbo, adam(elbo), given, None, 1)))


def test_a_stream_that_became_shorter_is_told():
    class Shorter(IterableDataset):
        def __iter__(self):
            yield tuple(part[:16] for part in data())

    loop, state = begun(DataLoader(Rows(), batch_size=16), 3)
    shorter = Loop(loop.elbo, adam(loop.elbo), Shorter(), None, 1)
    shorter.load_state(*state)
    assert_refused("at least 3 batches from Shorter, but got 1", list, shorter.run())
