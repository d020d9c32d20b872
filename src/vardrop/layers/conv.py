"""Convolutions and transposed convolutions with noisy weights, one implementation for 1-3 d.

Padding by copying (reflect, replicate, circular) commutes with squaring. The variance product pads
x^2 exactly as the mean product pads x, so local reparameterisation is exact for every padding mode.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional

from vardrop.estimators import ExplicitNoise
from vardrop.functional.noise import Convolution
from vardrop.layers.dense import Affine
from vardrop.posteriors import Axes


class _Conv(Affine):
    sizes: ClassVar[tuple[str, str]] = ("in_channels", "out_channels")

    @property
    def op(self) -> Callable[..., Tensor]:  # type: ignore[override]
        if self.padding_mode != "zeros" or isinstance(self.padding, str):
            return self._conv_forward  # type: ignore[return-value]
        return Convolution(
            self.stride,  # type: ignore[arg-type]
            self.padding,  # type: ignore[arg-type]
            self.dilation,  # type: ignore[arg-type]
            self.groups,  # type: ignore[arg-type]
        )


class _ConvTranspose(_Conv):
    axes: ClassVar[Axes] = Axes(input=(0,), output=(1,))

    op = None  # type: ignore[assignment]  # its padding depends on the requested output size

    def forward(  # type: ignore[override]
        self,
        input: Tensor,
        output_size: list[int] | None = None,
        noise: ExplicitNoise | None = None,
    ) -> Tensor:
        """Return a draw while sampling or for given noise, else the output of the torch layer."""
        stride, padding, dilation = self.stride, self.padding, self.dilation
        extra = self._output_padding(  # type: ignore[operator]
            input, output_size, stride, padding, self.kernel_size, self.spatial, dilation
        )
        op = partial(
            getattr(functional, f"conv_transpose{self.spatial}d"),
            stride=stride,
            padding=padding,
            output_padding=extra,
            groups=self.groups,
            dilation=dilation,
        )
        return self.product_with_gate(op, input, noise)


class Conv1d(_Conv, nn.Conv1d):
    """`nn.Conv1d` with a posterior on its kernel.

    Args:
        *args: the arguments of `nn.Conv1d`.
        **kwargs: its keyword arguments, and `posterior`, `prior`, `estimator`, `gate` and
            `noisy_bias`, as in `Variational`.
    """

    spatial: ClassVar[int] = 1


class Conv2d(_Conv, nn.Conv2d):
    """`nn.Conv2d` with a posterior on its kernel.

    Args:
        *args: the arguments of `nn.Conv2d`.
        **kwargs: its keyword arguments, and `posterior`, `prior`, `estimator`, `gate` and
            `noisy_bias`, as in `Variational`.

    >>> import torch, vardrop as vd
    >>> layer = vd.Conv2d(3, 8, 3, posterior=vd.AdditiveGaussian(), prior=vd.ARD())
    >>> layer(torch.zeros(2, 3, 5, 5)).shape
    torch.Size([2, 8, 3, 3])
    """

    spatial: ClassVar[int] = 2


class Conv3d(_Conv, nn.Conv3d):
    """`nn.Conv3d` with a posterior on its kernel.

    Args:
        *args: the arguments of `nn.Conv3d`.
        **kwargs: its keyword arguments, and `posterior`, `prior`, `estimator`, `gate` and
            `noisy_bias`, as in `Variational`.
    """

    spatial: ClassVar[int] = 3


class ConvTranspose1d(_ConvTranspose, nn.ConvTranspose1d):
    """`nn.ConvTranspose1d` with a posterior on its kernel.

    Args:
        *args: the arguments of `nn.ConvTranspose1d`.
        **kwargs: its keyword arguments, and `posterior`, `prior`, `estimator`, `gate` and
            `noisy_bias`, as in `Variational`.
    """

    spatial: ClassVar[int] = 1


class ConvTranspose2d(_ConvTranspose, nn.ConvTranspose2d):
    """`nn.ConvTranspose2d` with a posterior on its kernel.

    Args:
        *args: the arguments of `nn.ConvTranspose2d`.
        **kwargs: its keyword arguments, and `posterior`, `prior`, `estimator`, `gate` and
            `noisy_bias`, as in `Variational`.
    """

    spatial: ClassVar[int] = 2


class ConvTranspose3d(_ConvTranspose, nn.ConvTranspose3d):
    """`nn.ConvTranspose3d` with a posterior on its kernel.

    Args:
        *args: the arguments of `nn.ConvTranspose3d`.
        **kwargs: its keyword arguments, and `posterior`, `prior`, `estimator`, `gate` and
            `noisy_bias`, as in `Variational`.
    """

    spatial: ClassVar[int] = 3
