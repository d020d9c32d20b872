"""Two gloo processes give the gradients of one, under every recipe of the contract table."""

import gc
import importlib
import os

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel

import vardrop as vd
from vardrop.testing import HEADS, RECIPES


class Steps(nn.Module):
    """A net on the inputs as a sequence of three steps."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.last = layer, nn.Linear(4, 3)

    def forward(self, x):
        steps = x.view(-1, 3, 2).repeat(1, 1, 2)
        attends = isinstance(self.layer, nn.MultiheadAttention)
        found = self.layer(*[steps] * (3 if attends else 1))[0]
        return self.last(found.mean(1))


SEQUENCES = {
    "attention": lambda: nn.MultiheadAttention(4, 2, batch_first=True),
    "lstm": lambda: nn.LSTM(4, 4, 2, batch_first=True),
    "gru": lambda: nn.GRU(4, 4, batch_first=True),
    "rnn": lambda: nn.RNN(4, 4, batch_first=True),
}
ALL = RECIPES | HEADS | dict.fromkeys(SEQUENCES, vd.sparse_vd())
PARTS = [slice(0, 4), slice(4, 8)]


def make(name):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
        net = Steps(SEQUENCES[name]()) if name in SEQUENCES else plain
        vd.convert(net, ALL[name])
    return vd.ELBO(net, vd.Categorical(), num_data=20, samples=2)


def data():
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    return x, torch.arange(8) % 3


def step(module, rank):
    """Backward through one process's part of the batch, with noise from a seed of its own."""
    x, y = (t[PARTS[rank]] for t in data())
    with torch.random.fork_rng():
        torch.manual_seed(10 + rank)
        module(x, y).loss.backward()


def gradients(elbo):
    return {n: p.grad.clone() for n, p in elbo.named_parameters() if p.grad is not None}


def worker(rank, unused, path, results):
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    # Imported before there is a group, or its default arguments keep the group, and the threads of
    # gloo outlive the interpreter (see `vardrop.tuning.processes.joined`).
    importlib.import_module("torch.distributed.nn.functional")
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    found = {}
    for name in ALL:
        elbo = make(name)
        wrapped = DistributedDataParallel(elbo, find_unused_parameters=unused)
        step(wrapped, rank)
        found[name] = gradients(elbo)
        del wrapped
    if rank == 0:
        torch.save(found, results)
    gc.collect()
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=[False, True], ids=["all_used", "find_unused"])
def from_two_processes(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ddp")
    results = str(folder / "grads.pt")
    multiprocessing.spawn(worker, (request.param, str(folder / "store"), results), nprocs=2)
    return torch.load(results, weights_only=True)


@pytest.mark.parametrize("name", ALL)
def test_gradients_equal_the_single_process(name, from_two_processes):
    parts = []
    for rank in range(2):
        elbo = make(name)
        step(elbo, rank)
        parts.append(gradients(elbo))
    got = from_two_processes[name]
    assert set(got) == set(parts[0])
    for key, grad in got.items():
        expected = (parts[0][key] + parts[1][key]) / 2
        scale = expected.abs().max().clamp(min=1.0)
        assert float((grad - expected).abs().max() / scale) <= 1e-6, key


def gathering_worker(rank, path, results):
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    importlib.import_module("torch.distributed.nn.functional")
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    elbo = make("sparse_vd")
    wrapped = DistributedDataParallel(elbo)
    with wrapped.no_sync():
        step(wrapped, rank)
    alone = gradients(elbo)
    step(wrapped, rank)
    torch.save({"alone": alone, "both": gradients(elbo)}, f"{results}{rank}")
    del wrapped  # before its group, or the threads of gloo may wait for each other
    gc.collect()
    dist.destroy_process_group()


def test_gradients_of_several_batches_are_gathered(tmp_path):
    """Two batches, the first without a word to the other process: noise differs between them."""
    results = str(tmp_path / "grads")
    multiprocessing.spawn(gathering_worker, (str(tmp_path / "store"), results), nprocs=2)
    found = [torch.load(f"{results}{rank}", weights_only=True) for rank in range(2)]
    parts = []
    for rank in range(2):
        elbo = make("sparse_vd")
        step(elbo, rank)
        parts.append(gradients(elbo))
    for key, first in parts[0].items():
        second = parts[1][key]
        torch.testing.assert_close(found[0]["alone"][key], first, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(found[1]["alone"][key], second, rtol=1e-6, atol=1e-7)
        for rank in range(2):
            got = found[rank]["both"][key]
            torch.testing.assert_close(got, first + second, rtol=1e-5, atol=1e-6)
    assert any(bool((parts[0][k] != parts[1][k]).any()) for k in parts[0])
