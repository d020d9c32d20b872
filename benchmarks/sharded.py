"""Bytes per process of parameters, gradients and Adam under `fully_shard`: on paper and measured.

    python benchmarks/sharded.py

On paper: a noisy weight has a mean and a log variance; each has a gradient and two moments of Adam.
All of these are split evenly; what is gathered for the largest layer, and the variances that a step
computes from it, come on top while that layer runs. Measured: 10^7 weights on one process and on
two, after a step.
"""

from __future__ import annotations

import importlib
import json
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import vardrop as vd
from vardrop._core.sharding import is_sharded

WIDTH, LAYERS, FLOAT = 1582, 4, 4  # 4 x 1582^2 = 10^7 weights
FILE = Path(__file__).with_suffix(".json")


def on_paper(weights: float, processes: int) -> dict[str, float]:
    """Bytes that one process holds between two steps."""
    parameters = 2 * weights * FLOAT / processes
    return {"parameters": parameters, "gradients": parameters, "Adam": 2 * parameters}


def _bytes(tensors: list[Tensor]) -> int:
    local = (t.to_local() if is_sharded(t) else t for t in tensors)
    return sum(t.numel() * t.element_size() for t in local)


def _measured(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    importlib.import_module("torch.distributed.nn.functional")
    dist.init_process_group("gloo", init_method=f"file://{folder}/s", rank=rank, world_size=world)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    net = vd.convert(nn.Sequential(*layers), vd.sparse_vd())
    elbo = vd.ELBO(net, vd.Gaussian(), 1000)
    mesh = init_device_mesh("cpu", (world,))
    for layer in [*net, elbo]:
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.Adam(elbo.parameters())
    x = torch.randn(8, WIDTH)
    elbo(x, x).loss.backward()
    optimizer.step()
    parameters = list(elbo.parameters())
    moments = [t for state in optimizer.state.values() for t in state.values() if t.dim() > 0]
    found = {
        "parameters": _bytes(parameters),
        "gradients": _bytes([p.grad for p in parameters if p.grad is not None]),
        "Adam": _bytes(moments),
    }
    Path(folder, str(rank)).write_text(json.dumps(found))
    dist.destroy_process_group()


def measured(world: int) -> dict[str, float]:
    """The most that a process holds of 10^7 weights."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_measured, (world, folder), nprocs=world)
        found = [json.loads(Path(folder, str(r)).read_text()) for r in range(world)]
    return {name: max(f[name] for f in found) for name in found[0]}


def main() -> None:
    """Print the table and write it beside this script."""
    weights = LAYERS * WIDTH**2
    rows = []
    for world in (1, 2):
        row = {"weights": weights, "processes": world, "measured": measured(world)}
        rows.append(row | {"paper": on_paper(weights, world)})
    for size in (10**8, 10**9, 10**11):
        rows += [
            {"weights": size, "processes": p, "paper": on_paper(size, p)} for p in (1, 8, 1024)
        ]
    FILE.write_text(json.dumps(rows, indent=1) + "\n")
    print("| weights | processes | GB on paper | GB measured |\n|---|---|---|---|")
    for row in rows:
        seen = f"{sum(row['measured'].values()) / 1e9:.3f}" if "measured" in row else ""
        total = sum(row["paper"].values()) / 1e9
        print(f"| {row['weights']:.1e} | {row['processes']} | {total:.3f} | {seen} |")


if __name__ == "__main__":
    main()
