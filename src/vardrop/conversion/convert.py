"""Carry out a conversion in place, and take it back.

A noisy layer subclasses the torch layer, so a module is converted by giving it the noisy class and
the noise tensors. The object stays the same: tied modules, hooks, optimizers and every other
reference to it or to its parameters go on working, and a bare layer converts like a whole net.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import nn

from vardrop._core.encoder import update_encoder_fastpath
from vardrop._core.errors import VardropError
from vardrop.conversion.layers import ties
from vardrop.conversion.plan import NOT_SELECTED, Plan, plan
from vardrop.conversion.selection import Selection, join_names, selects
from vardrop.gates import DROPOUT_TYPES, SwitchedMode
from vardrop.heads import Head
from vardrop.layers import NOISY_TYPES, Variational
from vardrop.noisy import Noisy, noisy_modules
from vardrop.recipes import BaseRecipe

Net = TypeVar("Net", bound=nn.Module)


def convert(
    net: Net,
    recipe: BaseRecipe,
    include: Selection | list[Selection] | None = None,
    exclude: Selection | list[Selection] | None = None,
) -> Net:
    """Make the weights (or features) of a net noisy, in place; its weights become the means.

    Args:
        net: any module; returned.
        recipe: the method, such as `vardrop.sparse_vd()`.
        include: which modules: a glob on the name, a type, a predicate `(module, name) -> bool`, or
            a list of these. All that can be converted by default.
        exclude: which to leave out, likewise.

    Weights that are frozen (`requires_grad` is False) stay plain unless `include` names them.
    Several methods in one net: call it several times with different `include`. Where it raises, the
    net is as it was.

    >>> import torch, vardrop as vd
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
    >>> type(vd.convert(net, vd.sparse_vd(), include="0")[0])
    <class 'vardrop.layers.dense.Linear'>
    """
    todo = plan(net, recipe, include, exclude)
    if not todo.changes:
        raise VardropError(f"Expected something to convert, but {_nothing(net, todo, include)}.")
    modules, noise = [step.module for step in todo.changes], ties(net)
    with all_or_nothing(modules, values=todo.rule.rewrites):
        for module in modules:
            todo.rule.change(module, noise)
    update_encoder_fastpath(net, Noisy)
    return net


def _nothing(net: nn.Module, todo: Plan, include: Selection | list[Selection] | None) -> str:
    if not todo.skips:
        return "the net has no modules with parameters"
    about = {s.name for s in todo.steps}
    bare = [
        f"'{name}' ({type(m).__name__})"
        for name, m in net.named_modules()
        if include is not None and name not in about and selects(include, m, name)
    ]
    if bare and not any(s.reason != NOT_SELECTED for s in todo.skips):
        return (
            f"`include` selects {join_names(bare)}, without weights or heads of their own that "
            "could be noisy or gated. Name the layers inside"
        )
    return f"every module is skipped: {'; '.join(todo.skips_by_reason())}"


def revert(net: Net) -> Net:
    """Turn a noisy net back into a plain torch net of its posterior means, in place.

    The mean of a gate is folded into the weights of its layer. Gates that depend on their input,
    and heads that are more than a softmax, cannot be written as plain layers: an error says so
    before anything changes. A `Gate` that you placed between layers yourself stays.

    >>> import torch, vardrop as vd
    >>> type(vd.revert(vd.convert(torch.nn.Linear(2, 1), vd.sparse_vd())))
    <class 'torch.nn.modules.linear.Linear'>
    """
    modules = list(noisy_modules(net).values())
    owned = Counter(id(p) for m in net.modules() for p in m.parameters(recurse=False))
    shared = {key for key, owners in owned.items() if owners > 1}
    for module in modules:
        _check_plain(module, shared)
    for module in modules:
        _make_plain(module)
    update_encoder_fastpath(net, Noisy)
    return net


def _check_plain(module: Noisy, shared: set[int]) -> None:
    """Refuse to make a noisy module plain if that would lose something.

    `shared` holds the ids of parameters that several modules of the net have.
    """
    if isinstance(module, Head):
        module.check_linear()
    if not isinstance(module, Variational) or module.gate is None:
        return
    weights = {id(weight) for weight in module.gated_weights().values()}
    if module.gate.unit_mean() is not None and weights & shared:
        raise VardropError(
            "Expected every gated layer to have weights of its own, but got tied weights, "
            "into which the mean of one gate cannot be folded. Leave the layer out with `exclude` "
            "when you convert, or untie them first."
        )


def _make_plain(module: Noisy) -> None:
    """Turn what a conversion has made into the torch module that it was; others stay."""
    types: dict[type[nn.Module], type[nn.Module]] = {Head: nn.Linear}
    types |= {noisy: plain for plain, noisy in (*NOISY_TYPES.items(), *DROPOUT_TYPES.items())}
    plain = module.plain if isinstance(module, SwitchedMode) else types.get(type(module))
    if plain is None:  # a gate between layers, or a class of your own
        return
    if isinstance(module, Variational | Head):
        module.make_plain()
    module.__dict__.pop("sampling", None)
    module.__class__ = plain  # type: ignore[assignment]


class _Before:
    """The class of a module, its attributes, and what its own registries held."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.kind, self.attributes = module, type(module), dict(vars(module))
        registries = {k: v for k, v in vars(module).items() if isinstance(v, dict | set)}
        self.registries = {name: registry.copy() for name, registry in registries.items()}

    def restore(self) -> None:
        self.module.__class__ = self.kind
        vars(self.module).clear()
        vars(self.module).update(self.attributes)
        for name, held in self.registries.items():
            registry = self.attributes[name]  # the same object, which others may refer to
            registry.clear()
            registry.update(held)


@contextmanager
def all_or_nothing(modules: Iterable[nn.Module], values: bool = False) -> Iterator[None]:
    """Restore classes, attributes, parameters and children of modules where the block raises.

    `values` keeps a copy of the tensors too, for a block that writes into them.

    >>> layer = nn.Linear(2, 1)
    >>> try:
    ...     with all_or_nothing([layer]):
    ...         del layer.weight
    ...         raise KeyboardInterrupt
    ... except KeyboardInterrupt:
    ...     layer.weight.shape
    torch.Size([1, 2])
    """
    parts = {id(m): m for module in modules for m in module.modules()}.values()
    before = [_Before(m) for m in parts]
    owned = {id(t): t for m in parts for t in (*m.parameters(False), *m.buffers(False))}.values()
    tensors = [(t, t.requires_grad, t.detach().clone() if values else None) for t in owned]
    try:
        yield
    except BaseException:
        for module in before:
            module.restore()
        for tensor, learned, value in tensors:
            if tensor.requires_grad != learned:
                tensor.requires_grad_(learned)
            if value is not None:
                with torch.no_grad():
                    tensor.copy_(value)
        raise
