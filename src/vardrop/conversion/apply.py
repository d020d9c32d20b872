"""Carry out a conversion in place, and take it back.

A noisy layer subclasses the torch layer, so a module is converted by giving it the noisy class and
the noise tensors. The object stays the same: tied modules, hooks, optimizers and every other
reference to it or to its parameters go on working, and a bare layer converts like a whole net.
"""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor, nn

from vardrop.conversion.plan import Plan, Where, plan
from vardrop.errors import VardropError
from vardrop.layers import NOISY_TYPES, Variational
from vardrop.noisy import noisy_modules
from vardrop.recipes import Recipe

Net = TypeVar("Net", bound=nn.Module)


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

    Several methods in one net: call it several times with different `where`.

    >>> import torch, vardrop as vd
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
    >>> type(vd.convert(net, vd.sparse_vd(), where="0")[0])
    <class 'vardrop.layers.dense.Linear'>
    """
    todo = plan(net, recipe, where, exclude)
    if not todo.changes:
        raise VardropError(f"Expected something to convert, but {_nothing(todo)}.")
    noise: dict[int, dict[str, Tensor]] = {}  # of weights that several modules share
    for step in todo.changes:
        module = step.module
        module.__class__ = NOISY_TYPES[type(module)]
        assert isinstance(module, Variational)
        tied = noise.setdefault(id(module.weight), {})
        module.make_noisy(
            recipe.posterior,
            recipe.prior,
            recipe.estimator,
            recipe.gate,
            recipe.noisy_bias,
            tied,
        )
        for tensor_name in module._names[0]:
            tied.setdefault(tensor_name, getattr(module, tensor_name))
    return net


def _nothing(todo: Plan) -> str:
    if not todo.skips:
        return "the net has no modules with parameters"
    found = "; ".join(
        f"'{s.name or '(net)'}' ({type(s.module).__name__}): {s.reason}" for s in todo.skips
    )
    return f"every module is skipped: {found}"


def revert(net: Net) -> Net:
    """Turn a noisy net back into a plain torch net of its posterior means, in place.

    >>> import torch, vardrop as vd
    >>> type(vd.revert(vd.convert(torch.nn.Linear(2, 1), vd.sparse_vd())))
    <class 'torch.nn.modules.linear.Linear'>
    """
    plain = {noisy: torch_type for torch_type, noisy in NOISY_TYPES.items()}
    for module in noisy_modules(net).values():
        if isinstance(module, Variational):
            module.make_plain()
            module.__class__ = plain[type(module)]
    return net
