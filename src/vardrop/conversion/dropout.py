"""The rule of `SwitchDropout`: the dropout that a model already has.

Dropout modules can be switched, and so can stochastic depth and dropout in the code of registered
classes, such as torch's attention and recurrent layers. Dropout in other code is found by running
the model on an example input. It is switched unless the training mode controls more than dropout.
"""

from __future__ import annotations

from torch import Tensor, nn

from vardrop.conversion.rules import ConversionRule, NoisyLayers, Scope, has_parameters
from vardrop.gates import (
    DROPOUT_TYPES,
    controls_only_dropout,
    drop_rate,
    find_functional_dropout,
    functional_dropout_rates,
    is_switchable,
    switched_class,
)
from vardrop.layers import Ties
from vardrop.noisy import Noisy
from vardrop.recipes import Recipe, SwitchDropout

_NO_DROPOUT = (
    "the net has no dropout module that draws; pass `example_input` to find dropout in code, or "
    "give `drop_rate` to gate its layers"
)


def dropout_rule(recipe: SwitchDropout, scope: Scope) -> ConversionRule:
    """The rule of a recipe: switch dropout, or gate the layers of a model without dropout."""
    dropout = SwitchedDropout(scope)
    if recipe.gate is None or dropout.exists:
        return dropout
    return _GatesWithoutDropout(Recipe(gate=recipe.gate), scope.everywhere, dropout)


class SwitchedDropout(ConversionRule):
    """Dropout modules, and modules with dropout in the code, become switchable."""

    def __init__(self, scope: Scope) -> None:
        self.inner = {
            id(child) for m in scope.modules if is_switchable(m) for child in _inner_dropout(m)
        }
        self.in_code: dict[int, float] = {}
        self.mixed: set[int] = set()  # whose training mode does not control just the dropout
        net, x = scope.net, scope.example_input
        rates = {} if x is None else find_functional_dropout(net, x)
        always = find_functional_dropout(net, x, training=False) if rates else {}
        for full_name, module in net.named_modules():
            name = full_name.replace("_orig_mod.", "")
            if name in rates:
                self.in_code[id(module)] = rates[name]
                if name in always or not controls_only_dropout(net, x, (name,)):
                    self.mixed.add(id(module))
        drawn = any(drop_rate(m) > 0 for m in scope.modules)
        self.exists = drawn or len(self.in_code) > len(self.mixed)

    def reason(self, module: nn.Module) -> str | None:
        base = next((b for b in type(module).__mro__ if b in DROPOUT_TYPES), None)
        rate = drop_rate(module)
        if id(module) in self.inner:
            return None  # it is switched with its parent
        if base is type(module):
            return "" if rate else "its rate is 0, so it draws nothing"
        if base is not None:
            return f"a subclass of {base.__name__} with behaviour of its own"
        reason = None if self.exists or not has_parameters(module) else _NO_DROPOUT
        if isinstance(module, Noisy):
            return reason
        if rate and not is_switchable(module):
            reason = (
                f"its dropout of {rate:g} is in code of a registered class, but a subclass may ask "
                "for the mode for more; call vardrop.gates.register_functional_dropout for it"
            )
        elif not rate and id(module) in self.mixed:
            reason = (
                f"its own code draws dropout of {self.in_code[id(module)]:g}, and its training "
                "mode does not control just that; call a dropout module instead, or "
                f"vardrop.gates.register_functional_dropout({type(module).__name__}, ...)"
            )
        elif rate or id(module) in self.in_code:
            reason = ""
        return reason

    def noisy_type(self, module: nn.Module) -> type[nn.Module] | None:
        return None if isinstance(module, Noisy) else switched_class(type(module))

    def becomes(self, module: nn.Module) -> str:
        if type(module) in DROPOUT_TYPES:
            return f"vardrop.gates.{DROPOUT_TYPES[type(module)].__name__}, with its own rate"
        named = functional_dropout_rates(module) or {"in code": self.in_code.get(id(module), 0.0)}
        rates = (f"{name}={rate:g}" for name, rate in named.items())
        return f"itself, with its dropout ({', '.join(rates)}) under the switch"

    def weights(self, module: nn.Module) -> list[Tensor]:
        return []

    def change(self, module: nn.Module, noise: Ties) -> None:
        children = _inner_dropout(module) if is_switchable(module) else []
        for part in (module, *children):  # a rare branch may call the children
            part.__class__ = self.noisy_type(part) or type(part)


class _GatesWithoutDropout(NoisyLayers):
    """Gates in the layers of a model without dropout."""

    def __init__(self, recipe: Recipe, everywhere: bool, dropout: SwitchedDropout) -> None:
        super().__init__(recipe, everywhere)
        self.dropout = dropout

    def reason(self, module: nn.Module) -> str | None:
        reason = self.dropout.reason(module)
        return super().reason(module) if reason in (None, _NO_DROPOUT) else reason


def _inner_dropout(module: nn.Module) -> list[nn.Module]:
    """The dropout modules whose rates the code of their parent reads instead of calling them."""
    paths = functional_dropout_rates(module)
    return [module.get_submodule(p.removesuffix(".p")) for p in paths if p.endswith(".p")]
