"""Modules of other libraries, which an integration knows: it is loaded where a net has one."""

from __future__ import annotations

from importlib import import_module

_INTEGRATIONS = dict.fromkeys(
    ("transformers", "transformers_modules"), "vardrop.integrations.huggingface"
)


def load_integration(kind: type) -> None:
    """Load what knows the package of a class, where there is such an integration."""
    integration = _INTEGRATIONS.get(package(kind))
    if integration is not None:
        import_module(integration)


def package(kind: type) -> str:
    """The package that a class comes from.

    >>> package(dict), package(dict[str, int])
    ('builtins', 'builtins')
    """
    return kind.__module__.partition(".")[0]
