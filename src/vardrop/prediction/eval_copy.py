"""The copy of a model that a prediction runs: evaluation mode, with its noise on or off.

The copy shares its tensors with the model and has its own modules, so the user's model is never
switched and several threads can predict with it at once.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vardrop._core.encoder import disable_encoder_fastpath
from vardrop._core.errors import VardropError
from vardrop._core.modules import clone_modules
from vardrop._core.torch_private import has_plain_forward, own_tensors
from vardrop._core.values import Value
from vardrop.estimators import check_estimator, local_reparameterization
from vardrop.functional import log_square, redirect_random_ops
from vardrop.gates import DROPOUT_TYPES, drop_rate
from vardrop.layers import Variational
from vardrop.noisy import Noisy, named_modules_of
from vardrop.posteriors import Axes, Posterior, Sharing, Tensors
from vardrop.prediction.gaussian_layer import GaussianLayer, make_gaussian_layer


def is_stochastic(module: nn.Module) -> bool:
    """Whether a module itself draws noise, when sampling is on or in training mode."""
    return isinstance(module, Noisy) or drop_rate(module) > 0


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
        if (switchable := DROPOUT_TYPES.get(type(module))) is not None:
            module.__class__ = switchable  # the same dropout, drawn from the call's generator
        _switch(module, noise, local)
    return twin


@functools.singledispatch
def _switch(module: nn.Module, noise: bool, local: bool) -> None:
    """Set the mode of a module of the copy."""
    module.training = noise and drop_rate(module) > 0


@_switch.register
def _(module: Noisy, noise: bool, local: bool) -> None:
    module.training, module.sampling = False, noise


@_switch.register
def _(module: Variational, noise: bool, local: bool) -> None:
    module.training, module.sampling = False, noise
    if local and module.posterior is not None:
        check_estimator(local_reparameterization, module.posterior)
        module.estimator = local_reparameterization


@dataclass(frozen=True)
class FrozenGaussian(Posterior):
    """A Gaussian posterior whose standard deviations, which may be negative, are stored."""

    zero_mean: bool = False

    @property
    def gaussian(self) -> bool:
        return True

    @property
    def noise_per(self) -> Sharing:
        return "weight"

    @property
    def learned(self) -> bool:
        return False

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
    for layer in named_modules_of(copy, Variational).values():
        gaussian = make_gaussian_layer(layer) if draws_outputs else None
        if gaussian is not None:
            gaussian.sampling, gaussian.training = layer.sampling, False
            layers[layer] = gaussian
        elif layer.posterior is not None and layer.posterior.gaussian:
            ones = {n: torch.ones_like(t.mean) for n, t in layer.noisy_tensors().items()}
            deviations = {
                name: {"deviation": tensor.perturbation(ones[name])}
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
    return any(map(_may_draw, net.modules()))


def _may_draw(module: nn.Module) -> bool:
    if isinstance(module, GaussianLayer):
        return False
    is_ours = type(module).__module__.startswith(("torch.nn.modules.", "vardrop."))
    values = (v for v in vars(module).copy().values() if isinstance(v, Value))
    custom = any(not type(v).__module__.startswith("vardrop.") for v in values)
    return (
        not is_ours or custom or isinstance(module, _DRAWING_TYPES) or not has_plain_forward(module)
    )


def per_axis(value: int | Sequence[int], axes: int) -> tuple[int, ...]:
    """A size as one number per axis, from one number for all axes or one for each."""
    sizes = tuple(value) if isinstance(value, Sequence) else (value,)
    return sizes * axes if len(sizes) == 1 else sizes


def track_active_module(net: nn.Module, hooks: ExitStack) -> list[tuple[str, nn.Module]]:
    """The modules of a copy that are being run, with their names, innermost last."""
    entered: list[tuple[str, nn.Module]] = []
    for name, module in net.named_modules():
        entry = (name or "(net)", module)
        before = module.register_forward_pre_hook(lambda *_, e=entry: entered.append(e))
        after = module.register_forward_hook(lambda *_: entered.pop() and None)
        hooks.callback(before.remove)
        hooks.callback(after.remove)
    return entered
