"""Values: frozen dataclasses that describe a method, compare, hash, print and travel as JSON.

Every posterior, prior, estimator, gate and recipe is a `Value`. The JSON form is tagged with the
type's name and version, and only types that are already imported can be read back.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from vardrop.errors import VardropError

_TYPES: dict[str, type[Value]] = {}


@dataclasses.dataclass(frozen=True)
class Value:
    """Base of all values; a subclass is known to `from_json` by its class name."""

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


def to_json(value: Value) -> dict[str, Any]:
    """Describe a value by plain dictionaries, numbers and strings.

    >>> from vardrop import AdditiveGaussian, to_json
    >>> to_json(AdditiveGaussian(log_sigma2=-8.0))
    {'type': 'AdditiveGaussian', 'version': 1, 'log_sigma2': -8.0}
    """
    fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    return {
        "type": type(value).__name__,
        "version": value.version,
        **{k: to_json(v) if isinstance(v, Value) else v for k, v in fields.items()},
    }


def from_json(data: dict[str, Any]) -> Value:
    """Rebuild the value that `to_json` described.

    >>> from vardrop import from_json, sparse_vd, to_json
    >>> from_json(to_json(sparse_vd())) == sparse_vd()
    True
    """
    fields = dict(data)
    name, version = fields.pop("type", None), fields.pop("version", None)
    if name not in _TYPES:
        raise VardropError(
            f"Expected `type` to be one of {sorted(_TYPES)}, but got {name!r}. "
            "Import the package that defines it first."
        )
    cls = _TYPES[name]
    if version != cls.version:
        raise VardropError(
            f"Expected `version` of {name} to be {cls.version}, but got {version!r}. "
            "The description was written by another release of the library."
        )
    known = {f.name for f in dataclasses.fields(cls)}
    if unknown := sorted(set(fields) - known):
        raise VardropError(
            f"Expected the fields of {name} to be among {sorted(known)}, but got {unknown}."
        )
    return cls(**{k: from_json(v) if isinstance(v, dict) else v for k, v in fields.items()})
