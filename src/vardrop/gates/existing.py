"""The dropout modules of torch, with noise that follows the sampling switch.

Each is the torch module of its name: rate, `inplace` and state stay, and only the question "is
there noise now?" is asked of the switch instead of `training`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn import functional

from vardrop.noisy import Noisy


class SwitchableDropout(Noisy):
    """A torch dropout module under the switch of `vardrop.sampling`."""

    drop: ClassVar[Callable[..., Tensor]]
    p: float
    inplace: bool

    def forward(self, input: Tensor) -> Tensor:
        """The input with noise while sampling, else the input itself."""
        return type(self).drop(input, self.p, self.is_sampling, self.inplace)


class Dropout(SwitchableDropout, nn.Dropout):
    """`nn.Dropout` under the sampling switch.

    >>> import torch, vardrop as vd
    >>> drop = vd.gates.Dropout(0.5).eval()
    >>> with vd.sampling(drop):
    ...     bool((drop(torch.ones(64)) == 1).any())
    False
    """

    drop: ClassVar[Any] = staticmethod(functional.dropout)


class Dropout1d(SwitchableDropout, nn.Dropout1d):
    """`nn.Dropout1d` under the sampling switch."""

    drop: ClassVar[Any] = staticmethod(functional.dropout1d)


class Dropout2d(SwitchableDropout, nn.Dropout2d):
    """`nn.Dropout2d` under the sampling switch."""

    drop: ClassVar[Any] = staticmethod(functional.dropout2d)


class Dropout3d(SwitchableDropout, nn.Dropout3d):
    """`nn.Dropout3d` under the sampling switch."""

    drop: ClassVar[Any] = staticmethod(functional.dropout3d)


class AlphaDropout(SwitchableDropout, nn.AlphaDropout):
    """`nn.AlphaDropout` under the sampling switch."""

    drop: ClassVar[Any] = staticmethod(functional.alpha_dropout)


class FeatureAlphaDropout(SwitchableDropout, nn.FeatureAlphaDropout):
    """`nn.FeatureAlphaDropout` under the sampling switch."""

    drop: ClassVar[Any] = staticmethod(functional.feature_alpha_dropout)


# The torch dropout, by exact type, and the switchable one that takes its place.
DROPOUT_TYPES: dict[type[nn.Module], type[SwitchableDropout]] = {
    nn.Dropout: Dropout,
    nn.Dropout1d: Dropout1d,
    nn.Dropout2d: Dropout2d,
    nn.Dropout3d: Dropout3d,
    nn.AlphaDropout: AlphaDropout,
    nn.FeatureAlphaDropout: FeatureAlphaDropout,
}
