"""Dropout that the code of a module calls as a function if `self.training` is True.

A class whose training mode only controls dropout can be registered with its rates. Its modules are
then converted to the class of `switched_class`, whose `training` follows the sampling switch.
Attention and recurrent layers of torch are registered here, and classes of other libraries by their
integrations. `find_dropout.py` finds the dropout of all other classes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import singledispatch
from typing import Any, TypeVar, cast

from torch import nn

from vardrop._core.checks import check_type
from vardrop._core.integrations import load_integration, package_of
from vardrop.gates.switchable_dropout import DROPOUT_TYPES

_Kind = TypeVar("_Kind")  # a module, or an abstract class without `nn.Module` as its base


@singledispatch
def _rates_of(module: Any) -> dict[str, float]:
    """The rates of a class that is not registered: of stochastic depth, such as a `DropPath`.

    A module without tensors and without parts that is named after dropout has noise alone.
    """
    parts = (*module.children(), *module.parameters(), *module.buffers())
    named = re.search("drop|stochastic_?depth", type(module).__name__, re.IGNORECASE)
    if parts or not named or isinstance(module, tuple(DROPOUT_TYPES)):
        return {}
    numbers = {name: rate for name, rate in vars(module).items() if isinstance(rate, float)}
    return {name: rate for name, rate in numbers.items() if re.search("^(p|rate|prob)$|drop", name)}


def register_functional_dropout(
    kind: type[_Kind], rates: Callable[[_Kind], dict[str, float]]
) -> None:
    """Register the drop rates of a class that calls dropout if `self.training` is True.

    `convert(net, mc_dropout())` then lets `self.training` of its modules follow the sampling
    switch, and `predict` draws their dropout. The training mode must not control anything else.
    Empty rates mean that the code has no dropout.

    Args:
        kind: the class, by exact type, or an abstract class with a `__subclasshook__`.
        rates: a function from a module to its rates by name. The name `<child>.p` is the rate of an
            inner dropout module that is not called itself.

    >>> import torch, vardrop as vd
    >>> class Block(torch.nn.Module):
    ...     def forward(self, x):
    ...         return torch.nn.functional.dropout(x, 0.2, self.training)
    >>> vd.gates.register_functional_dropout(Block, lambda block: {"rate": 0.2})
    >>> [step.becomes for step in vd.plan(Block(), vd.mc_dropout()).changes]
    ['itself, with its dropout (rate=0.2) under the switch']
    """
    check_type("kind", kind, type, "a class")
    _rates_of.register(kind, rates)


def functional_dropout_rates(module: nn.Module) -> dict[str, float]:
    """The positive drop rates of a module of a registered class.

    Args:
        module: any module.

    Returns:
        The rates by name.

    >>> functional_dropout_rates(nn.LSTM(2, 2, 2, dropout=0.1))
    {'dropout': 0.1}
    >>> functional_dropout_rates(nn.Dropout(0.1))
    {}
    """
    load_integration(type(module))
    return {name: rate for name, rate in _rates_of(module).items() if rate > 0}


register_functional_dropout(nn.MultiheadAttention, lambda module: {"dropout": module.dropout})
for _recurrent in (nn.RNN, nn.LSTM, nn.GRU):
    register_functional_dropout(
        _recurrent, lambda module: {"dropout": module.dropout} if module.num_layers > 1 else {}
    )


def is_switchable(module: nn.Module) -> bool:
    """Whether the training mode of a module only controls dropout.

    For a subclass that is not registered itself this is unknown, so the answer is False.

    Args:
        module: any module.

    Returns:
        Whether the module can become a `SwitchedMode`.
    """
    kinds = _rates_of.registry.keys() - {object}
    inherited = type(module) not in kinds and not kinds.isdisjoint(type(module).__mro__)
    return not inherited and bool(functional_dropout_rates(module))


def drop_rate(module: nn.Module) -> float:
    """The rate at which a module drops features in training mode, or zero.

    Args:
        module: any module.

    Returns:
        The largest rate.

    >>> drop_rate(nn.Dropout(0.5)), drop_rate(nn.LSTM(2, 2, 2, dropout=0.1)), drop_rate(nn.ReLU())
    (0.5, 0.1, 0.0)
    """
    if isinstance(module, tuple(DROPOUT_TYPES)):
        return cast(float, module.p)
    return max(functional_dropout_rates(module).values(), default=0.0)


def is_custom(module: nn.Module) -> bool:
    """Whether the code of a module may have dropout that is not registered."""
    kind = type(module)
    registered = package_of(kind) in ("torch", "vardrop") or kind in _rates_of.registry
    return not registered and drop_rate(module) == 0 and not _rates_of(module)
