"""Dropout with noise that follows the sampling switch, instead of the mode of the module.

`SwitchedMode` lets the code of any module read the switch as its `training`. The dropout modules of
torch have subclasses of their names, with the same rate, `inplace` and state, which also draw from
the generator of a call. Subclasses of other types are made when they are needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, SupportsIndex

from torch import Tensor, nn

from vardrop.functional import generator, noise_is_given, uniform
from vardrop.noisy import Noisy

_SELU_FLOOR = -1.7580993408473766  # AlphaDropout replaces a dropped value by it


class SwitchedMode(Noisy):
    """A module whose `training`, as its code reads it, follows the sampling switch.

    The mode that `train` and `eval` set is stored unchanged, and inner modules keep their mode.

    Args:
        *args: the arguments of the plain class, the last base of a subclass.
        **kwargs: its keyword arguments.
    """

    encloses: ClassVar[bool] = False
    plain: ClassVar[type[nn.Module]]

    def __init_subclass__(cls) -> None:
        cls.plain = cls.__bases__[-1]

    @property
    def training(self) -> bool:
        """Whether the code of the module draws noise now."""
        mode: bool = self.__dict__["training"]
        return mode if self.sampling is None else self.sampling

    @training.setter
    def training(self, mode: bool) -> None:
        self.__dict__["training"] = mode

    def __reduce_ex__(
        self, protocol: SupportsIndex
    ) -> tuple[Callable[..., nn.Module], tuple[Any, ...], object]:
        return make_empty, (switched_class, self.plain), self.__getstate__()


def make_empty(make_class: Callable[..., type[nn.Module]], *args: Any) -> nn.Module:
    """Make an object without attributes of a class that is made when it is needed, for pickle."""
    return object.__new__(make_class(*args))


class SwitchableDropout(SwitchedMode):
    """A torch dropout module that follows the switch of `vardrop.sampling`.

    Args:
        *args: the arguments of the torch module.
        **kwargs: its keyword arguments.
    """

    spatial: ClassVar[int | None] = 0  # trailing axes that share one draw. None: all but two
    p: float

    def forward(self, input: Tensor) -> Tensor:
        """The input with noise while sampling, else the input itself."""
        if not self.training or (generator(input.device) is None and not noise_is_given()):
            return super().forward(input)
        # The functions of torch draw from the global generator only.
        spatial = input.dim() - 2 if self.spatial is None else self.spatial
        shape = (*input.shape[: input.dim() - spatial], *(1,) * spatial)
        return self._apply_mask(input, (uniform(shape, input) >= self.p).to(input.dtype))

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


class Dropout1d(SwitchableDropout, nn.Dropout1d):
    """`nn.Dropout1d` with the sampling switch.

    Args:
        p: the drop rate.
        inplace: whether to write into the input.
    """

    spatial: ClassVar[int | None] = 1


class Dropout2d(SwitchableDropout, nn.Dropout2d):
    """`nn.Dropout2d` with the sampling switch.

    Args:
        p: the drop rate.
        inplace: whether to write into the input.
    """

    spatial: ClassVar[int | None] = 2


class Dropout3d(SwitchableDropout, nn.Dropout3d):
    """`nn.Dropout3d` with the sampling switch.

    Args:
        p: the drop rate.
        inplace: whether to write into the input.
    """

    spatial: ClassVar[int | None] = 3


class AlphaDropout(_SwitchableAlphaDropout, nn.AlphaDropout):
    """`nn.AlphaDropout` with the sampling switch.

    Args:
        p: the drop rate.
        inplace: whether to write into the input.
    """


class FeatureAlphaDropout(_SwitchableAlphaDropout, nn.FeatureAlphaDropout):
    """`nn.FeatureAlphaDropout` with the sampling switch.

    Args:
        p: the drop rate.
        inplace: whether to write into the input.
    """

    spatial: ClassVar[int | None] = None


# The switchable dropout for each torch dropout, by exact type.
DROPOUT_TYPES: dict[type[nn.Module], type[SwitchableDropout]] = {
    kind.plain: kind
    for kind in (Dropout, Dropout1d, Dropout2d, Dropout3d, AlphaDropout, FeatureAlphaDropout)
}
_SWITCHED: dict[type[nn.Module], type[SwitchedMode]] = {**DROPOUT_TYPES}


def switched_class(plain: type[nn.Module]) -> type[SwitchedMode]:
    """The subclass of a module type whose dropout follows the sampling switch.

    Args:
        plain: the class of the modules.

    Returns:
        The class, the same for every call.

    >>> switched_class(nn.LSTM).__name__, switched_class(nn.LSTM) is switched_class(nn.LSTM)
    ('SwitchedLSTM', True)
    >>> switched_class(nn.Dropout)
    <class 'vardrop.gates.switchable_dropout.Dropout'>
    """
    if plain not in _SWITCHED:
        members = {"__module__": __name__, "__doc__": plain.__doc__}
        made = type(f"Switched{plain.__name__}", (SwitchedMode, plain), members)
        _SWITCHED.setdefault(plain, made)
    return _SWITCHED[plain]
