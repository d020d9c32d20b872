"""Dropout that a net has already: the kind of `SwitchDropout`.

Dropout modules can be switched. So can dropout inside torch's attention and recurrent layers and
inside the modules of transformers, whose code asks for the mode. Other code cannot: a chain of
names that starts at a global and ends at one of torch's dropout functions, or a rate that is handed
to a function while `self.training`, is named with the reason.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
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
from vardrop.gates import (
    DROPOUT_TYPES,
    SwitchableDropout,
    SwitchedMode,
    drop_rate,
    handed_on,
    own_functions,
    own_rates,
    rates_beside_mode,
    switchable,
    switched,
)
from vardrop.layers import Ties
from vardrop.noisy import Noisy
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
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_HANDED_ON = (
    "the module that owns it hands on its rate `p` in the place of a call, so it follows "
    "net.train() and cannot be switched from outside; set its p to 0, and gate a layer with "
    "vardrop.binary_dropout"
)
_NO_RATE = "its rate is 0, so it draws nothing"
_NO_DROPOUT = "the net has no dropout module that draws; give `drop_rate` to gate its layers"


class Switched(Kind):
    """Dropout gets the switch; the layers of a net without any get gates, where given."""

    def __init__(self, recipe: SwitchDropout, modules: Sequence[nn.Module], every: bool) -> None:
        self.there = any(drop_rate(m) > 0 for m in modules)
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
        return DROPOUT_TYPES.get(type(module)) or (
            switched(type(module)) if switchable(module) else None
        )

    def becomes(self, module: nn.Module) -> str:
        if self.gates is not None:
            return self.gates.becomes(module)
        if type(module) in DROPOUT_TYPES:
            return f"vardrop.gates.{DROPOUT_TYPES[type(module)].__name__}, with its own rate"
        rates = (f"{name}={rate:g}" for name, rate in own_rates(module).items())
        return f"itself, with its dropout ({', '.join(rates)}) under the switch"

    def weights(self, module: nn.Module) -> list[Tensor]:
        return [] if self.gates is None else self.gates.weights(module)

    def check(self, net: nn.Module, changes: Mapping[str, nn.Module]) -> None:
        if self.gates is not None:
            self.gates.check(net, changes)

    def change(self, module: nn.Module, noise: Ties) -> None:
        if self.gates is not None:
            self.gates.change(module, noise)
        elif switchable(module):
            # Where code hands on the rate of a dropout module, a rare branch may call the module.
            for child in module.children():
                if id(child) in self.handed:
                    child.__class__ = DROPOUT_TYPES.get(type(child), type(child))
            module.__class__ = switched(type(module))
        else:
            module.__class__ = DROPOUT_TYPES.get(type(module), type(module))


@make_plain.register
def _(module: SwitchableDropout) -> None:
    plain = plain_type(module, DROPOUT_TYPES)
    if plain is not None:  # a class of your own stays what it is
        rename(module, plain)


@make_plain.register
def _(module: SwitchedMode) -> None:
    rename(module, module.plain)


@described.register
def _(module: SwitchableDropout, name: str) -> tuple[SwitchDropout, dict[str, Any]]:
    return SwitchDropout(), {"rate": module.p}


@described.register
def _(module: SwitchedMode, name: str) -> tuple[SwitchDropout, dict[str, Any]]:
    return SwitchDropout(), {"rates": own_rates(module)}


def dropout_reason(module: nn.Module, handed: Mapping[int, nn.Module]) -> str | None:
    """Why the dropout of a module cannot be switched; empty where it can, None without dropout.

    `handed` is what `handed_on` found.
    """
    base = next((b for b in type(module).__mro__ if b in DROPOUT_TYPES), None)
    if base is type(module):
        return _module_reason(module, handed.get(id(module)))
    if base is not None:
        return f"a subclass of {base.__name__} with behaviour of its own"
    if isinstance(module, Noisy):
        return None
    if rate := drop_rate(module):
        return (
            ""
            if switchable(module)
            else (
                f"its dropout of {rate} runs inside one torch function, so it follows "
                "net.train() and cannot be switched from outside"
            )
        )
    return _code_reason(module)


def _module_reason(module: nn.Module, taker: nn.Module | None) -> str | None:
    """The same, for a dropout module, whose rate `taker` takes without calling it."""
    if taker is not None and own_rates(taker):
        return None  # it goes with its owner
    if drop_rate(module) == 0:
        return _NO_RATE
    return "" if taker is None else _HANDED_ON


def _code_reason(module: nn.Module) -> str | None:
    """The same, for dropout that a module's own code applies."""
    if called := sorted({f.__name__ for f in _called(type(module))}):
        return (
            f"its own code calls {', '.join(called)}, which cannot be switched from outside; "
            "use a dropout module instead"
        )
    if rates := list(rates_beside_mode(module)):
        return (
            f"its own code reads its rate `{rates[0]}` while it is in training mode, which cannot "
            "be switched from outside; set it to 0, or use a dropout module instead"
        )
    return None


def _called(cls: type[nn.Module]) -> Iterator[Callable[..., Any]]:
    for function in own_functions(cls):
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
