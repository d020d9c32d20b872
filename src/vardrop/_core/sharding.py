"""Tensors that are sharded over processes, by `fully_shard` or tensor parallelism.

A KL is a sum over weights, so each process adds up the terms of its weights, and one sum over the
processes gives the KL. The gradient needs no communication: a weight only needs the gradient of its
own term. Tensors that several weights share (a rate per layer, the tensors of a gate) are gathered.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_PLAIN = (Tensor, nn.Parameter)


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether a tensor is sharded over processes: a torch.distributed DTensor.

    >>> is_sharded(torch.ones(2))
    False
    """
    if type(tensor) in _PLAIN:
        return False
    module = sys.modules.get("torch.distributed.tensor")  # its import takes a second
    kind = getattr(module, "DTensor", None)  # also absent while another thread imports it
    return kind is not None and isinstance(tensor, kind)


def is_model_sharded(net: nn.Module) -> bool:
    """Whether the tensors of a model are sharded, by `fully_shard` or tensor parallelism.

    >>> is_model_sharded(nn.Linear(2, 1))
    False
    """
    if "torch.distributed.tensor" not in sys.modules:  # most models
        return False
    fsdp = sys.modules.get("torch.distributed.fsdp")
    # A type is missing while another thread imports it. Then no module of this model has this type.
    names = ("FSDPModule", "FullyShardedDataParallel")
    kinds = tuple(getattr(fsdp, name) for name in names if hasattr(fsdp, name))
    wrapped = any(isinstance(m, kinds) for m in net.modules())
    return wrapped or any(map(is_sharded, net.parameters()))


def forward_method(root: nn.Module, method: str) -> Callable[..., Any]:
    """A method of a module as a forward pass, for which a sharded module gathers its tensors."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(fsdp, "FSDPModule", None)
    if fsdp and kind and isinstance(root, kind) and method not in vars(root):
        fsdp.register_fsdp_forward_method(root, method)
    return getattr(root, method)  # type: ignore[no-any-return]


def full_tensor(tensor: Tensor) -> Tensor:
    """The full tensor, on every process. Its gradient must be the same on all of them."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def local_part(tensor: Tensor, like: DTensor) -> Tensor:
    """The part of a tensor that broadcasts to the part of `like` on this process.

    The gradient is added up over the processes that use the same numbers.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    everywhere = [Replicate()] * like.device_mesh.ndim
    if not is_sharded(tensor):
        tensor = DTensor.from_local(tensor, like.device_mesh, everywhere, run_check=False)
    placements: tuple[Any, ...] = like.placements
    wanted = []
    for placement in placements:
        if placement.is_shard() and tensor.shape != like.shape:
            axis = placement.dim - (like.dim() - tensor.dim())
            split = axis >= 0 and tensor.shape[axis] == like.shape[placement.dim]
            wanted.append(Shard(axis) if split else Replicate())
        else:
            wanted.append(placement)
    gradients = [
        Partial() if p.is_shard() and not w.is_shard() else w
        for p, w in zip(placements, wanted, strict=True)
    ]
    return tensor.redistribute(like.device_mesh, wanted).to_local(grad_placements=gradients)


def sum_over_shards(part: Tensor, over: DTensor) -> Tensor:
    """Sum the results of all processes for their parts of `over`.

    Every process gets the gradient of its own part only.
    """
    from torch.distributed import all_reduce

    summed = part.detach().clone()
    for i, placement in enumerate(over.placements):
        if placement.is_shard():
            all_reduce(summed, group=over.device_mesh.get_group(i))
    return summed + (part - part.detach())


def shard_like(
    shape: Sequence[int], like: DTensor
) -> tuple[torch.Size, int, Callable[[Tensor], DTensor]]:
    """Describe a tensor of a given shape that is sharded like `like`, without partial sums.

    Returns:
        The shape of the part of this process, the number of this part (equal if two processes hold
        the same part), and a function that makes the tensor over all processes from their parts.
    """
    from torch.distributed.tensor import DTensor, Replicate

    mesh, same = like.device_mesh, tuple(shape) == tuple(like.shape)
    placements = [p if same and p.is_shard() else Replicate() for p in like.placements]
    number = 0
    for i, placement in enumerate(placements):
        if placement.is_shard():
            number = number * mesh.size(i) + mesh.get_local_rank(i)
    size = torch.Size(shape)
    stride = torch.empty(size, device="meta").stride()
    join = partial(
        DTensor.from_local,
        device_mesh=mesh,
        placements=placements,
        run_check=False,
        shape=size,
        stride=stride,
    )
    return like.to_local().shape if same else size, number, join


def common_seed(over: DTensor, generator: torch.Generator | None) -> int:
    """A seed from the generator of the first process, for all processes that share a tensor."""
    from torch.distributed import broadcast

    mesh = over.device_mesh
    seed = torch.randint(2**62, (1,), generator=generator, device="cpu").to(over.device)
    for i in range(mesh.ndim):
        broadcast(seed, group=mesh.get_group(i), group_src=0)
    return int(seed)


def square_sum(weight: Tensor) -> Tensor:
    """|W|^2 of a weight on one process or sharded over many.

    >>> square_sum(torch.tensor([3.0, 4.0]))
    tensor(25.)
    """
    if not is_sharded(weight):
        return weight.square().sum()
    return sum_over_shards(weight.to_local().square().sum(), weight)
