"""The plan of a conversion: which modules change, which are skipped, and the reason."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from vardrop.checks import check_net, check_type
from vardrop.conversion.reasons import is_staged, reasons
from vardrop.conversion.selection import Where, check_selection, listed, selects
from vardrop.errors import VardropError
from vardrop.gates import DROPOUT_TYPES
from vardrop.heads import HEAD_TYPES
from vardrop.layers import NOISY_TYPES, Variational
from vardrop.noisy import Noisy
from vardrop.recipes import Recipe


@dataclass(frozen=True, eq=False)
class Step:
    """One module of the plan; `reason` is empty where it changes."""

    name: str
    module: nn.Module
    reason: str = ""


@dataclass(frozen=True, eq=False)
class Plan:
    """What `convert` would do; print it to read it."""

    recipe: Recipe
    steps: tuple[Step, ...] = field(default=())

    @property
    def changes(self) -> tuple[Step, ...]:
        """The modules that become noisy."""
        return tuple(s for s in self.steps if not s.reason)

    @property
    def skips(self) -> tuple[Step, ...]:
        """The modules with weights, or with dropout, that stay as they are."""
        return tuple(s for s in self.steps if s.reason)

    def grouped_skips(self) -> list[str]:
        """Each reason to skip once, with the modules that it is about."""
        found: dict[str, list[str]] = {}
        for s in self.skips:
            kind = type(s.module).__name__
            found.setdefault(s.reason, []).append(f"'{s.name or '(net)'}' ({kind})")
        return [f"{listed(modules)}: {reason}" for reason, modules in found.items()]

    def __str__(self) -> str:
        unique = {id(w): w for s in self.changes for w in _weights(s.module)}  # tied ones once
        weights = sum(w.numel() for w in unique.values())
        lines = [f"{len(self.changes)} modules, {weights} weights become noisy: {self.recipe!r}"]
        width = max((len(s.name) for s in self.steps), default=0)
        for s in self.steps:
            kind = type(s.module).__name__
            what = f"skip: {s.reason}" if s.reason else f"-> {_target(s.module, self.recipe)}"
            lines.append(f"  {s.name or '(net)':<{max(width, 5)}}  {kind}  {what}")
        return "\n".join(lines)


def _weights(module: nn.Module) -> list[Tensor]:
    weight = getattr(module, "weight", None)
    return [] if weight is None else [weight]


def _target(module: nn.Module, recipe: Recipe) -> str:
    if recipe.head is not None:
        return f"vardrop.{HEAD_TYPES[type(recipe.head)].__name__}"
    if type(module) in DROPOUT_TYPES:
        return f"vardrop.gates.{DROPOUT_TYPES[type(module)].__name__}, with its own rate"
    if isinstance(module, Variational):
        return "its gate becomes dependent on the input"
    return f"vardrop.{NOISY_TYPES[type(module)].__name__}"


def plan(
    net: nn.Module,
    recipe: Recipe,
    where: Where | list[Where] | None = None,
    exclude: Where | list[Where] | None = None,
) -> Plan:
    """Say what `convert` would do to a net, without doing it.

    Args:
        net: any module.
        recipe: the method.
        where: which modules: a glob on the name, a type, a predicate, or a list of these.
        exclude: which to leave out, likewise.

    >>> import torch, vardrop as vd
    >>> print(vd.plan(torch.nn.Sequential(torch.nn.Linear(3, 2)), vd.ard()))
    1 modules, 6 weights become noisy: Recipe(posterior=AdditiveGaussian(log_sigma2=-10.0), \
prior=ARD(), estimator=LocalReparameterization(floor=1e-08, central_limit=False), gate=None, \
noisy_bias=False, existing=False, head=None)
      0      Linear  -> vardrop.Linear
    """
    check_net(net)
    check_type("recipe", recipe, Recipe, "a Recipe", "Call it: vardrop.sparse_vd().")
    inside = {
        id(c) for m in net.modules() if isinstance(m, Noisy) for c in m.modules() if c is not m
    }
    modules = [(n, m) for n, m in net.named_modules() if id(m) not in inside]
    names = [n for n, _ in modules]
    check_selection("where", where, names)
    check_selection("exclude", exclude, names)
    reason = reasons([m for _, m in modules], recipe, where is None)
    steps = []
    for name, module in modules:
        if (why := reason(module)) is None:
            continue
        if not selects(where, module, name):
            why = "not selected by `where`"
        elif exclude is not None and selects(exclude, module, name):
            why = "left out by `exclude`"
        elif not why:
            _check_plain(name, module, recipe)
        steps.append(Step(name, module, why))
    return _checked(Plan(recipe, tuple(steps)))


def _checked(todo: Plan) -> Plan:
    if todo.recipe.head is not None and len(todo.changes) > 1:
        names = listed([s.name for s in todo.changes])
        raise VardropError(
            f"Expected `where` to select one linear layer for the head, but got {names}. "
            "Name the last one."
        )
    return todo


def _check_plain(name: str, module: nn.Module, recipe: Recipe) -> None:
    if isinstance(module, Variational) and not is_staged(recipe):
        raise VardropError(
            f"Expected module '{name or '(net)'}' to be plain, but got {type(module).__name__}, "
            "which is noisy already. Leave it out with `exclude`, or call vardrop.revert first."
        )
    for weight in _weights(module):
        if not weight.is_meta and not bool(torch.isfinite(weight).all()):
            raise VardropError(
                f"Expected the weights of module '{name or '(net)'}' to be finite, but got NaN or "
                "infinity. Load a sound checkpoint, or train with a lower learning rate."
            )
