"""Values: frozen dataclasses that describe a method. They compare, hash, print and convert to JSON.

Every posterior, prior, estimator, gate and recipe is a `Value`. Its fields are checked against
their declared types when it is made. The JSON form contains the name and the version of the type,
and only types that are already imported can be read back.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from abc import ABC
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

import torch

from vardrop._core.checks import check_number, check_type, describe_value
from vardrop._core.errors import VardropError

# A value that JSON can store.
Json: TypeAlias = "Mapping[str, Json] | Sequence[Json] | str | float | None"
_TYPES: dict[str, type[Value]] = {}
_KINDS: dict[type, dict[str, Any]] = {}
_LARGEST = 1.8446742974197924e19  # its square is the largest number in single precision
_WORDS: dict[Any, str] = {
    float: "a finite number",
    int: "an integer",
    bool: "True or False",
    str: "a string",
    NoneType: "None",
}


@dataclasses.dataclass(frozen=True)
class Value:
    """Base of all values. `from_json` finds a subclass by its class name.

    A subclass with more checks in `__post_init__` calls `super().__post_init__()` first, and can
    rely on the types of its fields after that.
    """

    version: ClassVar[int] = 1
    positive: ClassVar[tuple[str, ...]] = ()  # the fields that must be above 0, or None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        other = _TYPES.setdefault(cls.__name__, cls)
        if other.__module__ != cls.__module__:
            raise VardropError(
                f"Expected value types to have distinct names, but got `{cls.__name__}` in both "
                f"{other.__module__} and {cls.__module__}. Rename one of them."
            )
        _TYPES[cls.__name__] = cls

    def __post_init__(self) -> None:
        if torch.compiler.is_compiling():
            return  # a compiler cannot look up declarations, and the call before compilation did
        for name, kind in _kinds(type(self)).items():
            value = getattr(self, name)
            _check_field(name, value, kind)
            # Numbers of other libraries become Python numbers, which JSON can store.
            if float in (kind, *get_args(kind)) and isinstance(value, Real):
                object.__setattr__(self, name, float(value))
            elif kind is int:
                object.__setattr__(self, name, int(value))
        for name in self.positive:
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), above=0)


def _kinds(cls: type[Value]) -> dict[str, Any]:
    """The declared type of every field."""
    if cls not in _KINDS:
        hints = get_type_hints(cls)
        _KINDS[cls] = {f.name: hints[f.name] for f in dataclasses.fields(cls)}
    return _KINDS[cls]


def _check_field(name: str, value: object, kind: Any) -> None:
    if not _fits(value, kind):
        large = isinstance(value, int | float) and _LARGEST < abs(value) < math.inf
        why = " Its square is too large for single precision." if large else ""
        raise VardropError(
            f"Expected `{name}` to be {_words(kind)}, but got {describe_value(value)}.{why}"
        )


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value has a declared type. True for declarations that cannot be checked."""
    if get_origin(kind) in (Union, UnionType):
        return any(_fits(value, k) for k in get_args(kind))
    if get_origin(kind) is Literal:
        return any(type(value) is type(word) and value == word for word in get_args(kind))
    if kind is float:
        # Compared without a conversion, because an integer may be too large for a float.
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


def to_json(value: Value) -> dict[str, Json]:
    """Describe a value with plain dictionaries, numbers and strings.

    Args:
        value: a posterior, prior, estimator, gate or recipe.

    Returns:
        The name of its type, the version of the type, and its fields.

    >>> from vardrop import LogUniform, to_json
    >>> to_json(LogUniform())
    {'type': 'LogUniform', 'version': 1, 'form': 'exact'}
    """
    check_type("value", value, Value, "a value such as vardrop.sparse_vd()")
    fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    parts = {k: to_json(v) if isinstance(v, Value) else v for k, v in fields.items()}
    return {"type": type(value).__name__, "version": value.version, **parts}


def from_json(data: dict[str, Any]) -> Value:
    """Rebuild the value that `to_json` described.

    Args:
        data: the description. Anything that `to_json` would not return is an error.

    Returns:
        The value.

    >>> from vardrop import from_json, sparse_vd, to_json
    >>> from_json(to_json(sparse_vd())) == sparse_vd()
    True
    """
    check_type("data", data, dict, "a dictionary that vardrop.to_json made")
    fields = dict(data)
    kind, version = fields.pop("type", None), fields.pop("version", None)
    concrete = {
        name: cls
        for name, cls in _TYPES.items()
        if ABC not in cls.__bases__ and not inspect.isabstract(cls)
    }
    cls = concrete.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise VardropError(
            f"Expected `type` to be one of {sorted(concrete)}, but got {describe_value(kind)}. "
            "Import the package that defines it first (--import on the command line)."
        )
    if type(version) is not int or version != cls.version:
        raise VardropError(
            f"Expected `version` of {cls.__name__} to be {cls.version}, but got "
            f"{describe_value(version)}. Another release of the library wrote the description."
        )
    names = {f.name for f in dataclasses.fields(cls)}
    if unknown := [name for name in fields if name not in names]:
        raise VardropError(
            f"Expected the fields of {cls.__name__} to be among {sorted(names)}, "
            f"but got {describe_value(unknown)}."
        )
    if absent := sorted(names - set(fields)):
        raise VardropError(
            f"Expected the description of {cls.__name__} to have all its fields, but {absent} are "
            "missing. It is damaged, or was not written by vardrop.to_json."
        )
    try:
        fields = {k: from_json(v) if isinstance(v, dict) else v for k, v in fields.items()}
    except RecursionError:
        raise VardropError(
            "Expected a description nested a few levels deep, but got one that is too deep. "
            "It was not written by vardrop.to_json."
        ) from None
    for name, declared in _kinds(cls).items():  # a subclass may leave out the checks of `Value`
        _check_field(name, fields[name], declared)
    return cls(**fields)
