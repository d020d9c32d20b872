"""Copies of a model that share its tensors, owners of parameters, temporary hooks and modes."""

from __future__ import annotations

import copy
import functools
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from vardrop._core.errors import VardropError
from vardrop._core.sharding import is_model_sharded
from vardrop._core.torch_private import separate_state, unwrap

Net = TypeVar("Net", bound=nn.Module)
_TABLES = frozenset(vars(nn.Module()))  # parameters, buffers, children and hooks of a module
_ATOMS = {bool, int, float, str, type(None), torch.Tensor, nn.Parameter, torch.dtype, torch.device}


def clone_modules(net: Net, replace: Mapping[nn.Module, nn.Module] | None = None) -> Net:
    """Copy the modules of a model, but not its tensors.

    Flags, modes and hooks of the copy are independent. Ties, and attributes and containers that
    hold modules, are copied with them. Other attributes are shared. Wrappers for compilation or
    data-parallel training are left out.

    Args:
        net: any module. It is not changed.
        replace: modules to use instead of others, wherever these occur.

    >>> import torch
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 1))
    >>> clone = clone_modules(net).eval()
    >>> net.training, clone[0].weight is net[0].weight
    (True, True)
    """
    if is_model_sharded(net):
        raise VardropError(
            "Expected a model whose tensors are on one process, but got a sharded one. "
            "Gather its state dict into a plain copy first."
        )
    memo: dict[int, Any] = {id(old): new for old, new in (replace or {}).items()}
    return cast(Net, _clone_module(net, memo))


def _clone_module(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    if id(module) in memo:
        return cast(nn.Module, memo[id(module)])
    if (inner := unwrap(module)) is not module:
        return cast(nn.Module, memo.setdefault(id(module), _clone_module(inner, memo)))
    if isinstance(module, torch.jit.ScriptModule):  # its parts are not Python objects
        return cast(nn.Module, memo.setdefault(id(module), copy.deepcopy(module)))
    clone = memo[id(module)] = object.__new__(type(module))
    state, transient = vars(clone), getattr(type(module), "transient", ())
    for name, value in vars(module).copy().items():  # another thread may set attributes
        if type(value) in _ATOMS:
            state[name] = value
        elif name in _TABLES and isinstance(value, dict):
            table = state[name] = value.copy()
            for key, entry in table.items():
                table[key] = _clone_value(entry, memo)
        elif name not in transient:
            state[name] = copy.copy(value) if name in _TABLES else _clone_value(value, memo)
    separate_state(state)
    return clone


def _clone_value(value: Any, memo: dict[int, Any]) -> Any:
    """The value of an attribute, with clones instead of the modules inside."""
    if type(value) in _ATOMS:
        return value
    if isinstance(value, nn.Module):
        return _clone_module(value, memo)
    if isinstance(value, MethodType) and isinstance(value.__self__, nn.Module):
        return MethodType(value.__func__, _clone_module(value.__self__, memo))
    if type(value) is functools.partial:
        parts = (value.func, value.args, value.keywords)
        function, args, kwargs = (_clone_value(part, memo) for part in parts)
        return functools.partial(function, *args, **kwargs)
    if isinstance(value, list | tuple | set | frozenset | deque | dict):
        return _clone_container(value, memo)
    return value


def _clone_container(value: Any, memo: dict[int, Any]) -> Any:
    """A container with its modules cloned, or the same object if it holds none."""
    if id(value) in memo:
        return memo[id(value)]
    memo[id(value)] = value  # in a cycle
    items = list(value.values() if isinstance(value, dict) else value)
    clones = [_clone_value(item, memo) for item in items]
    if all(a is b for a, b in zip(items, clones, strict=True)):
        return value
    if isinstance(value, tuple | frozenset):
        clone = type(value)(*clones) if hasattr(value, "_fields") else type(value)(clones)
    else:  # a subclass may have attributes
        clone = copy.copy(value)
        clone.clear()
        (clone.extend if isinstance(value, list | deque) else clone.update)(
            zip(value, clones, strict=True) if isinstance(value, dict) else clones
        )
    memo[id(value)] = clone
    return clone


def parameter_owners(net: nn.Module) -> Counter[int]:
    """The number of modules that have a parameter, by its identity."""
    return Counter(id(p) for m in net.modules() for p in m.parameters(recurse=False))


@contextmanager
def hooks(*handles: RemovableHandle) -> Iterator[None]:
    """Remove hooks at the end of a block, also after an error."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def training_mode(module: nn.Module) -> bool:
    """Whether a module is in training mode, regardless of the sampling switch."""
    return bool(vars(module).get("training", module.training))


@contextmanager
def evaluating(net: nn.Module) -> Iterator[None]:
    """Run a model in evaluation mode, and restore the mode of every module afterwards."""
    training = [m for m in net.modules() if training_mode(m)]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True
