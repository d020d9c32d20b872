"""Sparse VD with its parameters spread over processes, by torch's `fully_shard`.

    torchrun --nproc-per-node 2 examples/fsdp2.py

Shard every layer, then the ELBO: nothing else is special. The KL is a local sum, so no weight is
gathered for it, and every process draws noise of its own.
"""

import gc
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import vardrop as vd

ROWS, WIDTH, CLASSES, STEPS = 4096, 256, 4, 60


def data(rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of one process."""
    x = torch.randn(ROWS, 16, generator=torch.Generator().manual_seed(0))
    y = (x[:, :CLASSES] + 0.3 * x[:, CLASSES : 2 * CLASSES]).argmax(1)
    return x[rank::world], y[rank::world]


def main(device: str) -> None:
    """Train, save and predict."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same start everywhere
    layers = [nn.Linear(16, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    net = vd.convert(nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES)), vd.sparse_vd())
    elbo = vd.ELBO(net, vd.Categorical(), num_data=ROWS)
    mesh = init_device_mesh(device, (world,))
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(elbo, mesh=mesh)
    torch.manual_seed(1 + rank)  # other noise in every process
    optimizer = torch.optim.Adam(elbo.parameters(), 3e-3)
    x, y = (t.to(device) for t in data(rank, world))
    for step in range(STEPS):
        rows = torch.randint(len(x), (128,))
        elbo.set_beta(min(1.0, step / STEPS))
        optimizer.zero_grad()
        parts = elbo(x[rows], y[rows])
        parts.loss.backward()
        optimizer.step()
    held = sum(p.to_local().numel() for p in elbo.parameters())
    with tempfile.TemporaryDirectory() as folder:
        shared = [folder]
        dist.broadcast_object_list(shared)
        dcp.save(get_model_state_dict(elbo), checkpoint_id=shared[0])
        dist.barrier()
    found = vd.predict(elbo, x[:256], samples=8)
    accuracy = float((found.probs.argmax(1) == y[:256]).float().mean())
    whole = sum(p.numel() for p in elbo.parameters())
    print(f"rank {rank}: {held} of {whole} parameters, KL {parts.kl.item():.0f}, "
          f"accuracy {accuracy:.2f}", flush=True)  # fmt: skip


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    main(device)
    gc.collect()  # sharded modules are in cycles, and a group that they hold cannot end
    dist.destroy_process_group()
