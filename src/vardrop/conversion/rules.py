"""What conversion asks of a kind of recipe.

It answers for its recipes which modules change, which are skipped and why, and how a module is
changed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vardrop._core.errors import VardropError
from vardrop.layers import NOISY_TYPES, Ties


class ConversionRule(ABC):
    """A recipe of one kind, asked about the modules of one net."""

    rewrites: bool = False  # tensors that are there get other values

    def observe(self, net: nn.Module, example_input: Any) -> None:  # noqa: B027
        """Look at what the net does with an example, where the reasons depend on it."""

    @abstractmethod
    def reason(self, module: nn.Module) -> str | None:
        """Why a module stays as it is; empty where it changes, None where it is not concerned."""

    def noisy_type(self, module: nn.Module) -> type[nn.Module] | None:
        """The class that a plain module of this type gets; None where there is none."""
        return NOISY_TYPES.get(type(module))

    def becomes(self, module: nn.Module) -> str:
        """What a plan says of a module that changes."""
        noisy = self.noisy_type(module)
        name, room = getattr(noisy, "__name__", ""), getattr(noisy, "__module__", "")
        return f"vardrop.{name}" if room.startswith("vardrop.layers.") else f"{room}.{name}"

    def weights(self, module: nn.Module) -> list[Tensor]:
        """The weights of a module that become noisy, or are gated."""
        return own_weights(module)

    def tie_reasons(self, net: nn.Module, changes: Mapping[str, nn.Module]) -> Mapping[str, str]:
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
    weights = []
    for part in module.modules():
        kind = NOISY_TYPES.get(type(part))
        names = ("weight",) if kind is None else kind.weights_of(part)
        weights += [w for name in names if (w := getattr(part, name, None)) is not None]
    return weights


def has_parameters(module: nn.Module) -> bool:
    """Whether a module has parameters of its own, beside those of its children."""
    return any(True for _ in module.parameters(recurse=False))
