"""Dropout that the code of a module calls as a function, asking `self.training` whether to draw.

A class whose mode decides on dropout, and on nothing else, is registered with its rates: the switch
can answer for its mode, in the class that `switched_class` makes. torch's attention and recurrent
layers are registered here, classes of other libraries by their integrations; `find_dropout.py`
beside it finds what the code of other classes draws.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import singledispatch
from typing import ClassVar, SupportsIndex, TypeVar

from torch import nn

from vardrop._core.checks import check_type
from vardrop._core.integrations import load_integration, package_of
from vardrop.gates.switchable_dropout import DROPOUT_TYPES
from vardrop.noisy import Noisy

_Kind = TypeVar("_Kind")  # a module, or an abstract class without `nn.Module` as its base


class SwitchedMode(Noisy):
    """A module to whose own code the switch says whether it is in training mode.

    The module's mode itself is what `train` and `eval` have set, and modules inside keep theirs.
    """

    encloses: ClassVar[bool] = False
    plain: ClassVar[type[nn.Module]]

    @property
    def training(self) -> bool:
        """Whether the module's code draws noise now."""
        mode: bool = self.__dict__["training"]
        return mode if self.sampling is None else self.sampling

    @training.setter
    def training(self, mode: bool) -> None:
        self.__dict__["training"] = mode

    def __reduce_ex__(
        self, protocol: SupportsIndex
    ) -> tuple[Callable[..., SwitchedMode], tuple[type[nn.Module]], object]:
        return _new, (self.plain,), self.__getstate__()


_SWITCHED: dict[type[nn.Module], type[SwitchedMode]] = {}


def switched_class(plain: type[nn.Module]) -> type[SwitchedMode]:
    """The class of modules of one type whose own dropout follows the switch.

    >>> switched_class(nn.LSTM).__name__, switched_class(nn.LSTM) is switched_class(nn.LSTM)
    ('SwitchedLSTM', True)
    """
    if plain not in _SWITCHED:
        members = {"plain": plain, "__module__": __name__, "__doc__": plain.__doc__}
        made = type(f"Switched{plain.__name__}", (SwitchedMode, plain), members)
        _SWITCHED.setdefault(plain, made)
    return _SWITCHED[plain]


def _new(plain: type[nn.Module]) -> SwitchedMode:
    return object.__new__(switched_class(plain))


@singledispatch
def _rates_of(module: nn.Module) -> dict[str, float]:
    return {}


def register_functional_dropout(
    kind: type[_Kind], rates: Callable[[_Kind], dict[str, float]]
) -> None:
    """Say with which rates the code of a class draws dropout while `self.training`.

    `convert(net, mc_dropout())` then puts its modules under the switch, which answers for
    `self.training`, and `predict` draws their dropout. The mode must decide on nothing else. Rates
    that are empty say that the code has no dropout, whatever else it does in training mode.

    Args:
        kind: the class, by exact type, or an abstract class whose `__subclasshook__` knows several.
        rates: the rates of a module by name; `<child>.p` for the rate of a dropout module inside it
            that is not called itself.

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
    """The drop rates above zero with which the code of a registered class draws.

    >>> functional_dropout_rates(nn.LSTM(2, 2, 2, dropout=0.1))
    {'dropout': 0.1}
    >>> functional_dropout_rates(nn.Dropout(0.1))
    {}
    """
    load_integration(type(module))
    return {name: rate for name, rate in _rates_of(module).items() if rate > 0}


def _recurrent_rates(module: nn.RNNBase) -> dict[str, float]:
    return {"dropout": module.dropout if module.num_layers > 1 else 0.0}


register_functional_dropout(nn.MultiheadAttention, lambda module: {"dropout": module.dropout})
for _recurrent in (nn.RNN, nn.LSTM, nn.GRU):
    register_functional_dropout(_recurrent, _recurrent_rates)


def is_switchable(module: nn.Module) -> bool:
    """Whether the switch can answer for the mode of a module: its code draws, and does no more.

    Of a subclass that is not registered itself nobody knows what else it asks the mode for.
    """
    kinds = _rates_of.registry.keys() - {object}
    inherited = type(module) not in kinds and not kinds.isdisjoint(type(module).__mro__)
    return not inherited and bool(functional_dropout_rates(module))


@singledispatch
def drop_rate(module: nn.Module) -> float:
    """The rate at which a module drops features in training mode; zero where it does not.

    >>> drop_rate(nn.Dropout(0.5)), drop_rate(nn.LSTM(2, 2, 2, dropout=0.1)), drop_rate(nn.ReLU())
    (0.5, 0.1, 0.0)
    """
    return max(functional_dropout_rates(module).values(), default=0.0)


for _dropout in DROPOUT_TYPES:
    drop_rate.register(_dropout, lambda module: float(module.p))


def is_custom(module: nn.Module) -> bool:
    """Whether the code of a module may have dropout that nobody told of."""
    kind = type(module)
    registered = package_of(kind) in ("torch", "vardrop") or kind in _rates_of.registry
    return not registered and drop_rate(module) == 0 and not _rates_of(module)
