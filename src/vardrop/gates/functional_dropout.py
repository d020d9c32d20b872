"""Dropout inside the code of a module, which asks `self.training` whether to draw.

A module's own code is read as bytecode, without running it: dropout modules of which it takes only
the rate `p`, and rates of its own, in functions that ask for the mode. torch's recurrent layers and
attention hand on the mode, too. Where the mode decides on noise and on nothing else, the switch can
answer in its place: `switched` makes the class that does so.
"""

from __future__ import annotations

import dis
from collections.abc import Iterable, Iterator
from functools import singledispatch
from inspect import unwrap
from types import CodeType, FunctionType
from typing import Any, ClassVar

from torch import nn

from vardrop.gates.switchable_dropout import DROPOUT_TYPES
from vardrop.noisy import Noisy

# Packages whose modules, by convention, ask for the mode to decide on noise alone.
_PACKAGES = ("transformers", "transformers_modules")
_TORCH = (nn.MultiheadAttention, nn.RNN, nn.LSTM, nn.GRU)
_ATTRIBUTES, _LOCAL = ("LOAD_ATTR", "LOAD_METHOD"), ("LOAD_FAST", "LOAD_DEREF")
_Uses = tuple[tuple[str, str], ...]  # attributes of self, each with the attribute asked of it


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

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _new, (self.plain,), self.__getstate__()


_SWITCHED: dict[type[nn.Module], type[SwitchedMode]] = {}


def switched(plain: type[nn.Module]) -> type[SwitchedMode]:
    """The class of modules of one type whose own dropout follows the switch.

    >>> switched(nn.LSTM).__name__, switched(nn.LSTM) is switched(nn.LSTM)
    ('SwitchedLSTM', True)
    """
    if plain not in _SWITCHED:
        members = {"plain": plain, "__module__": __name__, "__doc__": plain.__doc__}
        made = type(f"Switched{plain.__name__}", (SwitchedMode, plain), members)
        _SWITCHED.setdefault(plain, made)
    return _SWITCHED[plain]


def _new(plain: type[nn.Module]) -> SwitchedMode:
    return object.__new__(switched(plain))


@singledispatch
def own_rates(module: nn.Module) -> dict[str, float]:
    """The drop rates above zero with which a module's own code draws, where a switch can reach it.

    >>> own_rates(nn.LSTM(2, 2, 2, dropout=0.1)), own_rates(nn.Dropout(0.1))
    ({'dropout': 0.1}, {})
    """
    if _package(type(module)) in _PACKAGES or isinstance(module, SwitchedMode):
        return rates_beside_mode(module)
    return {}


@own_rates.register(nn.MultiheadAttention)
def _(module: Any) -> dict[str, float]:
    return {"dropout": module.dropout} if module.dropout else {}


@own_rates.register(nn.RNNBase)
def _(module: Any) -> dict[str, float]:
    between = module.dropout and module.num_layers > 1
    return {"dropout": module.dropout} if between else {}


def switchable(module: nn.Module) -> bool:
    """Whether the switch can answer for the mode of a module: its code draws, and does no more."""
    known = type(module) in _TORCH or _package(type(module)) in _PACKAGES
    return known and bool(own_rates(module))


def _package(cls: type) -> str:
    return cls.__module__.partition(".")[0]


@singledispatch
def drop_rate(module: nn.Module) -> float:
    """The rate at which a module drops features in training mode; zero where it does not.

    >>> drop_rate(nn.Dropout(0.5)), drop_rate(nn.LSTM(2, 2, 2, dropout=0.1)), drop_rate(nn.ReLU())
    (0.5, 0.1, 0.0)
    """
    return max(own_rates(module).values(), default=0.0)


def _rate_of_module(module: Any) -> float:
    return float(module.p)


for _dropout in DROPOUT_TYPES:
    drop_rate.register(_dropout, _rate_of_module)


def rates_beside_mode(module: nn.Module) -> dict[str, float]:
    """The rates above zero in functions that ask for the mode, by the path to them.

    A rate is a float under a name with `drop` in it, of the module or of its `config`, or the `p`
    of a dropout module.
    """
    cls, found = type(module), {}
    if cls not in _BESIDE_MODE:
        asking = (uses for uses in _uses(cls) if "training" in dict(uses))
        every = {use for uses in asking for use in uses}
        named = (use for use in every if "drop" in "".join(use) or use[1] == "p")
        _BESIDE_MODE[cls] = tuple(sorted(named))
    for name, asked in _BESIDE_MODE[cls]:
        rate = _rate(module, name, asked)
        if rate and 0 < rate <= 1:
            found[f"{name}.{asked}" if asked else name] = rate
    return found


_BESIDE_MODE: dict[type[nn.Module], _Uses] = {}


def _rate(module: nn.Module, name: str, asked: str) -> float | None:
    own: Any = vars(module).get(name)
    if asked == "p" and type(module._modules.get(name)) in _DROPOUTS:
        own = module._modules[name]
    if asked:
        own = getattr(own, asked, None) if asked == "p" or name == "config" else None
    return own if isinstance(own, float) else None


_DROPOUTS = {*DROPOUT_TYPES, *DROPOUT_TYPES.values()}


def handed_on(modules: Iterable[nn.Module]) -> dict[int, nn.Module]:
    """The owners, by the ids of dropout modules of which they take the rate without a call."""
    taken: dict[int, nn.Module] = {}
    called: set[int] = set()
    for owner in modules:
        for name, child in owner._modules.items():
            if type(child) not in _DROPOUTS:
                continue
            if _takes_rate(type(owner), name):
                taken[id(child)] = owner
            else:
                called.add(id(child))
    return {key: owner for key, owner in taken.items() if key not in called}


def _takes_rate(owner: type[nn.Module], name: str) -> bool:
    """Whether code reads the rate of `name` beside the mode, or does nothing else with it."""
    every = []
    for uses in _uses(owner):
        here = [asked for attribute, asked in uses if attribute == name]
        # A function that asks for the mode too is what runs; a call may stand in a rare branch.
        if "p" in here and "training" in dict(uses):
            return True
        every += here
    return bool(every) and all(asked == "p" for asked in every)


_USES: dict[type[nn.Module], tuple[_Uses, ...]] = {}


def _uses(cls: type[nn.Module]) -> tuple[_Uses, ...]:
    """The attributes of self that each function of a class loads, '' where nothing is asked."""
    if cls not in _USES:
        _USES[cls] = tuple(tuple(_attributes(f)) for f in own_functions(cls))
    return _USES[cls]


def _attributes(function: FunctionType) -> Iterator[tuple[str, str]]:
    code = function.__code__
    return _loaded(code, code.co_varnames[0]) if code.co_argcount else iter(())


def _loaded(code: CodeType, me: str) -> Iterator[tuple[str, str]]:
    steps = [s for s in dis.get_instructions(code) if s.opname not in ("CACHE", "PRECALL")]
    for before, step, after in zip(steps, steps[1:], steps[2:], strict=False):
        # One instruction may load two local names, self last.
        holder = before.argval[-1:] if isinstance(before.argval, tuple) else (before.argval,)
        if step.opname in _ATTRIBUTES and before.opname.startswith(_LOCAL) and holder == (me,):
            asked = after.opname in (*_ATTRIBUTES, "STORE_ATTR")
            yield str(step.argval), str(after.argval) if asked else ""
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _loaded(inner, me)


def own_functions(cls: type[nn.Module]) -> Iterator[FunctionType]:
    """The functions of a class and of its bases that neither torch nor this library wrote."""
    for owner in cls.__mro__:
        if owner is not object and _package(owner) not in ("torch", "vardrop"):
            members = (unwrap(m) for m in vars(owner).values() if callable(m))  # past decorators
            yield from (m for m in members if isinstance(m, FunctionType))
