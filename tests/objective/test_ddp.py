"""Two gloo processes give the gradients of one."""

import copy
import importlib
import os

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel

import vardrop as vd

RECIPES = {
    "sparse_vd": vd.sparse_vd(log_sigma2=-2.0),
    "learned_prior": vd.bayes_by_backprop(vd.Normal(learned=True)),
}


def make(recipe):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    vd.convert(net, recipe)
    return vd.ELBO(net, vd.Categorical(), num_data=20)


def data():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8, 6, generator=generator)
    noise = [torch.randn(8, n, generator=generator) for n in (5, 3)]
    return x, torch.arange(8) % 3, noise


def hold_noise(elbo, noise):
    """Feed stored noise to the two layers, so that one and two processes draw the same."""
    for layer, z in zip((elbo.net[0], elbo.net[2]), noise, strict=True):
        layer.register_forward_pre_hook(
            lambda m, a, k, z=z: (a, {**k, "noise": z}), with_kwargs=True
        )


def worker(rank, recipe, unused, path, results):
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    # Imported before there is a group, or its default arguments keep the group, and the threads of
    # gloo outlive the interpreter (see `vardrop.training.processes.joined`).
    importlib.import_module("torch.distributed.nn.functional")
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    elbo = make(RECIPES[recipe])
    x, y, noise = data()
    part = slice(4 * rank, 4 * rank + 4)
    hold_noise(elbo, [z[part] for z in noise])
    wrapped = DistributedDataParallel(elbo, find_unused_parameters=unused)
    wrapped(x[part], y[part]).loss.backward()
    if rank == 0:
        torch.save({n: p.grad for n, p in elbo.named_parameters()}, results)
    del wrapped
    dist.destroy_process_group()


@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_equal_the_single_process(tmp_path, recipe, unused):
    elbo = make(RECIPES[recipe])
    x, y, noise = data()
    hold_noise(elbo, noise)
    elbo(x, y).loss.backward()
    expected = copy.deepcopy({n: p.grad for n, p in elbo.named_parameters()})
    results = str(tmp_path / "grads.pt")
    arguments = (recipe, unused, str(tmp_path / "store"), results)
    multiprocessing.spawn(worker, arguments, nprocs=2)
    got = torch.load(results, weights_only=True)
    assert set(got) == set(expected)
    for name, grad in expected.items():
        assert float((got[name] - grad).abs().max()) <= 1e-6, name
