"""All or nothing: modules that a block has changed are given back as they were, if it raises."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class _Before:
    """The class of a module, its attributes, and what its own registries held."""

    module: nn.Module
    kind: type[nn.Module]
    attributes: dict[str, Any]
    registries: dict[str, dict[str, Any] | set[str]]

    @classmethod
    def of(cls, module: nn.Module) -> _Before:
        held = {k: v.copy() for k, v in vars(module).items() if isinstance(v, dict | set)}
        return cls(module, type(module), dict(vars(module)), held)

    def restore(self) -> None:
        self.module.__class__ = self.kind
        vars(self.module).clear()
        vars(self.module).update(self.attributes)
        for name, held in self.registries.items():
            registry = self.attributes[name]  # the same object, which others may refer to
            registry.clear()
            registry.update(held)


@contextmanager
def all_or_nothing(modules: Iterable[nn.Module], values: bool = False) -> Iterator[None]:
    """Restore classes, attributes, parameters and children of modules where the block raises.

    `values` keeps a copy of the tensors too, for a block that writes into them.

    >>> layer = nn.Linear(2, 1)
    >>> try:
    ...     with all_or_nothing([layer]):
    ...         del layer.weight
    ...         raise KeyboardInterrupt
    ... except KeyboardInterrupt:
    ...     layer.weight.shape
    torch.Size([1, 2])
    """
    whole = {id(m): m for module in modules for m in module.modules()}.values()
    before = [_Before.of(m) for m in whole]
    own = {id(t): t for m in whole for t in (*m.parameters(False), *m.buffers(False))}.values()
    tensors = [(t, t.requires_grad, t.detach().clone() if values else None) for t in own]
    try:
        yield
    except BaseException:
        for module in before:
            module.restore()
        _write_back(tensors)
        raise


@torch.no_grad()
def _write_back(tensors: list[tuple[Tensor, bool, Tensor | None]]) -> None:
    for tensor, learned, value in tensors:
        if tensor.requires_grad != learned:
            tensor.requires_grad_(learned)
        if value is not None:
            tensor.copy_(value)
