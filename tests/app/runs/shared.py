"""Trains under torchrun (or alone) with stored noise and writes its curve; run by test_processes.py."""

import json
import sys
from pathlib import Path

import torch
from torch import nn

import vardrop as vd
from vardrop.app.runs.distributed import join_processes
from vardrop.tuning import Loop


def held_noise(layer, args, kwargs):
    """Noise that depends on the example alone, so that every process draws it alike."""
    x, wave = args[0].detach(), torch.arange(1.0, layer.out_features + 1)
    return args, {**kwargs, "noise": torch.sin(40 * x.sum(1, keepdim=True) * wave) * 2**0.5}


def main(out):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    elbo = vd.ELBO(vd.convert(net, vd.sparse_vd(log_sigma2=-4.0)), vd.Categorical(), 101)
    for layer in (net[0], net[2]):
        layer.register_forward_pre_hook(held_noise, with_kwargs=True)
    x = torch.randn(101, 6, generator=torch.Generator().manual_seed(1))
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0.5)
    optimizer = torch.optim.Adam(vd.parameter_groups(elbo, lr=1e-2))
    with join_processes() as world:
        # 101 = 6 * 16 + 5: the last batch cannot be shared evenly.
        given = {"beta": vd.linear_warmup(1, 5), "world": world, "max_norm": 5.0}
        epochs = list(Loop(elbo, optimizer, x, y, 8, 16, **given).run())
        if world.first:
            with open(out, "w") as file:
                json.dump({"processes": world.size, "epochs": [e._asdict() for e in epochs]}, file)


if __name__ == "__main__":
    main(sys.argv[1])
    threads = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    assert not [name for name in threads if "gloo" in name]  # one that stays aborts the exit
