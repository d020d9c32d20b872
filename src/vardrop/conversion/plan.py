"""The plan of a conversion: which modules change, which are skipped, and the reason."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from vardrop._core.checks import check_net, check_type
from vardrop._core.errors import VardropError
from vardrop._core.integrations import load_integration
from vardrop.conversion.dropout import Switched
from vardrop.conversion.last_layer import LastLayer
from vardrop.conversion.layers import layer_rule
from vardrop.conversion.rules import ConversionRule
from vardrop.conversion.selection import Selection, check_selection, join_names, selects
from vardrop.noisy import enclosed
from vardrop.recipes import BaseRecipe, HeadRecipe, Recipe, SwitchDropout

# By the exact type of a recipe: its rule, for these modules, with or without `include`.
RULES: dict[type[BaseRecipe], Callable[[Any, Sequence[nn.Module], bool], ConversionRule]] = {
    Recipe: layer_rule,
    HeadRecipe: LastLayer,
    SwitchDropout: Switched,
}


def rule_of(
    recipe: BaseRecipe, modules: Sequence[nn.Module], everywhere: bool = False
) -> ConversionRule:
    """What answers for a recipe about these modules of a net."""
    make = RULES.get(type(recipe))
    if make is None:
        types = ", ".join(kind.__name__ for kind in RULES)
        raise VardropError(
            f"Expected `recipe` to be a Recipe of a known kind ({types}), but got {recipe!r}."
        )
    for module in modules:
        load_integration(type(module))
    return make(recipe, modules, everywhere)


NOT_SELECTED = "not selected by `include`"
_MANY = 24  # modules, beyond which a plan is printed in groups
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # as a whole part of a name


@dataclass(frozen=True, eq=False)
class PlanEntry:
    """One module of the plan: what it becomes, or the reason why it stays."""

    name: str
    module: nn.Module
    reason: str = ""
    becomes: str = ""


@dataclass(frozen=True, eq=False)
class Plan:
    """What `convert` would do; print it to read it.

    Of many modules, those whose names differ only in numbers, and which fare alike, are printed as
    one pattern with their count; `include` takes such a pattern. `steps` has every one of them.
    """

    recipe: BaseRecipe
    steps: tuple[PlanEntry, ...]
    rule: ConversionRule = field(repr=False)

    @property
    def changes(self) -> tuple[PlanEntry, ...]:
        """The modules that become noisy."""
        return tuple(s for s in self.steps if not s.reason)

    @property
    def skips(self) -> tuple[PlanEntry, ...]:
        """The modules with weights, or with dropout, that stay as they are."""
        return tuple(s for s in self.steps if s.reason)

    def skips_by_reason(self) -> list[str]:
        """Each reason to skip once, with the modules that it is about."""
        names: dict[str, list[str]] = {}
        for s in self.skips:
            kind = type(s.module).__name__
            names.setdefault(s.reason, []).append(f"'{s.name or '(net)'}' ({kind})")
        return [f"{join_names(modules)}: {reason}" for reason, modules in names.items()]

    def __str__(self) -> str:
        unique = {id(w): w for s in self.changes for w in self.rule.weights(s.module)}
        weights = sum(w.numel() for w in unique.values())
        lines = [f"{len(self.changes)} modules, {weights} weights become noisy: {self.recipe!r}"]
        rows = self._rows()
        width = max((len(name) for name, *_ in rows), default=0)
        lines += [f"  {name:<{max(width, 5)}}  {kind}  {what}" for name, kind, what in rows]
        return "\n".join(lines)

    def _rows(self) -> list[tuple[str, str, str]]:
        """Name, type and fate of each module; of many, those whose names differ in numbers once."""
        groups: dict[tuple[str, str, str], list[str]] = {}
        for s in self.steps:
            pattern = _NUMBER.sub("*", s.name) if len(self.steps) > _MANY else s.name
            what = f"skip: {s.reason}" if s.reason else f"-> {s.becomes}"
            groups.setdefault((pattern, type(s.module).__name__, what), []).append(s.name)
        fates = Counter(pattern for pattern, *_ in groups)
        rows = []
        for (pattern, kind, what), names in groups.items():
            name = pattern if fates[pattern] == 1 and len(names) > 1 else join_names(names, 2)
            times = f"{len(names)} " if len(names) > 1 else ""
            rows.append((name or "(net)", f"{times}{kind}", what))
        return rows


def plan(
    net: nn.Module,
    recipe: BaseRecipe,
    include: Selection | list[Selection] | None = None,
    exclude: Selection | list[Selection] | None = None,
    example_input: Any = None,
) -> Plan:
    """Say what `convert` would do to a net, without doing it.

    Args:
        net: any module.
        recipe: the method.
        include: which modules: a glob on the name, a type, a predicate, or a list of these.
        exclude: which to leave out, likewise.
        example_input: a batch, with which `mc_dropout()` finds dropout in code of your own: it runs
            one pass of a copy. Without it such dropout is not join_names.

    >>> import torch, vardrop as vd
    >>> print(vd.plan(torch.nn.Sequential(torch.nn.Linear(3, 2)), vd.ard()))
    1 modules, 6 weights become noisy: Recipe(posterior=\
AdditiveGaussian(log_sigma2=-10.0, train_clip=None), \
prior=ARD(), estimator=LocalReparameterization(floor=1e-08, central_limit=False), gate=None, \
noisy_bias=False)
      0      Linear  -> vardrop.Linear
    """
    check_net(net)
    check_type("recipe", recipe, BaseRecipe, "a Recipe", "Call it: vardrop.sparse_vd().")
    inside = enclosed(net)
    modules = {n: m for n, m in net.named_modules() if id(m) not in inside}
    check_selection("include", include, list(modules))
    check_selection("exclude", exclude, list(modules))
    kind = rule_of(recipe, list(modules.values()), include is None)
    if example_input is not None:
        kind.observe(net, example_input)
    steps = []
    for name, module in modules.items():
        if (why := kind.reason(module)) is None:
            continue
        if not selects(include, module, name):
            why = NOT_SELECTED
        elif exclude is not None and selects(exclude, module, name):
            why = "left out by `exclude`"
        steps.append(PlanEntry(name, module, why))
    tied = kind.tie_reasons(net, {s.name: s.module for s in steps if not s.reason})
    steps = [replace(s, reason=tied.get(s.name, s.reason)) for s in steps]
    kind.check(net, {s.name: s.module for s in steps if not s.reason})
    entries = (s if s.reason else replace(s, becomes=kind.becomes(s.module)) for s in steps)
    return Plan(recipe, tuple(entries), kind)
