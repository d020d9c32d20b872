"""Dropout that a net has already: the kind of `SwitchDropout`.

Modules can be switched, calls cannot. A module's own code is read as bytecode, without running it.
A chain of names that starts at a global and ends at one of torch's dropout functions is a call that
no switch from outside reaches. So is the attention of transformers: a dropout module of which the
owner reads only the rate `p`, or a rate of the owner's own, handed to a function while
`self.training`.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from inspect import unwrap
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from vardrop.conversion.kinds import (
    Kind,
    described,
    has_parameters,
    make_plain,
    plain_type,
    rename,
)
from vardrop.conversion.layers import layer_kind
from vardrop.gates import DROPOUT_TYPES, SwitchableDropout, drop_rate
from vardrop.layers import Ties
from vardrop.recipes import Recipe, SwitchDropout

_FUNCTIONS: tuple[Callable[..., Any], ...] = (
    functional.dropout,
    functional.dropout1d,
    functional.dropout2d,
    functional.dropout3d,
    functional.alpha_dropout,
    functional.feature_alpha_dropout,
    torch.dropout,
    torch.alpha_dropout,
    torch.feature_dropout,
    torch.feature_alpha_dropout,
    functional.scaled_dot_product_attention,
    functional.multi_head_attention_forward,
)
_ATTRIBUTES, _LOCAL = ("LOAD_ATTR", "LOAD_METHOD"), ("LOAD_FAST", "LOAD_DEREF")
_HANDED_ON = (
    "the module that owns it hands on its rate `p` in the place of a call, so it follows "
    "net.train() and cannot be switched from outside; set its p to 0, and gate a layer with "
    "vardrop.binary_dropout"
)
_NO_DROPOUT = "the net has no dropout module; give `drop_rate` to put gates before its layers"


class Switched(Kind):
    """Dropout modules get the switch; the layers of a net without any get gates, where given."""

    def __init__(self, recipe: SwitchDropout, modules: Sequence[nn.Module], every: bool) -> None:
        self.there = not DROPOUT_TYPES.keys().isdisjoint(map(type, modules))
        self.handed = handed_on(modules)
        gates = None if self.there or recipe.gate is None else Recipe(gate=recipe.gate)
        self.gates = None if gates is None else layer_kind(gates, modules, every)

    def reason(self, module: nn.Module) -> str | None:
        found = dropout_reason(module, self.handed)
        if self.there or found:
            return found
        if self.gates is not None:
            return self.gates.reason(module)
        return _NO_DROPOUT if has_parameters(module) else None

    def noisy_type(self, module: nn.Module) -> type[nn.Module] | None:
        if self.gates is not None:
            return self.gates.noisy_type(module)
        return DROPOUT_TYPES.get(type(module))

    def becomes(self, module: nn.Module) -> str:
        if self.gates is not None:
            return self.gates.becomes(module)
        return f"vardrop.gates.{DROPOUT_TYPES[type(module)].__name__}, with its own rate"

    def check(self, net: nn.Module, changes: Mapping[str, nn.Module]) -> None:
        if self.gates is not None:
            self.gates.check(net, changes)

    def change(self, module: nn.Module, noise: Ties) -> None:
        if self.gates is not None:
            self.gates.change(module, noise)
        else:
            module.__class__ = DROPOUT_TYPES[type(module)]


@make_plain.register
def _(module: SwitchableDropout) -> None:
    plain = plain_type(module, DROPOUT_TYPES)
    if plain is not None:  # a class of your own stays what it is
        rename(module, plain)


@described.register
def _(module: SwitchableDropout, name: str) -> tuple[SwitchDropout, dict[str, Any]]:
    return SwitchDropout(), {"rate": module.p}


def dropout_reason(module: nn.Module, handed: Set[int]) -> str | None:
    """Why the dropout of a module cannot be switched; empty where it can, None without dropout.

    `handed` holds the ids that `handed_on` found.
    """
    base = next((b for b in type(module).__mro__ if b in DROPOUT_TYPES), None)
    if base is type(module):
        return _HANDED_ON if id(module) in handed else ""
    if base is not None:
        return f"a subclass of {base.__name__} with behaviour of its own"
    if rate := drop_rate(module):
        return (
            f"its dropout of {rate} runs inside one torch function, so it follows "
            "net.train() and cannot be switched from outside"
        )
    return _code_reason(module)


def _code_reason(module: nn.Module) -> str | None:
    """The same, for dropout that a module's own code applies."""
    if called := sorted({f.__name__ for f in _called(type(module))}):
        return (
            f"its own code calls {', '.join(called)}, which cannot be switched from outside; "
            "use a dropout module instead"
        )
    if rates := sorted(_own_rates(module)):
        return (
            f"its own code reads its rate `{rates[0]}` while it is in training mode, which cannot "
            "be switched from outside; set it to 0, or use a dropout module instead"
        )
    return None


def handed_on(modules: Iterable[nn.Module]) -> frozenset[int]:
    """The ids of dropout modules of which the owners take the rate, in the place of a call."""
    taken: set[int] = set()
    called: set[int] = set()
    for owner in modules:
        for name, child in owner._modules.items():
            if type(child) in DROPOUT_TYPES:
                (taken if _takes_rate(type(owner), name) else called).add(id(child))
    return frozenset(taken - called)


def _takes_rate(owner: type[nn.Module], name: str) -> bool:
    """Whether code reads the rate of `name` beside the mode, or does nothing else with it."""
    uses = []
    for function in _own_functions(owner):
        found = list(_attributes(function))
        here = [asked for attribute, asked in found if attribute == name]
        # A function that asks for the mode too is what runs; a call may stand in a rare branch.
        if "p" in here and "training" in dict(found):
            return True
        uses += here
    return bool(uses) and all(asked == "p" for asked in uses)


def _own_rates(module: nn.Module) -> Iterator[str]:
    """Attributes that are drop rates by name and value, in functions that ask for the mode."""
    for function in _own_functions(type(module)):
        names = dict(_attributes(function))
        for name in names if "training" in names else ():
            rate = vars(module).get(name)
            if "drop" in name and isinstance(rate, float) and 0 < rate <= 1:
                yield name


def _attributes(function: FunctionType) -> Iterator[tuple[str, str]]:
    """The attributes of self that a function loads, each with the attribute asked of it, or ''."""
    code = function.__code__
    return _loaded(code, code.co_varnames[0]) if code.co_argcount else iter(())


def _loaded(code: CodeType, me: str) -> Iterator[tuple[str, str]]:
    steps = [s for s in dis.get_instructions(code) if s.opname not in ("CACHE", "PRECALL")]
    for before, step, after in zip(steps, steps[1:], steps[2:], strict=False):
        # One instruction may load two local names, self last.
        holder = before.argval[-1:] if isinstance(before.argval, tuple) else (before.argval,)
        if step.opname in _ATTRIBUTES and before.opname.startswith(_LOCAL) and holder == (me,):
            asked = after.opname in (*_ATTRIBUTES, "STORE_ATTR")
            yield str(step.argval), str(after.argval) if asked else ""
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _loaded(inner, me)


def _own_functions(cls: type[nn.Module]) -> Iterator[FunctionType]:
    for owner in cls.__mro__:
        if owner is not object and owner.__module__.partition(".")[0] not in ("torch", "vardrop"):
            members = (unwrap(m) for m in vars(owner).values() if callable(m))  # past decorators
            yield from (m for m in members if isinstance(m, FunctionType))


def _called(cls: type[nn.Module]) -> Iterator[Callable[..., Any]]:
    for function in _own_functions(cls):
        yield from (f for f in _globals_used(function) if any(f is g for g in _FUNCTIONS))


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
