"""Streams: a loop over a loader, interrupted anywhere, goes on bit for bit."""

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import vardrop as vd
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


def test_a_loader_in_order_gives_the_numbers_of_a_bare_loop():
    x, y = data()
    bare, looped = objective(), objective()
    optimizer = adam(bare)
    torch.manual_seed(1)
    for _ in range(2):
        for rows in torch.arange(50).split(16):
            optimizer.zero_grad()
            bare(x[rows], y[rows]).loss.backward()
            optimizer.step()
    torch.manual_seed(1)
    loader = DataLoader(TensorDataset(x, y), batch_size=16)
    epochs = list(train(looped, adam(looped), loader, None, 2))
    assert same(bare, looped)
    assert [e.epoch for e in epochs] == [0, 1]


def test_weights_come_with_the_batches():
    x, y = data()
    weight = torch.arange(50) / 10
    first, second = objective(), objective()
    torch.manual_seed(1)
    list(train(first, adam(first), DataLoader(TensorDataset(x, y, weight), 50), None, 2))
    torch.manual_seed(1)
    optimizer = adam(second)
    for _ in range(2):
        optimizer.zero_grad()
        second(x, y, weight).loss.backward()
        optimizer.step()
    assert same(first, second)


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


def test_a_loader_with_a_state_is_not_read_again(tmp_path):
    read = []

    class Noted(TensorDataset):
        def __getitem__(self, index):
            read.append(index)
            return super().__getitem__(index)

    module = pytest.importorskip("torchdata.stateful_dataloader")
    loops = []
    for _ in range(2):
        loader = module.StatefulDataLoader(Noted(*data()), batch_size=10, shuffle=True)
        elbo = objective()
        loops.append(Loop(elbo, adam(elbo), loader, None, 1))
    batches = iter(loops[0]._batches())
    for _ in range(3):
        loops[0]._step(next(batches))
    state = loops[0].state()
    assert len(read) == 30
    loops[1].load_state(*state)
    list(loops[1].run())
    assert sorted(read) == list(range(50))


def test_the_noise_of_a_training_is_apart_from_the_draws_of_its_stream():
    state = torch.get_rng_state()
    elbo = objective()
    torch.set_rng_state(state)
    loop = Loop(elbo, adam(elbo), shuffled(), None, 1)
    batches = iter(loop._batches())
    next(batches)
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


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (iter([data()]), "read in every epoch anew, such as a DataLoader, but got list_iterator"),
        (3, "such as a DataLoader, but got int"),
        (torch.zeros(4, 6), "Expected `y` with tensors"),
        ([], "Expected at least 1 batches from list, but got 0"),
        ([torch.zeros(4)], r"Expected batches \(x, y\) or \(x, y, weight\).*but got Tensor"),
        ([(torch.zeros(4, 6), torch.zeros(3))], "same positive length, but got 4 and 3"),
    ],
)
def test_what_is_no_stream_is_refused(given, text):
    elbo = objective()
    with pytest.raises(vd.VardropError, match=text):
        list(train(elbo, adam(elbo), given, None, 1))


def test_a_stream_that_became_shorter_is_told():
    elbo = objective()
    loop = Loop(elbo, adam(elbo), DataLoader(Rows(), batch_size=16), None, 1)
    batches = iter(loop._batches())
    for _ in range(3):
        loop._step(next(batches))
    state = loop.state()

    class Shorter(IterableDataset):
        def __iter__(self):
            yield tuple(part[:16] for part in data())

    shorter = Loop(elbo, adam(elbo), Shorter(), None, 1)
    shorter.load_state(*state)
    with pytest.raises(vd.VardropError, match="at least 3 batches from Shorter, but got 1"):
        list(shorter.run())
