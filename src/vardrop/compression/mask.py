"""From a noisy net to a plain one: without what the posterior calls dead, as exact as it asks."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, SupportsFloat, cast

import torch
from torch import Tensor, nn

from vardrop._core.encoder import disable_encoder_fastpath
from vardrop._core.errors import VardropError
from vardrop._core.integrations import load_integration
from vardrop.compression.layer_views import LAYOUTS, join_name, replace_module
from vardrop.compression.modules.attention import SlimAttention
from vardrop.compression.modules.recurrent import Unrolled
from vardrop.compression.modules.select import Scale
from vardrop.functional import to_float32_or_wider
from vardrop.gates import Gate, SwitchableDropout
from vardrop.layers import Variational, per_unit, plain_types
from vardrop.noisy import Noisy, NoisyTensor, Relevance, named_modules_of, relevance, tensor_name

_ASSUMED = 1 / 32  # of the root mean square of a layer's weights: about six bits per weight
_GRID = 3  # significant digits of a step, so that it is short in a file
# One number for every noisy module, one for each by a name, or each method's own rule.
Thresholds = SupportsFloat | Mapping[str, float] | None


def rules(net: nn.Module, threshold: Thresholds = None) -> dict[str, Relevance]:
    """The relevance of every noisy module under the given threshold."""
    relevances = relevance(net) if named_modules_of(net, Noisy) else {}
    if threshold is None:
        return relevances
    _check_thresholds(threshold)
    if not relevances:
        raise VardropError(
            "Expected `net` to have a method that tells dead weights or units, but got none. "
            "Use a recipe such as vardrop.sparse_vd(), or give no threshold."
        )
    if not isinstance(threshold, Mapping):
        if len({(r.threshold, r.keep_above) for r in relevances.values()}) > 1:
            signs = ((n, ">" if r.keep_above else "<", r.threshold) for n, r in relevances.items())
            texts = ", ".join(f"'{n}' {sign} {value}" for n, sign, value in signs)
            raise VardropError(
                "Expected one threshold for modules with one rule, but got "
                f"{threshold} for the rules {texts}. Give thresholds by module name."
            )
        threshold = dict.fromkeys(relevances, float(threshold))
    if unknown := sorted(set(threshold) - set(relevances)):
        raise VardropError(
            f"Expected `threshold` to name noisy modules among {sorted(relevances)}, but got "
            f"{unknown}."
        )
    return {
        name: dataclasses.replace(r, threshold=float(threshold.get(name, r.threshold)))
        for name, r in relevances.items()
    }


def _check_thresholds(threshold: Thresholds) -> None:
    """Refuse what is no number; infinity keeps all or nothing."""
    values = threshold.values() if isinstance(threshold, Mapping) else [threshold]
    for value in values:
        try:
            nan = math.isnan(float(value))  # type: ignore[arg-type]
        except (TypeError, ValueError):
            nan = True
        if nan:
            raise VardropError(
                f"Expected `threshold` to be a number or numbers by module name, but got {value!r}."
            )


def check_means(net: nn.Module, what: str) -> None:
    """Refuse layers of mean zero, of which nothing is left in a plain net."""
    for name, layer in named_modules_of(net, Variational).items():
        if layer.posterior is not None and layer.posterior.zero_mean:
            raise VardropError(
                f"Expected layers that have means {what}, but got '{name}' "
                f"({type(layer).__name__}) with {layer.posterior!r}, whose weights are noise "
                "alone. Leave it noisy: vardrop.freeze serves and exports its draws."
            )


def zero_pruned_weights(
    net: nn.Module, threshold: Thresholds = None
) -> tuple[nn.Module, dict[str, Tensor]]:
    """A plain copy of a noisy net with its dead weights at zero, in evaluation mode.

    Returns the copy and the posterior standard deviation of every noisy weight by its name. The
    given net stays as it is. Weights of a plain net that are zero already count as dead.
    """
    alive = {name: r.kept for name, r in rules(net, threshold).items()}
    plain = copy.deepcopy(net).eval()
    deviations: dict[str, Tensor] = {}
    for name in find_gated_ties(plain):
        layer = cast(Variational, plain.get_submodule(name))
        for key, tensor in list(layer.named_parameters(recurse=False)):
            if key in (*layer.weight_axes, *layer.bias_names):
                setattr(layer, key, nn.Parameter(tensor.detach().clone(), tensor.requires_grad))
    layers = named_modules_of(plain, Variational)
    for name, module in list(plain.named_modules()):
        if name and name.rpartition(".")[0] in layers:
            continue  # the gate of a layer went with it
        if isinstance(module, Variational):
            _make_layer_plain(module, name, alive, deviations)
        elif isinstance(module, SwitchableDropout):
            plain = replace_module(plain, name, nn.Identity())
        elif isinstance(module, Gate):
            plain = replace_module(plain, name, _plain_gate(module, alive.get(name)))
    return plain, deviations


def find_gated_ties(net: nn.Module) -> list[str]:
    """Layers with a gate whose weights others use too: their gate cannot be folded into those."""
    owners = parameter_owners(net)
    return [
        name
        for name, m in named_modules_of(net, Variational).items()
        if m.gate is not None
        and any(owners[id(getattr(m, weight))] > 1 for weight in m.weight_axes)
    ]


_DECOMPOSED: dict[type[nn.Module], Callable[..., SlimAttention | Unrolled]] = {
    nn.MultiheadAttention: SlimAttention,
    nn.RNN: Unrolled,
    nn.LSTM: Unrolled,
    nn.GRU: Unrolled,
}


def decompose_layers(net: nn.Module) -> nn.Module:
    """A net with its attention and recurrent layers as dense layers, in place.

    Layers that share their weights, and those with keys of their own (`add_bias_kv`), stay whole.
    """
    named = list(net.named_modules(remove_duplicate=False))
    for _, module in named:
        load_integration(type(module))
    owners, names = parameter_owners(net), Counter(id(m) for _, m in named)
    for name, module in named:
        make = _DECOMPOSED.get(type(module))
        shared = names[id(module)] > 1 or any(owners[id(p)] > 1 for p in module.parameters())
        if make is not None and not shared and getattr(module, "bias_k", None) is None:
            net = replace_module(net, name, make(module))
    for module in net.modules():
        disable_encoder_fastpath(module)
    return net


def recompose_layers(net: nn.Module) -> nn.Module:
    """The net with torch's recurrent layers, and its attention where no head is missing."""
    parts: dict[str, Any] = {
        **named_modules_of(net, SlimAttention),
        **named_modules_of(net, Unrolled),
    }
    for name, layer in parts.items():
        if (torch_layer := layer.recompose()) is not None:
            net = replace_module(net, name, torch_layer)
    return net


def parameter_owners(net: nn.Module) -> Counter[int]:
    """How many modules have a parameter, by its identity."""
    return Counter(id(p) for m in net.modules() for p in m.parameters(recurse=False))


@torch.no_grad()
def _plain_gate(gate: Gate, alive: Tensor | None) -> nn.Module:
    """The mean of a gate between layers, with dead units at zero."""
    mean = gate.unit_mean()
    if mean is None and alive is None:
        return nn.Identity()
    factor = torch.ones(gate.units) if mean is None else mean.expand(gate.units).clone()
    return Scale(factor if alive is None else factor * alive, gate.axis)


@torch.no_grad()
def _make_layer_plain(
    module: Variational, name: str, masks: dict[str, Tensor], deviations: dict[str, Tensor]
) -> None:
    """Zero the dead weights and those of dead gate units, and take the noise away."""
    layers = {
        name: module,
        **{join_name(name, part_name): part for part_name, part in module.sublayers().items()},
    }
    for layer_name, layer in layers.items():
        for weight_name in layer.weight_axes:
            if (alive := masks.get(tensor_name(layer_name, weight_name))) is not None:
                getattr(layer, weight_name).mul_(alive)
    if module.gate is not None and (alive := masks.get(join_name(name, "gate"))) is not None:
        module.scale_units(alive, module.gate.side)
    gated = {}
    if module.gate is not None:
        gated = {id(weight): key for key, weight in module.gated_weights().items()}
    for layer_name, layer in layers.items():
        for weight_name, tensor in layer.noisy_tensors().items():
            if tensor.axes.input:
                variance = tensor.variance().expand_as(tensor.mean)
                if (key := gated.get(id(tensor.mean))) is not None:
                    variance = _variance_with_gate(tensor, variance, module, key)
                deviations[join_name(layer_name, weight_name)] = variance.sqrt()
    module.make_plain()
    module.__class__ = plain_types()[type(module)]  # type: ignore[assignment]


def _variance_with_gate(
    tensor: NoisyTensor, variance: Tensor, layer: Variational, key: str
) -> Tensor:
    """Var(z w) of every weight, z being a layer's gate: Var w (E z)^2 + Var z E(w^2).

    `key` is the weight's name among those that see the gate.
    """
    gate = layer.gate
    assert gate is not None
    unit_mean, log_alpha = gate.unit_mean(), gate.get_log_alpha()
    mean = torch.ones_like(variance)
    if unit_mean is not None:
        mean = mean * per_unit(layer.per_feature(unit_mean, key), variance, gate.side, tensor.axes)
    total = variance * mean.square()
    if log_alpha is None:
        return total
    finite = log_alpha.clamp(max=80.0).exp()  # also where E z, and with it the product, is zero
    alpha = per_unit(
        layer.per_feature(finite.expand(gate.units), key), variance, gate.side, tensor.axes
    )
    return total + alpha * mean.square() * (variance + to_float32_or_wider(tensor.mean).square())


def grid_steps(
    net: nn.Module, deviations: Mapping[str, Tensor], tolerance: float
) -> dict[str, float]:
    """How coarse every weight may be rounded: `tolerance` posterior deviations.

    Where no deviation is known, it is taken as a fraction of the weights' size.
    """
    tensors = net.state_dict()
    known_deviations = deviations or _assume_deviations(net)
    if unknown := sorted(set(known_deviations) - set(tensors)):
        raise VardropError(
            f"Expected `standard_deviations` to name tensors of the net, but got "
            f"{', '.join(unknown)}. Pack the result of vardrop.shrink as it is."
        )
    return {
        name: _step_for(name, deviation.to(tensors[name].device), tensors[name], tolerance)
        for name, deviation in known_deviations.items()
    }


def _assume_deviations(net: nn.Module) -> dict[str, Tensor]:
    deviations = {}
    for name, module in net.named_modules():
        if (
            LAYOUTS.get(type(module)) is not None
            and (weight := module._parameters.get("weight")) is not None
        ):
            nonzero = weight.detach()[weight != 0].double()
            size = float(nonzero.square().mean().sqrt()) if nonzero.numel() else 1.0
            if weight.dim() > 1:
                deviations[join_name(name, "weight")] = torch.full_like(weight, _ASSUMED * size)
    return deviations


def _step_for(name: str, deviation: Tensor, weight: Tensor, tolerance: float) -> float:
    """The step of a uniform grid: `tolerance` times the posterior deviation of the kept weights.

    The harmonic mean of the variances makes the mean of (step / deviation)^2 equal tolerance^2.
    """
    if deviation.shape != weight.shape:
        raise VardropError(
            f"Expected the standard deviations of '{name}' to have the shape "
            f"{tuple(weight.shape)}, but got {tuple(deviation.shape)}."
        )
    if not bool(weight.isfinite().all()):
        raise VardropError(
            f"Expected '{name}' to hold finite numbers, but got NaN or infinity. "
            "Such a net cannot be packed."
        )
    nonzero = weight != 0
    if not bool(nonzero.any()):
        return 1.0
    chosen = deviation[nonzero].double()
    if not bool((chosen.isfinite() & (chosen > 0)).all()):
        raise VardropError(
            f"Expected the standard deviations of '{name}' to be positive and finite, but got "
            f"{float(chosen.min())} to {float(chosen.max())}."
        )
    # Relative to the smallest, so that no square leaves the range of a double.
    smallest = float(chosen.min())
    mean = float((smallest / chosen).square().mean())
    return float(f"{tolerance * smallest / math.sqrt(mean):.{_GRID}g}")
