"""The device and the processes of a run under torchrun."""

import json
from types import SimpleNamespace

import pytest
import torch

from tests.app.runs import shared
from tests.refusals import assert_refused
from tests.running import TORCHRUN, python
from vardrop._core.processes import World
from vardrop.app.runs import distributed


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
    assert distributed.resolve_device(name) == torch.device(found)


def test_auto_without_a_gpu_and_unknown_devices():
    if not torch.accelerator.is_available():
        assert distributed.resolve_device("auto") == torch.device("cpu")
    assert_refused("`device` to be available", distributed.resolve_device, "abacus")


def test_decisions_and_means_travel_on_the_device_of_the_process(monkeypatch):
    seen = []
    monkeypatch.setattr(distributed.dist, "broadcast", lambda t, source: seen.append(t.device.type))
    monkeypatch.setattr(distributed.dist, "all_reduce", lambda t: seen.append(t.device.type))
    world = World(1, 2, torch.device("meta"))
    with pytest.raises(RuntimeError, match="meta"):  # which holds no values to read back
        world.broadcast_decision(True)
    world.all_reduce_mean(torch.ones(3))
    assert seen == ["meta", "meta"]


def test_a_process_group_is_made_for_the_device(monkeypatch):
    calls = []
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda d: calls.append(str(d)))
    fake = {
        "init_process_group": calls.append,
        "get_default_backend_for_device": lambda d: {"cpu": "gloo", "cuda": "nccl"}[d.type],
        "destroy_process_group": lambda: None, "get_rank": lambda: 1, "get_world_size": lambda: 2,
    }  # fmt: skip
    for name, function in fake.items():
        monkeypatch.setattr(distributed.dist, name, function)
    with distributed.join_processes(torch.device("cuda", 1)) as world:
        assert world == World(1, 2, torch.device("cuda", 1))
    with distributed.join_processes() as world:
        assert world.device == torch.device("cpu")
    assert calls == ["cuda:1", "nccl", "gloo"]


# Two processes under torchrun give the loss curve of one, for the same global batch and noise.


def test_two_processes_give_the_curve_of_one(tmp_path):
    shared.main(tmp_path / "one.json")
    done = python(*TORCHRUN, shared.__file__, tmp_path / "two.json")
    assert done.returncode == 0, done.stderr
    alone, both = (json.loads((tmp_path / f"{n}.json").read_text()) for n in ("one", "two"))
    assert (alone["processes"], both["processes"]) == (1, 2)
    for part in ("loss", "nll"):
        one, two = ([e[part] for e in found["epochs"]] for found in (alone, both))
        assert max(abs(a - b) for a, b in zip(one, two, strict=True)) <= 1e-4, (part, one, two)
    assert one[-1] < 0.8 * one[0]
