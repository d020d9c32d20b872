"""The tensors of an optimizer and of a net, by name, as a checkpoint holds them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from vardrop._core.errors import VardropError
from vardrop._core.sharding import is_sharded


def under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin with `prefix.`, without it."""
    start = f"{prefix}."
    return {k.removeprefix(start): t for k, t in tensors.items() if k.startswith(start)}


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The state of an optimizer that is made of tensors, as torch's own optimizers' is."""
    state = optimizer.state_dict()["state"]
    return {
        f"{index}.{name}": value
        for index, parts in state.items()
        for name, value in parts.items()
        if isinstance(value, Tensor)
    }


def load_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Give an optimizer the tensors of `optimizer_tensors`; its groups stay as they are."""
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        index, name = key.split(".", 1)
        state.setdefault(int(index), {})[name] = value
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, parts in state.items():
        like = parameters[number]
        state[number] = {name: _laid_out(value, like) for name, value in parts.items()}
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _laid_out(value: Tensor, like: Tensor) -> Tensor:
    """A tensor in the memory layout of its parameter, which a fused optimizer takes for granted."""
    if value.shape != like.shape or is_sharded(like):
        return value
    return torch.empty_like(like, dtype=value.dtype).copy_(value)


def load_module(module: nn.Module, tensors: dict[str, Tensor], path: Path) -> None:
    """Give a module its tensors; an error names the file where they do not fit."""
    try:
        module.load_state_dict(tensors)
    except RuntimeError as misfit:
        first = " ".join(str(misfit).split())[:300]
        raise VardropError(
            f"Expected {path} to fit the net, but got: {first}. Give the net that was trained."
        ) from misfit
