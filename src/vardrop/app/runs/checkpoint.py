"""The tensors of an optimizer and of a model, by name, for a checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from vardrop._core.errors import VardropError
from vardrop._core.sharding import is_sharded


def select_prefix(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names start with `prefix.`, without it."""
    start = f"{prefix}."
    return {k.removeprefix(start): t for k, t in tensors.items() if k.startswith(start)}


def add_prefix(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with `prefix.` before their names."""
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The tensors in the state of an optimizer."""
    state = optimizer.state_dict()["state"]
    entries = ((f"{i}.{name}", t) for i, parts in state.items() for name, t in parts.items())
    return {name: entry for name, entry in entries if isinstance(entry, Tensor)}


def load_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Load the tensors of `optimizer_tensors`. The parameter groups are unchanged."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        number, name = key.split(".", 1)
        index = int(number)
        if not 0 <= index < len(parameters) or tensor.shape not in ((), parameters[index].shape):
            raise ValueError("the state of an optimizer of other parameters")
        like, stored = parameters[index], tensor
        if stored.shape == like.shape and not is_sharded(like):
            # A fused optimizer requires the memory layout of the parameter.
            stored = torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)
        state.setdefault(index, {})[name] = stored
    if len({tuple(sorted(parts)) for parts in state.values()}) > 1:
        raise ValueError("the state of an optimizer of other parameters")
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def load_module(module: nn.Module, tensors: dict[str, Tensor], path: Path) -> None:
    """Load the tensors of a module. If they do not fit, the error names the file."""
    try:
        module.load_state_dict(tensors)
    except RuntimeError as misfit:
        first = " ".join(str(misfit).split())[:300]
        text = f"Expected {path} to fit the model, but got: {first}. Pass the trained model."
        raise VardropError(text) from misfit
