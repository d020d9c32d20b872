"""`GaussianLayer`: a layer with local reparameterization whose variances are computed once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from vardrop._core.modules import clone_modules
from vardrop.estimators import LocalReparameterization
from vardrop.functional import noise_is_given, standard_normal
from vardrop.layers import Conv1d, Conv2d, Conv3d, Linear, Variational
from vardrop.noisy import Noisy

_CONVOLUTIONS: dict[type[Variational], Callable[..., Tensor]] = {
    Conv1d: functional.conv1d,
    Conv2d: functional.conv2d,
    Conv3d: functional.conv3d,
}
_DTYPES = (torch.float32, torch.float64)
_LANES = 16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 1  # floats per register


class GaussianLayer(Noisy):
    """A dense layer or convolution with local reparameterization and stored variances.

        y ~ N(op(x, weight) + bias, op(x^2, variance) + bias_variance)

    It holds buffers: no gradients, no KL.
    """

    op: Callable[..., Tensor]
    channels_last: bool
    weight: Tensor | None  # None if the weights have mean zero
    bias: Tensor | None
    variance: Tensor
    bias_variance: Tensor
    sign: Tensor | None  # of the standard deviation, after outputs were scaled by negative numbers
    outputs: int | None  # number of outputs without those added to fill a register

    def __init__(self, layer: Variational, floor: float) -> None:
        super().__init__()
        # Code of the model may ask a layer for its sizes. nn.Module.__setattr__ is slow.
        for name, value in vars(layer).items():
            if isinstance(value, int | str | tuple):
                vars(self).setdefault(name, value)
        vars(self).update(op=_product(layer), channels_last=False, outputs=None)
        affine = layer.affine()
        mean, bias = affine.weight.mean.detach(), affine.mean_bias
        variance, bias_variance = (v.detach().to(mean.dtype) for v in affine.variances(floor))
        self._buffers.update(
            weight=None if affine.weight.posterior.zero_mean else mean,
            bias=None if bias is None else bias.detach(),
            variance=variance,
            bias_variance=bias_variance,
            sign=None,
        )

    def forward(self, x: Tensor) -> Tensor:
        """A draw of the output if sampling is on, else its mean."""
        mean = self.output_mean(x)
        if not self.is_sampling:
            return mean if self.weight is not None else mean.expand_as(self.output_variance(x * x))
        return sample_gaussian(self._in_layout(mean), self.output_std(x * x))

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the output."""
        return self._in_layout(self.output_mean(x)), self.output_std(x * x)

    def output_mean(self, x: Tensor) -> Tensor:
        """E y; the bias or zero if the weights have mean zero."""
        if self.weight is not None:
            return self._drop_padding(self.op(x, self.weight, self.bias))
        bias = torch.zeros_like(self.bias_variance) if self.bias is None else self.bias
        return self._per_output(bias)

    def output_variance(self, squares: Tensor) -> Tensor:
        """Var y for squared inputs."""
        return self._drop_padding(self.op(squares, self.variance, self.bias_variance))

    def output_std(self, squares: Tensor) -> Tensor:
        """The factor of the noise of each output, for squared inputs."""
        std = self.output_variance(squares).sqrt_()
        std = std if self.sign is None else std.mul_(self._per_output(self.sign))
        return self._in_layout(std)

    def _drop_padding(self, y: Tensor) -> Tensor:
        return y if self.outputs is None else y[:, : self.outputs]

    def _per_output(self, values: Tensor) -> Tensor:
        return values.view(-1, *(1,) * (self.variance.dim() - 2))

    def _in_layout(self, y: Tensor) -> Tensor:
        # One input channel fits both layouts, and torch then takes the slower one.
        if self.channels_last and y.dim() == 4 and y.stride(1) != 1:
            return y.contiguous(memory_format=torch.channels_last)
        return y

    def scale_outputs(self, scale: Tensor, shift: Tensor) -> None:
        """Make the layer return scale * y + shift instead of y, per output."""
        per_weight = scale.view(-1, *(1,) * (self.variance.dim() - 1))
        self.variance = self.variance * per_weight.square()
        self.bias_variance = self.bias_variance * scale.square()
        self.weight = None if self.weight is None else self.weight * per_weight
        self.bias = shift if self.bias is None else self.bias * scale + shift
        if bool((scale < 0).any()):
            self.sign = scale.sign()

    def to_fast_layout(self) -> GaussianLayer:
        """A copy in the memory layout that is fastest.

        The number of output channels is a multiple of the register size: of 50 channels the last
        two take longer than sixteen.
        """
        if self.variance.dim() != 4:
            return self
        grouped = self.op.keywords.get("groups", 1) > 1 if isinstance(self.op, partial) else False
        count = 0 if grouped or not self.variance.is_cpu else -len(self.variance) % _LANES
        twin = clone_modules(self)
        twin.channels_last, twin.outputs = True, len(self.variance) if count else None
        twin.variance = _pad_outputs(self.variance, count)
        twin.bias_variance = _pad_outputs(self.bias_variance, count)
        if self.weight is not None:
            twin.weight = _pad_outputs(self.weight, count)
            twin.bias = None if self.bias is None else _pad_outputs(self.bias, count)
        return twin


def sample_gaussian(mean: Tensor, std: Tensor) -> Tensor:
    """mean + std * noise, with noise in the memory layout of the standard deviation."""
    if noise_is_given():
        return torch.addcmul(mean, std, standard_normal(std.shape, std))
    if std.dim() == 4 and std.stride(1) == 1:  # channels last, perhaps without padded channels
        n, c, h, w = std.shape
        noise = standard_normal((n, h, w, c), std).permute(0, 3, 1, 2)
    else:
        noise = standard_normal(std.shape, std)
    return torch.addcmul(mean, std, noise, out=noise)


def sample_rows(mean: Tensor, std: Tensor, draws: int) -> Tensor:
    """Independent draws of one Gaussian, stacked along axis 0: (draws * N, ...)."""
    if noise_is_given():  # in the shape of the output; export cannot split axes of a view
        times = (draws, *(1,) * (std.dim() - 1))
        mean = mean.expand_as(std)
        return sample_gaussian(mean.repeat(times), std.repeat(times))
    last = std.dim() == 4 and not std.is_contiguous()
    if last:
        mean, std = (t.permute(0, 2, 3, 1) if t.dim() == 4 else t.view(-1) for t in (mean, std))
    noise = standard_normal((draws * std.shape[0], *std.shape[1:]), std)
    noise = noise.view(draws, *std.shape)
    rows = torch.addcmul(mean, std, noise, out=noise).flatten(0, 1)
    return rows.permute(0, 3, 1, 2) if last else rows


def _pad_outputs(values: Tensor, count: int) -> Tensor:
    padded = torch.cat([values, values.new_zeros(count, *values.shape[1:])]) if count else values
    return padded.contiguous(memory_format=torch.channels_last) if padded.dim() == 4 else padded


def _product(layer: Variational) -> Callable[..., Tensor]:
    """The product of a layer as a function that holds no tensor."""
    if type(layer) is Linear:
        return functional.linear
    convolution = cast(Any, layer)
    geometry = {k: getattr(convolution, k) for k in ("stride", "padding", "dilation", "groups")}
    if convolution.padding_mode == "zeros":
        return partial(_CONVOLUTIONS[type(layer)], **geometry)
    around = list(convolution._reversed_padding_repeated_twice)
    product = partial(_CONVOLUTIONS[type(layer)], **{**geometry, "padding": 0})
    return partial(_pad_and_convolve, product, around, convolution.padding_mode)


def _pad_and_convolve(
    product: Callable[..., Tensor], around: list[int], mode: str, x: Tensor, *tensors: Tensor
) -> Tensor:
    return product(functional.pad(x, around, mode), *tensors)


def make_gaussian_layer(layer: nn.Module) -> GaussianLayer | None:
    """The layer with stored variances, if it uses local reparameterization in full precision."""
    if not isinstance(layer, Variational) or layer.posterior is None or layer.gate is not None:
        return None
    supported = type(layer) in (Linear, *_CONVOLUTIONS) and layer.weight.dtype in _DTYPES
    if not supported or type(layer.estimator) is not LocalReparameterization:
        return None
    return GaussianLayer(layer, layer.estimator.floor)
