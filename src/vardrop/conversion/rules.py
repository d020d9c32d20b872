"""What conversion asks of a kind of recipe, and of a module that one has made noisy.

A kind answers for its recipes which modules change, which are skipped and why, and how a module is
changed. How a noisy module is described, and how it becomes plain again, goes by its own type.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Set
from functools import singledispatch
from typing import Any

import torch
from torch import Tensor, nn

from vardrop._core.errors import VardropError
from vardrop.layers import NOISY_TYPES, Ties
from vardrop.noisy import Noisy
from vardrop.recipes import BaseRecipe


class Kind(ABC):
    """A recipe of one kind, asked about the modules of one net."""

    rewrites: bool = False  # tensors that are there get other values

    def observe(self, net: nn.Module, example_input: Any) -> None:  # noqa: B027
        """Look at what the net does with an example, where the reasons depend on it."""

    @abstractmethod
    def reason(self, module: nn.Module) -> str | None:
        """Why a module stays as it is; empty where it changes, None where it is not concerned."""

    @abstractmethod
    def noisy_type(self, module: nn.Module) -> type[nn.Module] | None:
        """The class that a plain module of this type gets; None where there is none."""

    def becomes(self, module: nn.Module) -> str:
        """What a plan says of a module that changes."""
        noisy = self.noisy_type(module)
        name, room = getattr(noisy, "__name__", ""), getattr(noisy, "__module__", "")
        return f"vardrop.{name}" if room.startswith("vardrop.layers.") else f"{room}.{name}"

    def weights(self, module: nn.Module) -> list[Tensor]:
        """The weights of a module that become noisy, or are gated."""
        return own_weights(module)

    def tied_reasons(self, net: nn.Module, changes: Mapping[str, nn.Module]) -> Mapping[str, str]:
        """Which of the modules to change stay after all, and why: others have the same weight."""
        return {}

    def check(self, net: nn.Module, changes: Mapping[str, nn.Module]) -> None:
        """Refuse what is selected and cannot be changed."""
        for name, module in changes.items():
            for weight in own_weights(module):
                if not weight.is_meta and not bool(torch.isfinite(weight).all()):
                    raise VardropError(
                        f"Expected the weights of module '{name or '(net)'}' to be finite, but got "
                        "NaN or infinity. Load a sound checkpoint, or train with a lower learning "
                        "rate."
                    )

    @abstractmethod
    def change(self, module: nn.Module, noise: Ties) -> None:
        """Make a module noisy; `noise` gathers the tensors of weights that are tied."""

    def restore(self, module: nn.Module, noise: Ties) -> None:
        """Make a plain module what a file says that it was, whatever led there."""
        self.change(module, noise)


def own_weights(module: nn.Module) -> list[Tensor]:
    """The weights of a module that changes, those of its parts included."""
    found = []
    for part in module.modules():
        kind = NOISY_TYPES.get(type(part))
        names = ("weight",) if kind is None else kind.weights_of(part)
        found += [w for name in names if (w := getattr(part, name, None)) is not None]
    return found


def has_parameters(module: nn.Module) -> bool:
    """Whether a module has parameters of its own, beside those of its children."""
    return any(True for _ in module.parameters(recurse=False))


@singledispatch
def check_plain(module: nn.Module, shared: Set[int]) -> None:
    """Refuse to make a noisy module plain where that would lose something.

    `shared` holds the ids of parameters that several modules of the net have.
    """


@singledispatch
def make_plain(module: nn.Module) -> None:
    """Turn what a conversion has made into the torch module that it was; others stay."""


@singledispatch
def described(module: nn.Module, name: str) -> tuple[BaseRecipe, dict[str, Any]] | None:
    """The recipe of a noisy module and what else a file must say of it; None without a method."""
    raise VardropError(
        f"Expected layers, gates, heads and dropout of vardrop in `net`, but got "
        f"{type(module).__name__} at '{name}'. Save `net.state_dict()` yourself."
    )


def plain_type(
    module: Noisy, types: Mapping[type[nn.Module], type[nn.Module]]
) -> type[nn.Module] | None:
    """The torch class of a noisy module, from a table of plain and noisy ones, by exact type."""
    return {noisy: plain for plain, noisy in types.items()}.get(type(module))


def rename(module: nn.Module, plain: type[nn.Module]) -> None:
    """Give a module that has lost its noise its torch class back."""
    module.__dict__.pop("sampling", None)
    module.__class__ = plain
