"""Where a training runs: ranks and devices under torchrun, and torch's generators on any device."""

from types import SimpleNamespace

import pytest
import torch

from tests.refusals import assert_refused
from vardrop.tuning import processes
from vardrop.tuning.processes import World


class Generators:
    """The generators of devices that this machine does not have."""

    def __init__(self):
        self.states = {}

    def get_rng_state(self, device):
        return self.states.setdefault(device, torch.tensor([0]))

    def set_rng_state(self, state, device):
        self.states[device] = state


class Fresh:
    """A fresh generator of such a device: its state is its seed."""

    def __init__(self, device):
        self.device = device

    def manual_seed(self, seed):
        self.seed = seed
        return self

    def get_state(self):
        return torch.tensor([self.seed])


@pytest.fixture
def gpus(monkeypatch):
    """Two GPUs that hold nothing but generators."""
    found = Generators()
    monkeypatch.setattr(torch, "get_device_module", lambda device: found)
    real = torch.Generator
    fresh = lambda device="cpu": real() if device == "cpu" else Fresh(device)
    monkeypatch.setattr(processes.torch, "Generator", fresh)
    return found


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_generators_of_every_device_are_seeded_kept_and_given_back(gpus, kind):
    device = torch.device(kind, 1)
    gpus.states[device] = torch.tensor([5])
    torch.manual_seed(8)
    before = torch.get_rng_state()
    with processes.own_generators(device, seed=3):
        assert gpus.states[device].tolist() == [3]
        drawn, kept = torch.rand(2), processes.generator_states(device)
        assert set(kept) == {"noise", f"noise_{kind}"}
        processes.seed_generators(device, 4)
        assert gpus.states[device].tolist() == [4]
        processes.set_generator_states(device, kept, 0)
        assert gpus.states[device].tolist() == [3]
    assert gpus.states == {device: torch.tensor([5])}
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(drawn, torch.rand(2, generator=torch.Generator().manual_seed(3)))


def test_a_checkpoint_of_another_device_seeds_this_one(gpus):
    device = torch.device("cuda", 0)
    processes.set_generator_states(device, {"noise": torch.get_rng_state()}, 11)
    assert gpus.states[device].tolist() == [11]


def test_generators_are_given_back_after_an_error():
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="shape"), processes.own_generators(seed=1):
        torch.rand(3).view(7)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("name, local, found", [
    ("auto", "1", "cuda:1"), ("auto", None, "cuda:0"), ("cuda", "3", "cuda:3"),
    ("cuda:2", "1", "cuda:2"), ("cpu", "1", "cpu"),
])  # fmt: skip
def test_every_process_takes_its_own_gpu(monkeypatch, name, local, found):
    found_here = lambda check_available: torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", found_here)
    monkeypatch.setattr(torch, "empty", lambda n, device: SimpleNamespace(device=device))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local is not None:
        monkeypatch.setenv("LOCAL_RANK", local)
    assert processes.device_named(name) == torch.device(found)


def test_auto_without_a_gpu_and_unknown_devices():
    if not torch.accelerator.is_available():
        assert processes.device_named("auto") == torch.device("cpu")
    told = "`device` to be one that torch has here, but got 'abacus"
    assert_refused(told, processes.device_named, "abacus")


def test_decisions_and_means_travel_on_the_device_of_the_process(monkeypatch):
    seen = []
    monkeypatch.setattr(processes.dist, "broadcast", lambda t, source: seen.append(t.device.type))
    monkeypatch.setattr(processes.dist, "all_reduce", lambda t: seen.append(t.device.type))
    world = World(1, 2, torch.device("meta"))
    with pytest.raises(RuntimeError, match="meta"):  # which holds no values to read back
        world.agree(True)
    world.mean(torch.ones(3))
    assert seen == ["meta", "meta"]


def test_a_process_group_is_made_for_the_device(monkeypatch):
    calls = []
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda d: calls.append(str(d)))
    fake = {
        "init_process_group": calls.append,
        "get_default_backend_for_device": lambda d: {"cpu": "gloo", "cuda": "nccl"}[d.type],
        "destroy_process_group": lambda: None,
        "get_rank": lambda: 1,
        "get_world_size": lambda: 2,
    }
    for name, function in fake.items():
        monkeypatch.setattr(processes.dist, name, function)
    with processes.joined(torch.device("cuda", 1)) as world:
        assert world == World(1, 2, torch.device("cuda", 1))
    with processes.joined() as world:
        assert world.device == torch.device("cpu")
    assert calls == ["cuda:1", "nccl", "gloo"]
