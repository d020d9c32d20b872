"""The tensors of an optimizer and of a model, by name, for a checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from vardrop._core.errors import VardropError
from vardrop._core.sharding import is_sharded


def select_prefix(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin with `prefix.`, without it."""
    start = f"{prefix}."
    return {k.removeprefix(start): t for k, t in tensors.items() if k.startswith(start)}


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The tensors in the state of an optimizer."""
    state = optimizer.state_dict()["state"]
    return {
        f"{index}.{name}": value
        for index, parts in state.items()
        for name, value in parts.items()
        if isinstance(value, Tensor)
    }


def load_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Load the tensors of `optimizer_tensors`. The parameter groups are unchanged."""
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        index, name = key.split(".", 1)
        state.setdefault(int(index), {})[name] = value
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    _check_state(state, parameters)
    for number, parts in state.items():
        like = parameters[number]
        state[number] = {name: _match_layout(value, like) for name, value in parts.items()}
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _match_layout(value: Tensor, like: Tensor) -> Tensor:
    """A tensor in the memory layout of its parameter, which a fused optimizer requires."""
    if value.shape != like.shape or is_sharded(like):
        return value
    return torch.empty_like(like, dtype=value.dtype).copy_(value)


def _check_state(state: dict[int, dict[str, Tensor]], parameters: list[Tensor]) -> None:
    """Raise a ValueError unless each parameter has the same parts: scalars or of its shape."""
    names = {tuple(sorted(parts)) for parts in state.values()}
    fits = len(names) <= 1 and all(
        0 <= index < len(parameters) and value.shape in ((), parameters[index].shape)
        for index, parts in state.items()
        for value in parts.values()
    )
    if not fits:
        raise ValueError("the state of an optimizer of other parameters")


def load_module(module: nn.Module, tensors: dict[str, Tensor], path: Path) -> None:
    """Load the tensors of a module. If they do not fit, an error names the file."""
    try:
        module.load_state_dict(tensors)
    except RuntimeError as misfit:
        first = " ".join(str(misfit).split())[:300]
        raise VardropError(
            f"Expected {path} to fit the net, but got: {first}. Give the net that was trained."
        ) from misfit
