"""Carry out a conversion in place, and take it back.

A noisy layer subclasses the torch layer, so a module is converted by giving it the noisy class and
the noise tensors. The object stays the same: tied modules, hooks, optimizers and every other
reference to it or to its parameters go on working, and a bare layer converts like a whole net.
"""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from vardrop.conversion.plan import Plan, plan
from vardrop.conversion.rollback import all_or_nothing
from vardrop.conversion.selection import Where
from vardrop.errors import VardropError
from vardrop.gates import DROPOUT_TYPES, DependentBetaBernoulli, depend
from vardrop.heads import HEAD_TYPES, Head
from vardrop.layers import NOISY_TYPES, Ties, Variational
from vardrop.noisy import Noisy, noisy_modules
from vardrop.recipes import Recipe

Net = TypeVar("Net", bound=nn.Module)
_PLAIN: dict[type[nn.Module], type[nn.Module]] = {
    **{noisy: plain for plain, noisy in NOISY_TYPES.items()},
    **{noisy: plain for plain, noisy in DROPOUT_TYPES.items()},
    **dict.fromkeys(HEAD_TYPES.values(), nn.Linear),
}


def convert(
    net: Net,
    recipe: Recipe,
    where: Where | list[Where] | None = None,
    exclude: Where | list[Where] | None = None,
) -> Net:
    """Make the weights (or features) of a net noisy, in place; its weights become the means.

    Args:
        net: any module; returned.
        recipe: the method, such as `vardrop.sparse_vd()`.
        where: which modules: a glob on the name, a type, a predicate `(module, name) -> bool`, or
            a list of these. All that can be converted by default.
        exclude: which to leave out, likewise.

    Weights that are frozen (`requires_grad` is False) stay plain unless `where` names them.
    Several methods in one net: call it several times with different `where`. Where it raises, the
    net is as it was.

    >>> import torch, vardrop as vd
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
    >>> type(vd.convert(net, vd.sparse_vd(), where="0")[0])
    <class 'vardrop.layers.dense.Linear'>
    """
    todo = plan(net, recipe, where, exclude)
    if not todo.changes:
        raise VardropError(f"Expected something to convert, but {_nothing(todo)}.")
    _check_ties(net, recipe, [step.module for step in todo.changes])
    noise = ties(net)
    zeroed = recipe.posterior is not None and recipe.posterior.zero_mean
    with all_or_nothing([step.module for step in todo.changes], values=zeroed):
        for step in todo.changes:
            apply_recipe(step.module, recipe, noise)
    return net


def ties(net: nn.Module) -> Ties:
    """The noise that is there, by the weight or bias that it belongs to."""
    found: Ties = {}
    for layer in (m for m in net.modules() if isinstance(m, Variational)):
        for mean, tensors in layer.owned_noise():
            found.setdefault(id(mean), {}).update(tensors)
    return found


def _check_ties(net: nn.Module, recipe: Recipe, modules: list[nn.Module]) -> None:
    """Refuse a second method for a weight that another module has made noisy."""
    there = {id(m.weight): m for m in net.modules() if isinstance(m, Variational) and m.posterior}
    for module in modules:
        other = there.get(id(getattr(module, "weight", None)))
        if recipe.posterior is None or other is None or other is module:
            continue
        if (recipe.posterior, recipe.prior) != (other.posterior, other.prior):
            raise VardropError(
                "Expected modules with one weight to have one posterior and one prior, but got "
                f"{recipe.posterior!r} with {recipe.prior!r} beside {other.posterior!r} with "
                f"{other.prior!r}. Convert them with the same recipe, or untie them."
            )


def apply_recipe(module: nn.Module, recipe: Recipe, noise: Ties) -> None:
    """Make one plain module noisy; `noise` gathers the tensors of weights that are tied."""
    if type(module) in DROPOUT_TYPES:
        module.__class__ = DROPOUT_TYPES[type(module)]
    elif recipe.head is not None:
        module.__class__ = HEAD_TYPES[type(recipe.head)]
        assert isinstance(module, Head)
        module.make_head(recipe.head)
    elif isinstance(module, Variational):
        assert isinstance(recipe.gate, DependentBetaBernoulli)
        module.gate = depend(module.gate, recipe.gate)
    else:
        _make_noisy(module, recipe, noise)


def _make_noisy(module: nn.Module, recipe: Recipe, noise: Ties) -> None:
    module.__class__ = NOISY_TYPES[type(module)]
    assert isinstance(module, Variational)
    method = recipe.posterior, recipe.prior, recipe.estimator, recipe.gate, recipe.noisy_bias
    module.make_noisy(*method, noise)


def _nothing(todo: Plan) -> str:
    if not todo.skips:
        return "the net has no modules with parameters"
    return f"every module is skipped: {'; '.join(todo.grouped_skips())}"


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
    _check_revert(modules)
    for module in modules:
        if type(module) in _PLAIN:
            _make_plain(module)
    return net


def _make_plain(module: nn.Module) -> None:
    if isinstance(module, Variational | Head):
        module.make_plain()
    module.__dict__.pop("sampling", None)
    module.__class__ = _PLAIN[type(module)]


def _check_revert(modules: list[Noisy]) -> None:
    folded: set[int] = set()
    for module in modules:
        if isinstance(module, Head):
            module.check_linear()
        if not isinstance(module, Variational) or module.gate is None:
            continue
        if module.gate.unit_mean() is not None and id(module.weight) in folded:
            raise VardropError(
                "Expected every gated layer to have weights of its own, but got tied weights, "
                "into which two gates cannot be folded. Untie them first."
            )
        folded.add(id(module.weight))
