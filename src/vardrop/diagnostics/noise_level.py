"""Effective multiplicative noise after a non-linearity."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from vardrop._core.calls import call, untouched
from vardrop._core.checks import check_choice
from vardrop._core.errors import VardropError
from vardrop.estimators import LocalReparameterization
from vardrop.layers import Variational
from vardrop.noisy import evaluating, noisy_modules, sampling

Activation = Literal["identity", "relu", "abs"]


def activation_alpha(mean: Tensor, std: Tensor, activation: Activation = "relu") -> Tensor:
    """Var f(y) / (E f(y))^2 for y ~ N(mean, std^2): the alpha of equivalent Gaussian dropout.

        ReLU: E f = mean Phi(r) + std phi(r),  E f^2 = (mean^2 + std^2) Phi(r) + mean std phi(r)
        abs:  E f = mean erf(r / sqrt 2) + 2 std phi(r),  E f^2 = mean^2 + std^2,   r = mean / std

    Noise of mean zero still tells something after a non-linearity: alpha is pi/2 - 1 after |.|
    and pi - 1 after ReLU, whatever the scale.

    Args:
        mean, std: moments of the pre-activation, of one shape; std > 0.
        activation: "identity", "relu" or "abs".

    >>> import torch
    >>> activation_alpha(torch.zeros(1), torch.ones(1), "abs")
    tensor([0.5708])
    >>> activation_alpha(torch.zeros(1), torch.ones(1), "relu")
    tensor([2.1416])

    Neklyudov, Molchanov, Ashukha & Vetrov 2019, "Variance networks", sec. 3.
    """
    check_choice("activation", activation, get_args(Activation))
    kind = mean.dtype
    mean, std = mean.double(), std.double()  # the tails cancel
    r = mean / std
    density = torch.exp(-0.5 * r.square()) / math.sqrt(2 * math.pi)
    if activation == "relu":
        below = torch.special.ndtr(r)
        first = mean * below + std * density
        second = (mean.square() + std.square()) * below + mean * std * density
    elif activation == "abs":
        first = mean * torch.erf(r / math.sqrt(2)) + 2 * std * density
        second = mean.square() + std.square()
    else:
        first, second = mean, mean.square() + std.square()
    alpha = (second - first.square()) / first.square()
    return torch.where(first == 0, math.inf, alpha).to(kind)


@torch.no_grad()
def noise_level(net: nn.Module, x: Tensor, activation: Activation = "relu") -> dict[str, Tensor]:
    """alpha of every noisy layer's output after a non-linearity, on the inputs x.

    Each layer sees the input that one noisy pass gives it; its own output is taken as normal with
    the moments of its posterior (`activation_alpha`).

    Args:
        net: a net with noisy weights.
        x: a batch of inputs.
        activation: the non-linearity that follows the layers.

    >>> import torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Linear(3, 2, bias=False), vd.variance_layer())
    >>> noise_level(net, torch.ones(1, 3))[""]
    tensor([[2.1416, 2.1416]])

    Neklyudov, Molchanov, Ashukha & Vetrov 2019, "Variance networks", sec. 3.
    """
    check_choice("activation", activation, get_args(Activation))
    levels: dict[str, Tensor] = {}
    layers = {
        name: m
        for name, m in noisy_modules(net).items()
        if isinstance(m, Variational) and m.posterior is not None
    }

    def record(name: str, layer: Variational, inputs: tuple[Any, ...]) -> None:
        mean, std = _moments(layer, inputs)
        levels[name] = activation_alpha(mean, std, activation)

    handles = [
        layer.register_forward_pre_hook(lambda m, args, name=name: record(name, m, args))
        for name, layer in layers.items()
    ]
    try:
        with evaluating(net), sampling(net):
            call(net, untouched(x))
    finally:
        for handle in handles:
            handle.remove()
    return levels


def _moments(layer: Variational, inputs: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of a layer's output, read off two explicit noises, 0 and 1."""
    own, tensors = layer.estimator, list(layer.noisy_tensors().values())
    if len(layer.weight_axes) > 1:
        raise VardropError(
            f"Expected layers that are one product, but got {type(layer).__name__} with the "
            f"weights {', '.join(layer.weight_axes)}. Convert the others alone, with `where`."
        )
    if not all(t.adds_variances() for t in tensors):
        raise VardropError(
            "Expected weights with independent noise, whose variances add up, but got "
            f"{layer.posterior!r}. Use another posterior or a dense layer."
        )
    zero = tensors[0].mean.new_zeros(())
    try:
        layer.estimator = LocalReparameterization(floor=1e-20)
        with sampling(layer, on=False):  # a gate passes its mean
            mean = layer.forward(*inputs, noise=zero)
            return mean, layer.forward(*inputs, noise=zero + 1) - mean
    finally:
        layer.estimator = own
