"""The interface of a conversion rule.

There is one rule per kind of recipe. It decides which modules change, gives the reason for each
skipped module, and changes a module.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vardrop._core.errors import VardropError
from vardrop.layers import NOISY_TYPES, Ties

# The weights of the base under an adapter, for example.
FROZEN = "its weights are frozen; name it with `include` if it is meant"


class Scope(NamedTuple):
    """The modules that a rule decides about."""

    net: nn.Module  # which contains them
    modules: Sequence[nn.Module]
    everywhere: bool = False  # whether `include` is missing
    example_input: Any = None


class ConversionRule(ABC):
    """The conversion of the modules of one model by one recipe."""

    rewrites: bool = False  # whether existing tensors get other values

    @abstractmethod
    def reason(self, module: nn.Module) -> str | None:
        """Why a module is skipped: empty if it changes, None if the plan does not list it."""

    def noisy_type(self, module: nn.Module) -> type[nn.Module] | None:
        """The noisy class of a plain module, or None."""
        return NOISY_TYPES.get(type(module))

    def becomes(self, module: nn.Module) -> str:
        """The text in a plan for a module that changes."""
        noisy = self.noisy_type(module)
        name, path = getattr(noisy, "__name__", ""), getattr(noisy, "__module__", "")
        return f"vardrop.{name}" if path.startswith("vardrop.layers.") else f"{path}.{name}"

    def weights(self, module: nn.Module) -> list[Tensor]:
        """The weights of a module and of its children that become noisy or gated."""
        weights = []
        for part in module.modules():
            noisy = NOISY_TYPES.get(type(part))
            names = ("weight",) if noisy is None else noisy.weights_of(part)
            weights += [w for name in names if (w := getattr(part, name, None)) is not None]
        return weights

    def tie_reasons(self, net: nn.Module, changes: Mapping[str, nn.Module]) -> Mapping[str, str]:
        """Reasons to skip some of the selected modules because their weights are tied."""
        return {}

    def check(self, net: nn.Module, changes: Mapping[str, nn.Module]) -> None:
        """Raise if a selected module cannot be changed."""
        for name, module in changes.items():
            for weight in self.weights(module):
                if not weight.is_meta and not bool(torch.isfinite(weight).all()):
                    raise VardropError(
                        f"Expected the weights of module '{name or '(net)'}' to be finite, but got "
                        "NaN or infinity. Load a sound checkpoint, or train with a lower learning "
                        "rate."
                    )

    @abstractmethod
    def change(self, module: nn.Module, noise: Ties) -> None:
        """Make a module noisy, also a plain module that a file describes as noisy.

        `noise` collects the noise tensors by weight, for tied weights.
        """


def has_parameters(module: nn.Module) -> bool:
    """Whether a module has parameters, apart from its children."""
    return any(True for _ in module.parameters(recurse=False))


def join_names(names: Sequence[str], most: int = 8) -> str:
    """Names for a sentence: all of a few, or the first of many.

    >>> join_names(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")
