"""States of torch's generators on any device."""

from types import SimpleNamespace

import pytest
import torch

from vardrop._core import rng


class Generators:
    """The generators of devices that this machine does not have."""

    def __init__(self):
        self.states = {}

    def get_rng_state(self, device):
        return self.states.setdefault(device, torch.tensor([0]))

    def set_rng_state(self, state, device):
        self.states[device] = state


@pytest.fixture
def gpus(monkeypatch):
    """Two GPUs that hold nothing but generators. The state of a fresh generator is its seed."""
    generators, real = Generators(), torch.Generator
    monkeypatch.setattr(torch, "get_device_module", lambda device: generators)
    seeded = lambda seed: SimpleNamespace(get_state=lambda: torch.tensor([seed]))
    fresh = lambda device="cpu": real() if device == "cpu" else SimpleNamespace(manual_seed=seeded)
    monkeypatch.setattr(rng.torch, "Generator", fresh)
    return generators


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_generators_of_every_device_are_seeded_kept_and_given_back(gpus, kind):
    device = torch.device(kind, 1)
    gpus.states[device] = torch.tensor([5])
    torch.manual_seed(8)
    before = torch.get_rng_state()
    with rng.preserve_rng(device, seed=3):
        assert gpus.states[device].tolist() == [3]
        drawn, kept = torch.rand(2), rng.generator_states(device)
        assert set(kept) == {"noise", f"noise_{kind}"}
        rng.seed_generators(device, 4)
        assert gpus.states[device].tolist() == [4]
        rng.set_generator_states(device, kept, 0)
        assert gpus.states[device].tolist() == [3]
    assert gpus.states == {device: torch.tensor([5])}
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(drawn, torch.rand(2, generator=torch.Generator().manual_seed(3)))


def test_a_checkpoint_of_another_device_seeds_this_one(gpus):
    device = torch.device("cuda", 0)
    rng.set_generator_states(device, {"noise": torch.get_rng_state()}, 11)
    assert gpus.states[device].tolist() == [11]


def test_generators_are_given_back_after_an_error():
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="shape"), rng.preserve_rng(seed=1):
        torch.rand(3).view(7)
    assert torch.equal(before, torch.get_rng_state())
