"""The plan of a conversion: which modules change, which are skipped, and the reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from vardrop.errors import VardropError
from vardrop.layers import NOISY_TYPES, Embedding, Variational
from vardrop.noisy import Noisy
from vardrop.recipes import Recipe

Where = str | type[nn.Module] | Callable[[nn.Module, str], bool]

_UNSUPPORTED: dict[type[nn.Module], str] = {
    nn.MultiheadAttention: "attention multiplies its packed weights inside one torch function",
    nn.LSTM: "recurrent layers run inside one torch function",
    nn.GRU: "recurrent layers run inside one torch function",
    nn.RNN: "recurrent layers run inside one torch function",
    nn.LSTMCell: "recurrent cells run inside one torch function",
    nn.GRUCell: "recurrent cells run inside one torch function",
    nn.RNNCell: "recurrent cells run inside one torch function",
    nn.EmbeddingBag: "bags reduce rows inside one torch function",
}


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
        """The modules with weights that stay as they are."""
        return tuple(s for s in self.steps if s.reason)

    def __str__(self) -> str:
        weights = sum(s.module.weight.numel() for s in self.changes)  # type: ignore[operator, union-attr]
        lines = [f"{len(self.changes)} modules, {weights} weights become noisy: {self.recipe!r}"]
        width = max((len(s.name) for s in self.steps), default=0)
        for s in self.steps:
            kind = type(s.module).__name__
            what = f"skip: {s.reason}" if s.reason else f"-> vardrop.{_target(s.module)}"
            lines.append(f"  {s.name or '(net)':<{max(width, 5)}}  {kind}  {what}")
        return "\n".join(lines)


def _target(module: nn.Module) -> str:
    return NOISY_TYPES[type(module)].__name__


def selects(where: Where | list[Where] | None, module: nn.Module, name: str) -> bool:
    """Whether a selection (glob on the name, type, predicate, or a list of these) takes a module."""
    if where is None:
        return True
    if isinstance(where, list | tuple):
        return any(selects(w, module, name) for w in where)
    if isinstance(where, str):
        return fnmatchcase(name, where)
    if isinstance(where, type):
        return isinstance(module, where)
    if callable(where):
        return where(module, name)
    raise VardropError(
        "Expected `where` to be a name pattern, a module type, a predicate (module, name) -> bool "
        f"or a list of these, but got {where!r}."
    )


def _check_names(argument: str, where: Where | list[Where] | None, names: list[str]) -> None:
    patterns = where if isinstance(where, list | tuple) else [where]
    for pattern in patterns:
        if isinstance(pattern, str) and not any(fnmatchcase(n, pattern) for n in names):
            raise VardropError(
                f"Expected `{argument}` to match a module, but got {pattern!r}. "
                f"The names are {', '.join(n or '(net)' for n in names)}."
            )


def reason_to_skip(module: nn.Module, recipe: Recipe) -> str:
    """Why a module cannot take the recipe; empty where it can."""
    if isinstance(module, Noisy):
        return "a gate or head with noise of its own"
    if isinstance(module, LazyModuleMixin):
        return "its shape is not known yet; run one batch through the net first"
    if type(module) in _UNSUPPORTED:
        return _UNSUPPORTED[type(module)]
    if type(module) not in NOISY_TYPES:
        base = next((b for b in NOISY_TYPES if isinstance(module, b)), None)
        if base is not None:
            return f"a subclass of {base.__name__} with behaviour of its own"
        return "no weights that can be noisy"
    if not module.weight.is_floating_point():  # type: ignore[operator, union-attr]
        return f"its weights are {module.weight.dtype}"  # type: ignore[union-attr]
    if isinstance(module, nn.Embedding):
        return _embedding_reason(module, recipe)
    return ""


def _embedding_reason(module: nn.Embedding, recipe: Recipe) -> str:
    if module.max_norm is not None:
        return "max_norm rewrites its weights in the forward pass"
    if module.sparse:
        return "sparse gradients do not go with a KL over all weights"
    if recipe.gate is not None:
        return f"an index has no features to gate ({Embedding.__name__} takes posteriors only)"
    return ""


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
prior=ARD(), estimator=LocalReparameterization(floor=1e-08), gate=None, noisy_bias=False)
      0      Linear  -> vardrop.Linear
    """
    if not isinstance(net, nn.Module):
        raise VardropError(f"Expected `net` to be a torch.nn.Module, but got {net!r}.")
    if not isinstance(recipe, Recipe):
        raise VardropError(
            f"Expected `recipe` to be a Recipe, but got {recipe!r}. Call it: vardrop.sparse_vd()."
        )
    inside = {
        id(c) for m in net.modules() if isinstance(m, Noisy) for c in m.modules() if c is not m
    }
    modules = [(n, m) for n, m in net.named_modules() if id(m) not in inside]
    names = [n for n, _ in modules]
    _check_names("where", where, names)
    _check_names("exclude", exclude, names)
    steps = []
    for name, module in modules:
        if not list(module.parameters(recurse=False)) and not isinstance(module, LazyModuleMixin):
            continue
        if not selects(where, module, name):
            steps.append(Step(name, module, "not selected by `where`"))
        elif exclude is not None and selects(exclude, module, name):
            steps.append(Step(name, module, "left out by `exclude`"))
        else:
            steps.append(Step(name, module, _checked_reason(name, module, recipe)))
    return Plan(recipe, tuple(steps))


def _checked_reason(name: str, module: nn.Module, recipe: Recipe) -> str:
    if isinstance(module, Variational):
        raise VardropError(
            f"Expected module '{name or '(net)'}' to be plain, but got {type(module).__name__}, "
            "which is noisy already. Leave it out with `exclude`, or call vardrop.revert first."
        )
    reason = reason_to_skip(module, recipe)
    if not reason and not bool(torch.isfinite(module.weight).all()):  # type: ignore[arg-type]
        raise VardropError(
            f"Expected the weights of module '{name or '(net)'}' to be finite, but got NaN or "
            "infinity. Load a sound checkpoint, or train with a lower learning rate."
        )
    return reason
