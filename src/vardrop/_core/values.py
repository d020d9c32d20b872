"""Values: frozen dataclasses that describe a method, compare, hash, print and travel as JSON.

Every posterior, prior, estimator, gate and recipe is a `Value`. Its fields are checked against
their declared types when it is made. The JSON form is tagged with the type's name and version, and
only types that are already imported can be read back.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from abc import ABC
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints
from weakref import WeakKeyDictionary

import torch

from vardrop._core.checks import check_type, shown
from vardrop._core.errors import VardropError

_TYPES: dict[str, type[Value]] = {}
_KINDS: WeakKeyDictionary[type[Value], dict[str, Any]] = WeakKeyDictionary()
_LARGEST = 1.8446742974197924e19  # whose square single precision, that of noise, can hold
_WORDS: dict[Any, str] = {
    float: "a finite number",
    int: "an integer",
    bool: "True or False",
    str: "a string",
    NoneType: "None",
}


@dataclasses.dataclass(frozen=True)
class Value:
    """Base of all values; a subclass is known to `from_json` by its class name.

    A subclass with checks of its own in `__post_init__` calls `super().__post_init__()` first, and
    can rely on the types of its fields from there on.
    """

    version: ClassVar[int] = 1

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        known = _TYPES.get(cls.__name__)
        if known is not None and known.__module__ != cls.__module__:
            raise VardropError(
                f"Expected value types to have distinct names, but got `{cls.__name__}` in both "
                f"{known.__module__} and {cls.__module__}. Rename one of them."
            )
        _TYPES[cls.__name__] = cls

    def __post_init__(self) -> None:
        if torch.compiler.is_compiling():
            return  # a compiler cannot look up declarations, and traces what has run before
        for name, kind in _kinds(type(self)).items():
            value = getattr(self, name)
            _check_field(name, value, kind)
            # Numbers of other libraries too become Python's own, which is all that JSON knows.
            if float in (kind, *get_args(kind)) and isinstance(value, Real):
                object.__setattr__(self, name, float(value))
            elif kind is int:
                object.__setattr__(self, name, int(value))


def _kinds(cls: type[Value]) -> dict[str, Any]:
    """The declared type of every field; of none, where a name in a declaration is not defined."""
    if cls not in _KINDS:
        try:
            hints = get_type_hints(cls)
        except NameError:
            hints = {}
        _KINDS[cls] = {f.name: hints[f.name] for f in dataclasses.fields(cls) if f.name in hints}
    return _KINDS[cls]


def _check_field(name: str, value: Any, kind: Any) -> None:
    if not _fits(value, kind):
        large = isinstance(value, int | float) and _LARGEST < abs(value) < math.inf
        why = " Its square is too large for single precision." if large else ""
        raise VardropError(f"Expected `{name}` to be {_words(kind)}, but got {shown(value)}.{why}")


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value is of a declared type; True for declarations that cannot be checked."""
    if get_origin(kind) in (Union, UnionType):
        return any(_fits(value, k) for k in get_args(kind))
    if get_origin(kind) is Literal:
        return any(type(value) is type(word) and value == word for word in get_args(kind))
    if kind is float:
        # A comparison, as an integer may be too large for a float.
        real = isinstance(value, Real) and not isinstance(value, bool)
        return real and -_LARGEST <= value <= _LARGEST and not math.isnan(value)
    if kind is int:
        return isinstance(value, Integral) and not isinstance(value, bool)
    return isinstance(value, kind) if isinstance(kind, type) else True


def _words(kind: Any) -> str:
    if get_origin(kind) in (Union, UnionType):
        words = [_words(k) for k in get_args(kind)]
    elif get_origin(kind) is Literal:
        words = [repr(word) for word in get_args(kind)]
    else:
        return _WORDS.get(kind) or f"a {getattr(kind, '__name__', kind)}"
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def to_json(value: Value) -> dict[str, Any]:
    """Describe a value by plain dictionaries, numbers and strings.

    >>> from vardrop import LogUniform, to_json
    >>> to_json(LogUniform())
    {'type': 'LogUniform', 'version': 1, 'form': 'exact'}
    """
    check_type("value", value, Value, "a value such as vardrop.sparse_vd()")
    fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    return {
        "type": type(value).__name__,
        "version": value.version,
        **{k: to_json(v) if isinstance(v, Value) else v for k, v in fields.items()},
    }


def from_json(data: dict[str, Any]) -> Value:
    """Rebuild the value that `to_json` described; anything else is refused, with what is wrong.

    >>> from vardrop import from_json, sparse_vd, to_json
    >>> from_json(to_json(sparse_vd())) == sparse_vd()
    True
    """
    try:
        return _built(data)
    except RecursionError:
        raise VardropError(
            "Expected a description nested a few levels deep, but got one that is too deep. "
            "It was not written by vardrop.to_json."
        ) from None


def _built(data: Any) -> Value:
    check_type("data", data, dict, "a dictionary that vardrop.to_json made")
    fields = dict(data)
    cls, version = _type_named(fields.pop("type", None)), fields.pop("version", None)
    _check_version(cls, version)
    known = {f.name for f in dataclasses.fields(cls)}
    if unknown := [k for k in fields if k not in known]:
        raise VardropError(
            f"Expected the fields of {cls.__name__} to be among {sorted(known)}, "
            f"but got {shown(unknown)}."
        )
    values = {k: _built(v) if isinstance(v, dict) else v for k, v in fields.items()}
    if absent := sorted(known - set(values)):
        raise VardropError(
            f"Expected the description of {cls.__name__} to have all its fields, but {absent} are "
            "missing. It is damaged, or was not written by vardrop.to_json."
        )
    for name, kind in _kinds(cls).items():
        if name in values:
            _check_field(name, values[name], kind)
    return cls(**values)


def _type_named(name: Any) -> type[Value]:
    cls = _TYPES.get(name) if isinstance(name, str) else None
    if cls is None or _is_abstract(cls):
        known = sorted(n for n, c in _TYPES.items() if not _is_abstract(c))
        raise VardropError(
            f"Expected `type` to be one of {known}, but got {shown(name)}. "
            "Import the package that defines it first (on the command line by --import)."
        )
    return cls


def _is_abstract(cls: type[Value]) -> bool:
    return ABC in cls.__bases__ or inspect.isabstract(cls)


def _check_version(cls: type[Value], version: Any) -> None:
    if type(version) is not int or version != cls.version:
        raise VardropError(
            f"Expected `version` of {cls.__name__} to be {cls.version}, but got {shown(version)}. "
            "The description was written by another release of the library."
        )
