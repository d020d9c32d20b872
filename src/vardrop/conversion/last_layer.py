"""The rule of `HeadRecipe`: noise on classes, by a head instead of the last linear layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from torch import nn

from vardrop._core.errors import VardropError
from vardrop.conversion.rules import FROZEN, ConversionRule, Scope, has_parameters, join_names
from vardrop.heads import Head
from vardrop.layers import Ties
from vardrop.recipes import HeadRecipe


class LastLayer(ConversionRule):
    """One linear layer becomes a head: the last layer, or the layer that `include` names."""

    def __init__(self, recipe: HeadRecipe, scope: Scope) -> None:
        self.recipe, self.everywhere = recipe, scope.everywhere
        linear = [m for m in scope.modules if type(m) is nn.Linear]
        self.allowed = {id(m) for m in (linear[-1:] if scope.everywhere else linear)}

    def reason(self, module: nn.Module) -> str | None:
        if not has_parameters(module):
            return None
        if type(module) is not nn.Linear:
            return "a head takes the place of a linear layer"
        if id(module) not in self.allowed:
            return "not the last linear layer; name another with `include`"
        if module.out_features < 2:
            return "one output; a head needs at least 2 classes"
        return "" if module.weight.requires_grad or not self.everywhere else FROZEN

    def noisy_type(self, module: nn.Module) -> type[nn.Module] | None:
        return Head if type(module) is nn.Linear else None

    def becomes(self, module: nn.Module) -> str:
        return f"vardrop.Head with {self.recipe.rule!r}"

    def check(self, net: nn.Module, changes: Mapping[str, nn.Module]) -> None:
        super().check(net, changes)
        if len(changes) > 1:
            raise VardropError(
                f"Expected `include` to select one linear layer for the head, but got "
                f"{join_names(list(changes))}. Name the last one."
            )

    def change(self, module: nn.Module, noise: Ties) -> None:
        module.__class__ = Head
        cast(Head, module).make_head(self.recipe.rule)
