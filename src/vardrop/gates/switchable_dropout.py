"""The dropout modules of torch, with noise that follows the sampling switch.

Each is a subclass of the torch module of its name, with the same rate, `inplace` and state. The
sampling switch decides whether it draws noise, instead of `training`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional

from vardrop.functional import generator, noise_is_given, uniform
from vardrop.noisy import Noisy

_SELU_FLOOR = -1.7580993408473766  # AlphaDropout replaces a dropped value by it


class SwitchableDropout(Noisy):
    """A torch dropout module that follows the switch of `vardrop.sampling`.

    Args:
        *args: the arguments of the torch module.
        **kwargs: its keyword arguments.
    """

    drop: ClassVar[Callable[..., Tensor]]
    spatial: ClassVar[int | None] = 0  # trailing axes that share one draw. None: all but two
    p: float
    inplace: bool

    def forward(self, input: Tensor) -> Tensor:
        """The input with noise while sampling, else the input itself."""
        global_noise = generator(input.device) is None and not noise_is_given()
        if not self.is_sampling or global_noise:
            return type(self).drop(input, self.p, self.is_sampling, self.inplace)
        # The functions of torch draw from the global generator only.
        mask = uniform(self._noise_shape(input), input) >= self.p
        return self._apply_mask(input, mask.to(input.dtype))

    def _noise_shape(self, x: Tensor) -> tuple[int, ...]:
        spatial = x.dim() - 2 if self.spatial is None else self.spatial
        return (*x.shape[: x.dim() - spatial], *(1,) * spatial)

    def _apply_mask(self, x: Tensor, mask: Tensor) -> Tensor:
        return x * (mask / (1 - self.p) if self.p < 1 else mask)


class _SwitchableAlphaDropout(SwitchableDropout):
    """Keeps mean 0 and variance 1 of the activations of a SELU."""

    def _apply_mask(self, x: Tensor, mask: Tensor) -> Tensor:
        if self.p == 1:
            return x * mask
        scale = ((1 - self.p) * (1 + self.p * _SELU_FLOOR**2)) ** -0.5
        shift = -scale * _SELU_FLOOR * self.p
        return scale * (x * mask + _SELU_FLOOR * (1 - mask)) + shift


class Dropout(SwitchableDropout, nn.Dropout):
    """`nn.Dropout` with the sampling switch.

    Args:
        p: the drop rate.
        inplace: whether to write into the input.

    >>> import torch, vardrop as vd
    >>> drop = vd.gates.Dropout(0.5).eval()
    >>> with vd.sampling(drop):
    ...     bool((drop(torch.ones(64)) == 1).any())
    False
    """

    drop: ClassVar[Callable[..., Tensor]] = staticmethod(functional.dropout)


class Dropout1d(SwitchableDropout, nn.Dropout1d):
    """`nn.Dropout1d` with the sampling switch.

    Args:
        p: the drop rate.
        inplace: whether to write into the input.
    """

    drop: ClassVar[Callable[..., Tensor]] = staticmethod(functional.dropout1d)
    spatial: ClassVar[int | None] = 1


class Dropout2d(SwitchableDropout, nn.Dropout2d):
    """`nn.Dropout2d` with the sampling switch.

    Args:
        p: the drop rate.
        inplace: whether to write into the input.
    """

    drop: ClassVar[Callable[..., Tensor]] = staticmethod(functional.dropout2d)
    spatial: ClassVar[int | None] = 2


class Dropout3d(SwitchableDropout, nn.Dropout3d):
    """`nn.Dropout3d` with the sampling switch.

    Args:
        p: the drop rate.
        inplace: whether to write into the input.
    """

    drop: ClassVar[Callable[..., Tensor]] = staticmethod(functional.dropout3d)
    spatial: ClassVar[int | None] = 3


class AlphaDropout(_SwitchableAlphaDropout, nn.AlphaDropout):
    """`nn.AlphaDropout` with the sampling switch.

    Args:
        p: the drop rate.
        inplace: whether to write into the input.
    """

    drop: ClassVar[Callable[..., Tensor]] = staticmethod(functional.alpha_dropout)


class FeatureAlphaDropout(_SwitchableAlphaDropout, nn.FeatureAlphaDropout):
    """`nn.FeatureAlphaDropout` with the sampling switch.

    Args:
        p: the drop rate.
        inplace: whether to write into the input.
    """

    drop: ClassVar[Callable[..., Tensor]] = staticmethod(functional.feature_alpha_dropout)
    spatial: ClassVar[int | None] = None


# The switchable dropout for each torch dropout, by exact type.
DROPOUT_TYPES: dict[type[nn.Module], type[SwitchableDropout]] = {
    nn.Dropout: Dropout,
    nn.Dropout1d: Dropout1d,
    nn.Dropout2d: Dropout2d,
    nn.Dropout3d: Dropout3d,
    nn.AlphaDropout: AlphaDropout,
    nn.FeatureAlphaDropout: FeatureAlphaDropout,
}
