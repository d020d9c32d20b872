"""Dropout that a net has already: the kind of `SwitchDropout`.

Dropout modules can be switched. So can dropout in the code of classes that are registered, such as
torch's attention and recurrent layers, whose code asks for the mode. Dropout in other code cannot:
where there is an example input, a pass finds it, and it is named with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from vardrop.conversion.layers import layer_rule
from vardrop.conversion.rules import ConversionRule, has_parameters
from vardrop.gates import (
    DROPOUT_TYPES,
    drop_rate,
    find_functional_dropout,
    functional_dropout_rates,
    is_switchable,
    switched_class,
)
from vardrop.layers import Ties
from vardrop.noisy import Noisy
from vardrop.recipes import Recipe, SwitchDropout

_SUBCLASS = (
    "its dropout of {rate:g} is in code of a registered class, but a subclass may ask for the mode "
    "for more; call vardrop.gates.register_functional_dropout for it"
)
_IN_CODE = (
    "its own code draws dropout of {rate:g}, which cannot be switched from outside; call a dropout "
    "module instead, or vardrop.gates.register_functional_dropout({kind}, ...)"
)
_NO_RATE = "its rate is 0, so it draws nothing"
_NO_DROPOUT = "the net has no dropout module that draws; give `drop_rate` to gate its layers"


class Switched(ConversionRule):
    """Dropout gets the switch; the layers of a net without any get gates, where given."""

    def __init__(self, recipe: SwitchDropout, modules: Sequence[nn.Module], every: bool) -> None:
        self.there = any(drop_rate(m) > 0 for m in modules)
        self.inner = {id(child) for m in modules if is_switchable(m) for child in _inner_dropout(m)}
        self.in_code: dict[int, float] = {}
        gates = None if self.there or recipe.gate is None else Recipe(gate=recipe.gate)
        self.gates = None if gates is None else layer_rule(gates, modules, every)

    def observe(self, net: nn.Module, example_input: Any) -> None:
        rates = find_functional_dropout(net, example_input)
        names = {id(m): name.replace("_orig_mod.", "") for name, m in net.named_modules()}
        self.in_code = {key: rates[name] for key, name in names.items() if name in rates}

    def reason(self, module: nn.Module) -> str | None:
        why = self._dropout_reason(module)
        if self.there or why:
            return why
        if self.gates is not None:
            return self.gates.reason(module)
        return _NO_DROPOUT if has_parameters(module) else None

    def _dropout_reason(self, module: nn.Module) -> str | None:
        """The same for the dropout of a module; None without any."""
        base = next((b for b in type(module).__mro__ if b in DROPOUT_TYPES), None)
        if id(module) in self.inner:
            return None  # it goes with its owner
        if base is type(module):
            return "" if drop_rate(module) else _NO_RATE
        if base is not None:
            return f"a subclass of {base.__name__} with behaviour of its own"
        if isinstance(module, Noisy):
            return None
        if rate := drop_rate(module):
            return "" if is_switchable(module) else _SUBCLASS.format(rate=rate)
        in_code = self.in_code.get(id(module))
        kind = type(module).__name__
        return None if in_code is None else _IN_CODE.format(rate=in_code, kind=kind)

    def noisy_type(self, module: nn.Module) -> type[nn.Module] | None:
        if self.gates is not None:
            return self.gates.noisy_type(module)
        return DROPOUT_TYPES.get(type(module)) or (
            switched_class(type(module)) if is_switchable(module) else None
        )

    def becomes(self, module: nn.Module) -> str:
        if self.gates is not None:
            return self.gates.becomes(module)
        if type(module) in DROPOUT_TYPES:
            return f"vardrop.gates.{DROPOUT_TYPES[type(module)].__name__}, with its own rate"
        rates = (f"{name}={rate:g}" for name, rate in functional_dropout_rates(module).items())
        return f"itself, with its dropout ({', '.join(rates)}) under the switch"

    def weights(self, module: nn.Module) -> list[Tensor]:
        return [] if self.gates is None else self.gates.weights(module)

    def check(self, net: nn.Module, changes: Mapping[str, nn.Module]) -> None:
        if self.gates is not None:
            self.gates.check(net, changes)

    def change(self, module: nn.Module, noise: Ties) -> None:
        if self.gates is not None:
            self.gates.change(module, noise)
        elif is_switchable(module):
            for child in _inner_dropout(module):  # which a rare branch may call
                child.__class__ = DROPOUT_TYPES.get(type(child), type(child))
            module.__class__ = switched_class(type(module))
        else:
            module.__class__ = DROPOUT_TYPES.get(type(module), type(module))


def _inner_dropout(module: nn.Module) -> list[nn.Module]:
    """The dropout modules inside a module whose rates its own code takes in the place of a call."""
    paths = functional_dropout_rates(module)
    return [module.get_submodule(p.removesuffix(".p")) for p in paths if p.endswith(".p")]
