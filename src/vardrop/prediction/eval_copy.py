"""The copy of a model that a prediction runs: evaluation mode, with its noise on or off.

The copy shares its tensors with the model and has its own modules, so the user's model is never
switched and several threads can predict with it at once. Variances of weights are computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from vardrop._core.encoder import disable_encoder_fastpath
from vardrop._core.errors import VardropError
from vardrop._core.modules import clone_modules, hooks
from vardrop._core.torch_private import has_plain_forward, own_tensors
from vardrop._core.values import Value
from vardrop.estimators import LocalReparameterization, check_estimator, local_reparameterization
from vardrop.functional import log_square, noise_is_given, redirect_random_ops, standard_normal
from vardrop.gates import (
    DROPOUT_TYPES,
    SwitchableDropout,
    SwitchedMode,
    drop_rate,
    functional_dropout_rates,
)
from vardrop.layers import Conv1d, Conv2d, Conv3d, Linear, Variational
from vardrop.noisy import Noisy
from vardrop.posteriors import Axes, Posterior, Tensors

_LAYERS = (Linear, Conv1d, Conv2d, Conv3d)


def is_stochastic(module: nn.Module) -> bool:
    """Whether a module itself draws noise, when sampling is on or in training mode."""
    return isinstance(module, Noisy) or drop_rate(module) > 0


def draws_functions(net: nn.Module) -> bool:
    """Whether every noisy weight of a model, and there is one, is drawn as a whole tensor.

    A draw per example, or with signs per example (Flipout), has the distribution of a whole
    function for every example, so functions are drawn instead, with one mask of each gate or
    dropout. Dropout inside the code of a module cannot be fixed.
    """
    layers = (m for m in net.modules() if isinstance(m, Variational))
    weights = [m for m in layers if m.posterior is not None]
    draws_weights = all(m.estimator.whole_weights_per is not None for m in weights)
    in_code = (
        functional_dropout_rates(m)
        or (isinstance(m, SwitchedMode) and not isinstance(m, SwitchableDropout))
        for m in net.modules()
    )
    return bool(weights) and draws_weights and not any(in_code)


def check_noise(net: nn.Module) -> None:
    """Raise an error unless the model has a source of noise."""
    if not any(map(is_stochastic, net.modules())):
        kinds = sorted({type(m).__name__ for m in net.modules()})
        raise VardropError(
            f"Expected `net` to have noisy modules or dropout, but got {', '.join(kinds)}. "
            'Call vardrop.convert(net, recipe) first, or vardrop.predict(net, x, mode="mean").'
        )


def make_eval_copy(net: nn.Module, noise: bool, local: bool = False) -> nn.Module:
    """Copy the modules of a model in evaluation mode, with their noise on or off.

    With `local`, layers with noisy weights use local reparameterization instead of their estimator.
    """
    twin = clone_modules(net)
    for module in twin.modules():
        disable_encoder_fastpath(module)
        if type(module) in DROPOUT_TYPES and drop_rate(module):
            # the same dropout, drawn from the call's generator
            module.__class__ = DROPOUT_TYPES[type(module)]
        if isinstance(module, Noisy):
            module.training, module.sampling = False, noise
        else:
            module.training = noise and drop_rate(module) > 0
        if local and isinstance(module, Variational) and module.posterior is not None:
            check_estimator(local_reparameterization, module.posterior)
            module.estimator = local_reparameterization
    return twin


class GaussianLayer(Noisy):
    """A dense layer or convolution with local reparameterization and stored variances.

        y ~ N(op(x, weight) + bias, op(x^2, variance) + bias_variance)

    It holds buffers: no gradients, no KL.
    """

    op: Callable[..., Tensor]
    weight: Tensor | None  # None if the weights have mean zero
    bias: Tensor | None
    variance: Tensor
    bias_variance: Tensor
    sign: Tensor | None  # of the standard deviation, after outputs were scaled by negative numbers
    channels_last: bool

    def __init__(self, layer: Variational, floor: float) -> None:
        super().__init__()
        # Code of the model may ask a layer for its sizes. nn.Module.__setattr__ is slow.
        sizes = {n: v for n, v in vars(layer).items() if isinstance(v, int | str | tuple)}
        op: Any = functional.linear if type(layer) is Linear else layer._conv_forward
        mode = {"training": False, "sampling": layer.sampling}
        vars(self).update(sizes | vars(self) | mode, op=op, channels_last=False)
        tensors, bias = layer.noisy_tensors(), cast(Tensor | None, layer.bias)
        weight = tensors["weight"]
        variance = weight.variance()
        bias_variance = variance.new_full((len(variance),), floor)
        if "bias" in tensors:
            bias_variance = bias_variance + tensors["bias"].variance()
        self._buffers.update(
            weight=None if weight.posterior.zero_mean else weight.mean.detach(),
            bias=None if bias is None else bias.detach(),
            variance=variance.detach().to(weight.mean.dtype),
            bias_variance=bias_variance.detach().to(weight.mean.dtype),
            sign=None,
        )

    def forward(self, x: Tensor) -> Tensor:
        """A draw of the output if sampling is on, else its mean."""
        mean, std = self.moments(x)
        return sample_gaussian(mean, std) if self.is_sampling else mean.expand_as(std)

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the output; the mean is broadcastable to its shape."""
        tensors = self._buffers  # attributes of a module are slow
        weight, bias, variance = tensors["weight"], tensors["bias"], self.variance
        std = self.op(x * x, variance, tensors["bias_variance"]).sqrt_()
        per_output = (-1, *(1,) * (variance.dim() - 2))
        if weight is not None:
            mean = self.op(x, weight, bias)
        else:
            mean = std.new_zeros(()) if bias is None else bias.view(per_output)
        if (sign := tensors["sign"]) is not None:
            std = std.mul_(sign.view(per_output))
        if self.channels_last and std.dim() == 4 and std.stride(1) != 1:
            # One input channel fits both layouts, and torch then takes the slower one.
            mean, std = (
                y.contiguous(memory_format=torch.channels_last) if y.dim() == 4 else y
                for y in (mean, std)
            )
        return mean, std

    def scale_outputs(self, scale: Tensor, shift: Tensor) -> None:
        """Make the layer return scale * y + shift instead of y, per output."""
        per_weight = scale.view(-1, *(1,) * (self.variance.dim() - 1))
        self.variance = self.variance * per_weight.square()
        self.bias_variance = self.bias_variance * scale.square()
        self.weight = None if self.weight is None else self.weight * per_weight
        self.bias = shift if self.bias is None else self.bias * scale + shift
        if bool((scale < 0).any()):
            self.sign = scale.sign()

    def use_fast_layout(self) -> None:
        """Put the tensors of a convolution of images into the memory layout that is fastest."""
        if self.variance.dim() == 4:
            vars(self).update(channels_last=True)
            for name in ("variance", "weight"):
                if (tensor := self._buffers[name]) is not None:
                    self._buffers[name] = tensor.contiguous(memory_format=torch.channels_last)


def sample_gaussian(mean: Tensor, std: Tensor, draws: int = 1) -> Tensor:
    """Draw mean + std * noise independently, and stack the draws along axis 0: (draws * N, ...).

    The noise has the memory layout of the standard deviation.
    """
    if noise_is_given():  # in the shape of the output; export cannot split axes of a view
        if draws > 1:
            times = (draws, *(1,) * (std.dim() - 1))
            mean, std = mean.expand_as(std).repeat(times), std.repeat(times)
        return torch.addcmul(mean, std, standard_normal(std.shape, std))
    last = std.dim() == 4 and std.stride(1) == 1  # channels last
    if draws == 1 and not last:
        noise = standard_normal(std.shape, std)
        return torch.addcmul(mean, std, noise, out=noise)
    if last:
        mean, std = (t.permute(0, 2, 3, 1) if t.dim() == 4 else t.view(-1) for t in (mean, std))
    noise = standard_normal((draws * std.shape[0], *std.shape[1:]), std)
    noise = noise.view(draws, *std.shape)
    rows = torch.addcmul(mean, std, noise, out=noise).flatten(0, 1)
    return rows.permute(0, 3, 1, 2) if last else rows


@dataclass(frozen=True)
class FrozenGaussian(Posterior):
    """A Gaussian posterior whose standard deviations, which may be negative, are stored."""

    zero_mean: bool = False
    gaussian: ClassVar[bool] = True
    learned: ClassVar[bool] = False

    def initial(self, weight: Tensor, axes: Axes) -> dict[str, Tensor]:
        return {"deviation": torch.zeros_like(weight)}

    def variance(self, weight: Tensor, tensors: Tensors) -> Tensor:
        return tensors["deviation"].square()

    def perturbation(self, weight: Tensor, noise: Tensor, tensors: Tensors) -> Tensor:
        return tensors["deviation"] * noise

    def log_alpha(self, weight: Tensor, tensors: Tensors) -> Tensor:
        return log_square(tensors["deviation"]) - log_square(weight)


@torch.no_grad()
def compute_variances(copy: nn.Module, draws_outputs: bool = True) -> nn.Module:
    """Compute the variances of Gaussian weights once, in a copy of `make_eval_copy`.

    Layers with local reparameterization become `GaussianLayer` if outputs are drawn. Other layers
    with Gaussian weights keep their class and get a `FrozenGaussian` posterior.
    """
    layers: dict[nn.Module, nn.Module] = {}
    for layer in copy.modules():
        if not isinstance(layer, Variational):
            continue
        local = layer.posterior is not None and layer.gate is None and draws_outputs
        estimator = layer.estimator
        local &= type(layer) in _LAYERS and layer.weight.dtype in (torch.float32, torch.float64)
        if local and type(estimator) is LocalReparameterization:
            layers[layer] = GaussianLayer(layer, estimator.floor)
        elif layer.posterior is not None and layer.posterior.gaussian:
            deviations = {
                name: {"deviation": tensor.perturbation(torch.ones_like(tensor.mean))}
                for name, tensor in layer.noisy_tensors().items()
            }
            layer.replace_posterior(FrozenGaussian(layer.posterior.zero_mean), deviations)
    return clone_modules(copy, layers)


def copy_tensors(net: nn.Module) -> nn.Module:
    """A copy of a model with its own tensors, which need no gradients; tied tensors stay tied."""
    twin, copies = clone_modules(net), dict[int, Tensor]()
    for module in twin.modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue  # it was copied with its tensors
        for name, tensor in list(own_tensors(module)):
            if id(tensor) not in copies:
                copied = tensor.detach().clone()
                is_parameter = isinstance(tensor, nn.Parameter)
                copies[id(tensor)] = nn.Parameter(copied, False) if is_parameter else copied
            setattr(module, name, copies[id(tensor)])
    return twin


_DRAWING_TYPES = (
    nn.RNNBase,
    nn.MultiheadAttention,
    nn.RReLU,
    nn.FractionalMaxPool2d,
    nn.FractionalMaxPool3d,
)


def use_call_generator(net: nn.Module) -> AbstractContextManager[object]:
    """Make all noise of a model come from the generator of the call.

    Modules of torch and of this library take the generator themselves. A custom forward, posterior
    or hook may call torch's random functions, so those are redirected.
    """
    return redirect_random_ops() if has_untracked_randomness(net) else nullcontext()


def has_untracked_randomness(net: nn.Module) -> bool:
    """Whether a forward could draw noise that the sampling switch does not control."""
    for module in net.modules():
        parts = [v for v in vars(module).copy().values() if isinstance(v, Value)]
        is_ours = type(module).__module__.startswith(("torch.nn.modules.", "vardrop."))
        is_ours &= all(type(part).__module__.startswith("vardrop.") for part in parts)
        if not is_ours or isinstance(module, _DRAWING_TYPES) or not has_plain_forward(module):
            return True
    return False


@contextmanager
def track_active_module(net: nn.Module) -> Iterator[list[str]]:
    """The modules of a copy that are being run, by name and class, innermost last."""
    active: list[str] = []
    handles: list[RemovableHandle] = []
    for name, module in net.named_modules():
        entry = f"'{name or '(net)'}' ({type(module).__name__})"
        handles += (
            module.register_forward_pre_hook(lambda *_, entry=entry: active.append(entry)),
            module.register_forward_hook(lambda *_: active.pop() and None),
        )
    with hooks(*handles):
        yield active
