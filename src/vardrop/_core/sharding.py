"""Tensors that are spread over processes, as `fully_shard` and tensor parallel leave them.

A KL is a sum over weights, so each process adds up those that it holds, and one sum over the
processes gives the value. The gradient needs no communication: a weight gets the one of its own
term. Tensors that several weights share (a rate per layer, the tensors of a gate) are gathered.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_PLAIN = (Tensor, nn.Parameter)


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether a tensor is spread over processes: a torch.distributed DTensor.

    >>> is_sharded(torch.ones(2))
    False
    """
    if type(tensor) in _PLAIN:
        return False
    module = sys.modules.get("torch.distributed.tensor")  # to import it takes a second
    kind = getattr(module, "DTensor", None)  # absent too while another thread imports it
    return kind is not None and isinstance(tensor, kind)


def is_spread(net: nn.Module) -> bool:
    """Whether the tensors of a net are spread over processes, by `fully_shard` or tensor parallel.

    >>> is_spread(nn.Linear(2, 1))
    False
    """
    if "torch.distributed.tensor" not in sys.modules:  # most nets, and quickly told
        return False
    fsdp = sys.modules.get("torch.distributed.fsdp")
    # Another thread may be importing it: no module of this net can be of a type that is not there.
    names = ("FSDPModule", "FullyShardedDataParallel")
    kinds = tuple(kind for name in names if (kind := getattr(fsdp, name, None)) is not None)
    if any(isinstance(m, kinds) for m in net.modules()):
        return True
    return any(map(is_sharded, net.parameters()))


def called_through(root: nn.Module, method: str) -> Callable[..., Any]:
    """A method of a module as a forward pass of it, for which a sharded one gathers its tensors."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(fsdp, "FSDPModule", None)
    if fsdp and kind and isinstance(root, kind) and method not in vars(root):
        fsdp.register_fsdp_forward_method(root, method)
    found: Callable[..., Any] = getattr(root, method)
    return found


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on every process; its gradient must be the same on all of them."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def local_part(tensor: Tensor, like: DTensor) -> Tensor:
    """What a process needs of a tensor that broadcasts to `like`, for the part it has of `like`.

    Its gradient is added up over the processes that use the same numbers.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate

    everywhere = [Replicate()] * like.device_mesh.ndim
    if not is_sharded(tensor):
        tensor = DTensor.from_local(tensor, like.device_mesh, everywhere, run_check=False)
    wanted = [_placement(p, tensor, like) for p in like.placements]
    gradients = [
        Partial() if p.is_shard() and not w.is_shard() else w
        for p, w in zip(like.placements, wanted, strict=True)
    ]
    moved = tensor.redistribute(like.device_mesh, wanted)
    return moved.to_local(grad_placements=gradients)


def _placement(placement: Any, tensor: Tensor, like: Tensor) -> Any:
    """Where the numbers of `tensor` are to be, for them to meet those of `like`."""
    from torch.distributed.tensor import Replicate, Shard

    if not placement.is_shard():
        return placement
    axis = placement.dim - (like.dim() - tensor.dim())
    if tensor.shape == like.shape:
        return placement
    split = axis >= 0 and tensor.shape[axis] == like.shape[placement.dim]
    return Shard(axis) if split else Replicate()


def total(part: Tensor, over: DTensor) -> Tensor:
    """The sum of what every process found for its part of `over`, with the gradient of its own."""
    from torch.distributed import all_reduce

    value = part.detach().clone()
    for i, placement in enumerate(over.placements):
        if placement.is_shard():
            all_reduce(value, group=over.device_mesh.get_group(i))
    return value + (part - part.detach())


@dataclass(frozen=True, eq=False)
class Part:
    """What one process holds of a tensor of a given shape."""

    shape: torch.Size
    number: int  # equal where two processes hold the same part
    joined: Callable[[Tensor], DTensor]  # a tensor over all processes, of their parts


def placed_like(shape: Sequence[int], like: DTensor) -> Part:
    """The part of this process of a tensor that is split as `like`; open sums are whole."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh, same = like.device_mesh, tuple(shape) == tuple(like.shape)
    placements = [p if same and p.is_shard() else Replicate() for p in like.placements]
    number = 0
    for i, placement in enumerate(placements):
        if placement.is_shard():
            number = number * mesh.size(i) + mesh.get_local_rank(i)
    local = like.to_local().shape if same else torch.Size(shape)

    def joined(part: Tensor) -> DTensor:
        size = torch.Size(shape)
        stride = part.new_empty(0).new_empty(size, device="meta").stride()
        return DTensor.from_local(
            part, mesh, placements, run_check=False, shape=size, stride=stride
        )

    return Part(local, number, joined)


def common_seed(over: DTensor, own: torch.Generator | None) -> int:
    """A seed from the generator of the first process, for all that hold parts of a tensor."""
    from torch.distributed import broadcast

    mesh = over.device_mesh
    seed = torch.randint(2**62, (1,), generator=own, device="cpu").to(over.device)
    for i in range(mesh.ndim):
        broadcast(seed, group=mesh.get_group(i), group_src=0)
    return int(seed)


def square_sum(weight: Tensor) -> Tensor:
    """|W|^2, in at least single precision, of a weight on one process or spread over many.

    >>> square_sum(torch.tensor([3.0, 4.0]))
    tensor(25.)
    """
    if not is_sharded(weight):
        return weight.square().sum()
    return total(weight.to_local().square().sum(), weight)
