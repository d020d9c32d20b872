"""Convert a model in place, and revert it.

A noisy layer subclasses the torch layer, so a module is converted by giving it the noisy class and
the noise tensors. The object stays the same: tied modules, hooks, optimizers and other references
to it or to its parameters remain valid. A single layer is converted like a model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from vardrop._core.encoder import update_encoder_fastpath
from vardrop._core.errors import VardropError
from vardrop._core.modules import parameter_owners
from vardrop.conversion.plan import NOT_SELECTED, Plan, Selection, plan, selects
from vardrop.conversion.rules import join_names, ties
from vardrop.gates import SwitchedMode
from vardrop.heads import Head
from vardrop.layers import Variational, plain_types
from vardrop.noisy import Noisy, noisy_modules
from vardrop.recipes import BaseRecipe

Net = TypeVar("Net", bound=nn.Module)


def convert(
    net: Net,
    recipe: BaseRecipe,
    include: Selection | list[Selection] | None = None,
    exclude: Selection | list[Selection] | None = None,
    example_input: Any = None,
) -> Net:
    """Make the weights or features of a model noisy, in place. Its weights become the means.

    Frozen weights (`requires_grad` is False) stay plain unless `include` names them. For several
    methods in one model, call it several times with different `include`. If it raises an error, the
    model is unchanged.

    Args:
        net: any module.
        recipe: the method, such as `vardrop.sparse_vd()`.
        include: the modules to convert: a glob on the name, a type, a predicate
            `(module, name) -> bool`, or a list of these. By default all supported modules.
        exclude: the modules to leave out, in the same form.
        example_input: a batch, with which `mc_dropout()` finds and switches dropout in custom code.

    Returns:
        The model.

    >>> import torch, vardrop as vd
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
    >>> type(vd.convert(net, vd.sparse_vd(), include="0")[0])
    <class 'vardrop.layers.dense.Linear'>
    """
    todo = plan(net, recipe, include, exclude, example_input)
    if not todo.changes:
        raise VardropError(
            f"Expected something to convert, but {_explain_empty(net, todo, include)}."
        )
    modules, noise = [entry.module for entry in todo.changes], ties(net)
    with all_or_nothing(modules, values=todo.rule.rewrites):
        for module in modules:
            todo.rule.change(module, noise)
    update_encoder_fastpath(net, Noisy)
    return net


def _explain_empty(net: nn.Module, todo: Plan, include: Selection | list[Selection] | None) -> str:
    if not todo.skips:
        quantised = any(".quantized" in type(m).__module__ for m in net.modules())
        remedy = ": its layers are quantised; convert the model before" if quantised else ""
        return f"the net has no modules with parameters{remedy}"
    listed = {entry.name for entry in todo.steps}
    bare = [
        f"'{name}' ({type(m).__name__})"
        for name, m in net.named_modules()
        if include is not None and name not in listed and selects(include, m, name)
    ]
    if bare and all(entry.reason == NOT_SELECTED for entry in todo.skips):
        return (
            f"`include` selects {join_names(bare)}, without weights or heads of their own that "
            "could be noisy or gated. Name the layers inside"
        )
    return f"every module is skipped: {'; '.join(todo.skips_by_reason())}"


def revert(net: Net) -> Net:
    """Turn a noisy model into a plain torch model with the posterior means, in place.

    The mean of a gate is folded into the weights of its layer. Gates that depend on their input,
    and heads other than a softmax, have no plain form. They raise an error before anything changes.
    A `Gate` that you placed between layers stays.

    Args:
        net: a model with noisy modules.

    Returns:
        The model.

    >>> import torch, vardrop as vd
    >>> type(vd.revert(vd.convert(torch.nn.Linear(2, 1), vd.sparse_vd())))
    <class 'torch.nn.modules.linear.Linear'>
    """
    modules = list(noisy_modules(net).values())
    owners = parameter_owners(net)
    for module in modules:
        if isinstance(module, Head) and not module.rule.linear:
            raise VardropError(
                f"Expected a head that is a softmax of its linear layer, but got {module.rule!r}. "
                "Keep the head and use the model in evaluation mode."
            )
        if isinstance(module, Variational) and module.gate and module.gate.unit_mean() is not None:
            module.check_gate_folds(owners)
    types: dict[Any, type[nn.Module]] = {Head: nn.Linear, **plain_types()}
    for module in modules:
        plain = module.plain if isinstance(module, SwitchedMode) else types.get(type(module))
        if plain is None:  # a gate between layers, or a custom class
            continue
        if isinstance(module, Variational):
            module.make_plain()
        elif isinstance(module, Head):
            del module.rule
        module.__dict__.pop("sampling", None)
        module.__class__ = plain  # type: ignore[assignment]
    update_encoder_fastpath(net, Noisy)
    return net


@contextmanager
def all_or_nothing(modules: Iterable[nn.Module], values: bool = False) -> Iterator[None]:
    """Restore classes, attributes, parameters and children of modules if the block raises.

    Args:
        modules: the modules, with their children.
        values: restore the values of the tensors too, for a block that writes into them.

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
    attributes = [(m, type(m), dict(vars(m))) for m in parts]
    registries = [
        (v, v.copy()) for m in parts for v in vars(m).values() if isinstance(v, dict | set)
    ]
    owned = {id(t): t for m in parts for t in (*m.parameters(False), *m.buffers(False))}.values()
    tensors = [(t, t.requires_grad, t.detach().clone() if values else None) for t in owned]
    try:
        yield
    except BaseException:
        for module, kind, before in attributes:
            module.__class__ = kind
            vars(module).clear()
            vars(module).update(before)
        for registry, entries in registries:  # the same objects, which others may refer to
            registry.clear()
            registry.update(entries)
        for tensor, learned, old in tensors:
            if tensor.requires_grad != learned:
                tensor.requires_grad_(learned)
            if old is not None:
                with torch.no_grad():
                    tensor.copy_(old)
        raise
