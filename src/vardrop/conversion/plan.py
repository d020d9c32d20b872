"""The plan of a conversion: which modules change, which are skipped, and the reason."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from vardrop._core.checks import check_net, check_type
from vardrop._core.errors import VardropError, report_arguments
from vardrop._core.integrations import load_integration
from vardrop.conversion.dropout import dropout_rule
from vardrop.conversion.rules import ConversionRule, LastLayer, Scope, join_names, layer_rule
from vardrop.layers import register_linear_like
from vardrop.noisy import enclosed
from vardrop.recipes import BaseRecipe, HeadRecipe, Recipe, SwitchDropout

Selection = str | type[nn.Module] | Callable[[nn.Module, str], bool]
# The rule of each type of recipe.
RULES: dict[type[BaseRecipe], Callable[[Any, Scope], ConversionRule]] = {
    Recipe: layer_rule,
    HeadRecipe: LastLayer,
    SwitchDropout: dropout_rule,
}
NOT_SELECTED = "not selected by `include`"


def rule_of(recipe: BaseRecipe, scope: Scope) -> ConversionRule:
    """The rule of a recipe for modules of a model."""
    make = RULES.get(type(recipe))
    if make is None:
        types = ", ".join(kind.__name__ for kind in RULES)
        raise VardropError(
            f"Expected `recipe` to be a Recipe of a known kind ({types}), but got {recipe!r}."
        )
    for module in scope.modules:
        load_integration(type(module))
        register_linear_like(module)
    return make(recipe, scope)


def selects(
    include: Selection | list[Selection] | tuple[Selection, ...] | None,
    module: nn.Module,
    name: str,
) -> bool:
    """Whether a selection (name pattern, type, predicate, list of these; None: all) has a module.

    >>> selects("fc*", nn.Linear(2, 1), "fc1"), selects([nn.Conv2d, "x"], nn.Linear(2, 1), "fc1")
    (True, False)
    """
    if include is None:
        return True
    if isinstance(include, list | tuple):
        return any(selects(part, module, name) for part in include)
    if isinstance(include, str):
        return fnmatchcase(name, include)
    if isinstance(include, type):
        return isinstance(module, include)
    with report_arguments("include", "exclude"):
        return bool(include(module, name))


@dataclass(frozen=True, eq=False)
class PlanEntry:
    """One module of the plan: its noisy form, or the reason why it is skipped."""

    name: str
    module: nn.Module
    reason: str = ""
    becomes: str = ""


@dataclass(frozen=True, eq=False)
class Plan:
    """The changes that `convert` would make. Print it.

    In a large model, modules with equal entries whose names differ only in numbers are printed as
    one pattern with their count. `include` takes such a pattern. `steps` has all modules.

    Args:
        recipe: the method.
        steps: one entry per module.
        rule: how modules are converted.
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
        """The modules with weights or dropout that stay unchanged."""
        return tuple(s for s in self.steps if s.reason)

    def skips_by_reason(self) -> list[str]:
        """Each reason to skip once, with its modules."""
        names: dict[str, list[str]] = {}
        for s in self.skips:
            names.setdefault(s.reason, []).append(
                f"'{s.name or '(net)'}' ({type(s.module).__name__})"
            )
        return [f"{join_names(modules)}: {reason}" for reason, modules in names.items()]

    def __str__(self) -> str:
        unique = {id(w): w for s in self.changes for w in self.rule.weights(s.module)}
        weights = sum(w.numel() for w in unique.values())
        lines = [f"{len(self.changes)} modules, {weights} weights become noisy: {self.recipe!r}"]
        # Name, type and change of each module. Many modules are grouped by numbers in names.
        groups: dict[tuple[str, str, str], list[str]] = {}
        for s in self.steps:
            pattern = s.name
            if len(self.steps) > 24:  # then without the numbers between the dots of a name
                pattern = re.sub(r"(?<![^.])\d+(?![^.])", "*", s.name)
            what = f"skip: {s.reason}" if s.reason else f"-> {s.becomes}"
            groups.setdefault((pattern, type(s.module).__name__, what), []).append(s.name)
        patterns = Counter(pattern for pattern, *_ in groups)
        rows = []
        for (pattern, kind, what), names in groups.items():
            name = pattern if patterns[pattern] == 1 and len(names) > 1 else join_names(names, 2)
            times = f"{len(names)} " if len(names) > 1 else ""
            rows.append((name or "(net)", f"{times}{kind}", what))
        width = max([5, *(len(name) for name, *_ in rows)])
        lines += [f"  {name:<{width}}  {kind}  {what}" for name, kind, what in rows]
        return "\n".join(lines)


def plan(
    net: nn.Module,
    recipe: BaseRecipe,
    include: Selection | list[Selection] | None = None,
    exclude: Selection | list[Selection] | None = None,
    example_input: Any = None,
) -> Plan:
    """List the changes that `convert` would make, without making them.

    Args:
        net: any module.
        recipe: the method.
        include: the modules to convert: a glob on the name, a type, a predicate, or a list of
            these.
        exclude: the modules to leave out, in the same form.
        example_input: a batch, with which `mc_dropout()` finds dropout in custom code. It runs a
            few passes of a copy. Without it such dropout is not listed.

    Returns:
        The plan.

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
    wanted = "a name pattern, a module type, a predicate (module, name) -> bool or a list of these"
    for argument, selection in (("include", include), ("exclude", exclude)):
        patterns = selection if isinstance(selection, list | tuple | None) else [selection]
        for pattern in patterns or ():
            check_type(argument, pattern, str | Callable, wanted)
            if not callable(pattern) and not any(fnmatchcase(name, pattern) for name in modules):
                raise VardropError(
                    f"Expected `{argument}` to match a module, but got {pattern!r}. "
                    f"The names are {join_names([name or '(net)' for name in modules])}."
                )
    rule = rule_of(recipe, Scope(net, list(modules.values()), include is None, example_input))
    reasons = {}
    for name, module in modules.items():
        if (reason := rule.reason(module)) is None:
            continue
        if not selects(include, module, name):
            reason = NOT_SELECTED
        elif exclude is not None and selects(exclude, module, name):
            reason = "left out by `exclude`"
        reasons[name] = reason
    reasons |= rule.check(net, {n: modules[n] for n, reason in reasons.items() if not reason})
    steps = (
        PlanEntry(name, modules[name], reason, "" if reason else rule.becomes(modules[name]))
        for name, reason in reasons.items()
    )
    return Plan(recipe, tuple(steps), rule)
