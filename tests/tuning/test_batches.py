"""Streams: a loop over a loader, interrupted anywhere, goes on bit for bit."""

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from tests.nets import is_same_state
from tests.refusals import assert_refused
from tests.tuning.shared import After, adam, data, objective
from vardrop._core.processes import World
from vardrop.app.runs import Recorder
from vardrop.app.runs.run_callbacks import ProgressBar
from vardrop.tuning import Loop, Position, train
from vardrop.tuning.batches import StreamBatches


class Rows(IterableDataset):
    """A stream without a length that draws from torch's generator row by row."""

    def __iter__(self):
        for x, y in zip(*data(), strict=True):
            yield x + 0.1 * torch.randn(6), y


def shuffled(**options):
    return DataLoader(TensorDataset(*data()), batch_size=16, shuffle=True, **options)


LOADERS = {
    "shuffled": shuffled,
    "own generator": lambda: shuffled(generator=torch.Generator().manual_seed(9)),
    "iterable": lambda: DataLoader(Rows(), batch_size=16),
}


def check_by_hand(batches, *arguments, **options):
    """Two epochs are those of a bare loop over these batches."""
    looped, bare = objective(), objective()
    optimizer = adam(bare)
    torch.manual_seed(1)
    for batch in batches:
        optimizer.zero_grad()
        bare(*batch).loss.backward()
        optimizer.step()
    torch.manual_seed(1)
    epochs = list(train(looped, adam(looped), *arguments, 2, **options))
    assert is_same_state(bare, looped)
    assert [e.epoch for e in epochs] == [0, 1]
    assert epochs[0].loss == pytest.approx(epochs[0].nll + epochs[0].kl / 50, rel=1e-5)


def test_training_has_the_numbers_of_a_bare_loop():
    (x, y), order = data(), torch.Generator().manual_seed(5)
    in_order = list(zip(x.split(16), y.split(16), strict=True))
    check_by_hand(in_order * 2, DataLoader(TensorDataset(x, y), batch_size=16), None)
    chosen = [k for _ in range(2) for k in torch.randperm(50, generator=order).split(16)]
    check_by_hand([(x[k], y[k]) for k in chosen], x, y, batch_size=16, seed=5)
    weighted = x, y, torch.arange(50) / 10
    check_by_hand([weighted] * 2, DataLoader(TensorDataset(*weighted), 50), None)


@pytest.mark.parametrize("name", LOADERS)
def test_epochs_are_shuffled_apart_and_the_seed_decides(name):
    def trained(seed):
        elbo, seen = objective(), []
        elbo.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].clone()))
        torch.manual_seed(1)
        list(Loop(elbo, adam(elbo), LOADERS[name](), None, 2, seed=seed).run())
        return elbo, torch.cat(seen)

    (one, seen), (again, _), (other, _) = trained(0), trained(0), trained(4)
    assert is_same_state(one, again)
    assert not is_same_state(one, other)
    assert not torch.equal(seen[:50], seen[50:])


@pytest.mark.parametrize("name", [*LOADERS, "tensors", "tensors, averaged"])
@pytest.mark.parametrize("stop", [1, 4, 6, 8])
def test_an_epoch_that_was_interrupted_goes_on_bit_for_bit(tmp_path, name, stop):
    def loop(elbo, seed):
        torch.manual_seed(seed)
        rows = (LOADERS[name](), None) if name in LOADERS else data()
        return Loop(elbo, adam(elbo), *rows, 2, batch_size=16, average="averaged" in name)

    whole, first, second = objective(), objective(), objective()
    expected, part = list(loop(whole, 1).run()), loop(first, 1)
    list(part.run(After(lambda at: 4 * at.epoch + at.step == stop)))
    Recorder(tmp_path).save(part)
    again = loop(second, 77)
    Recorder(tmp_path).resume(again)
    assert list(again.run()) == expected[(stop - 1) // 4 :]
    assert is_same_state(whole, second)


def test_the_noise_of_a_training_is_apart_from_the_draws_of_its_stream():
    state, elbo = torch.get_rng_state(), objective()
    torch.set_rng_state(state)
    next(iter(Loop(elbo, adam(elbo), shuffled(), None, 1).batches(Position())))
    assert torch.equal(torch.get_rng_state(), state)


def test_steps_are_known_after_an_epoch_without_a_length(tmp_path):
    elbo = objective()
    loop = Loop(elbo, adam(elbo), DataLoader(Rows(), batch_size=16), None, 2)
    assert loop.steps is None
    Recorder(tmp_path, callback=ProgressBar()).run(loop)
    assert loop.steps == 4


def test_processes_share_each_batch():
    def first(world):
        source = StreamBatches(shuffled(), torch.device("cpu"), world)
        return next(source.batches(torch.Generator().manual_seed(0)))

    parts = [first(World(rank, 3)) for rank in range(3)]
    assert torch.equal(torch.cat([part.x for part in parts]), first(World()).x)
    assert [part.share for part in parts] == pytest.approx([6 * 3 / 16, 5 * 3 / 16, 5 * 3 / 16])
    rows, share = World(2, 3).slice(torch.arange(2))  # there are fewer than processes
    assert (len(rows), share) == (1, 0.0)


@pytest.mark.parametrize("given, text", [
    (iter([data()]), "read again in every epoch, such as a list or a DataLoader, but got list_iterator"),
    (3, "such as a list or a DataLoader, but got int"),
    (torch.zeros(4, 6), "Expected `y` with a tensor `x`.*but got Tensor and NoneType"),
    ([], "Expected at least 1 batches from list, but got 0"),
    ([torch.zeros(4)], r"batches of list to be tensors \(x, y\) or \(x, y, weight\), but got Tensor"),
    ([(torch.zeros(4, 6), torch.zeros(3))], "batches of list to have the same positive length.*but got 4 and 3"),
])  # fmt: skip
def test_what_is_no_stream_is_refused(given, text):
    elbo = objective()
    assert_refused(text, lambda: list(train(elbo, adam(elbo), given, None, 1)))


def test_a_stream_that_became_shorter_is_told():
    class Shorter(IterableDataset):
        def __iter__(self):
            yield tuple(part[:16] for part in data())

    elbo = objective()
    loop = Loop(elbo, adam(elbo), DataLoader(Rows(), batch_size=16), None, 1)
    list(loop.run(After(lambda at: at.step == 3)))
    shorter = Loop(elbo, adam(elbo), Shorter(), None, 1)
    shorter.load_state(*loop.state())
    assert_refused("at least 3 batches from Shorter, but got 1", list, shorter.run())
