"""Dropout that a net has already: modules that can be switched, and calls that cannot.

A module's own code is read as bytecode, without running it: a chain of names that starts at a
global and ends at one of torch's dropout functions is a call that no switch from outside reaches.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from vardrop.gates import DROPOUT_TYPES

_FUNCTIONS: tuple[Callable[..., Any], ...] = (
    functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d,
    functional.alpha_dropout, functional.feature_alpha_dropout, torch.dropout,
    torch.alpha_dropout, torch.feature_dropout, torch.feature_alpha_dropout,
    functional.scaled_dot_product_attention, functional.multi_head_attention_forward,
)  # fmt: skip
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")


def dropout_reason(module: nn.Module) -> str | None:
    """Why the dropout of a module cannot be switched; empty where it can, None without dropout."""
    if type(module) in DROPOUT_TYPES:
        return ""
    base = next((b for b in DROPOUT_TYPES if isinstance(module, b)), None)
    if base is not None:
        return f"a subclass of {base.__name__} with behaviour of its own"
    if isinstance(module, nn.MultiheadAttention | nn.RNNBase) and module.dropout > 0:
        return (
            f"its dropout of {module.dropout} runs inside one torch function, so it follows "
            "net.train() and cannot be switched from outside"
        )
    called = sorted({f.__name__ for f in _called(type(module))})
    if not called:
        return None
    return (
        f"its own code calls {', '.join(called)}, which cannot be switched from outside; "
        "use a dropout module instead"
    )


def _called(cls: type[nn.Module]) -> Iterator[Callable[..., Any]]:
    for owner in cls.__mro__:
        if owner.__module__.partition(".")[0] in ("torch", "builtins", "vardrop"):
            continue
        for member in vars(owner).values():
            if isinstance(member, FunctionType):
                yield from (f for f in _globals_used(member) if any(f is g for g in _FUNCTIONS))


def _globals_used(function: FunctionType) -> Iterator[Any]:
    value: Any = None
    for step in dis.get_instructions(function):
        if step.opname == "LOAD_GLOBAL":
            value = function.__globals__.get(str(step.argval))
        elif step.opname in _ATTRIBUTES and value is not None:
            value = getattr(value, str(step.argval), None)
        elif step.opname not in ("CACHE", "PRECALL"):
            value = None
        if value is not None:
            yield value
