"""Turn a noisy model into a plain one with zeros for its pruned weights."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import SupportsFloat

import torch
from torch import Tensor, nn

from vardrop._core.encoder import disable_encoder_fastpath
from vardrop._core.errors import VardropError, report_arguments
from vardrop._core.integrations import load_integration
from vardrop._core.modules import parameter_owners
from vardrop.compression.layer_views import join_name, replace_module
from vardrop.compression.modules.pruned_attention import SlimAttention
from vardrop.compression.modules.pruned_recurrent import Unrolled
from vardrop.compression.modules.select import Scale
from vardrop.functional import to_float32_or_wider
from vardrop.gates import Gate, SwitchableDropout, per_unit
from vardrop.layers import Variational, plain_types
from vardrop.noisy import Noisy, NoisyTensor, Relevance, named_modules_of, relevance, tensor_name

# One number for every noisy module, one number per module name, or the rules of the methods.
Thresholds = SupportsFloat | Mapping[str, float] | None


def rules(net: nn.Module, threshold: Thresholds = None) -> dict[str, Relevance]:
    """The relevance of every noisy module, with the given threshold."""
    relevances = relevance(net) if named_modules_of(net, Noisy) else {}
    if threshold is None:
        return relevances
    with report_arguments("threshold"):
        for number in threshold.values() if isinstance(threshold, Mapping) else [threshold]:
            # Infinity keeps everything or nothing.
            if not isinstance(number, SupportsFloat) or math.isnan(float(number)):
                raise VardropError(
                    "Expected `threshold` to be a number or numbers by module name, but got "
                    f"{number!r}."
                )
    if not relevances:
        raise VardropError(
            "Expected `net` to have a method with a pruning rule, but got none. Use a recipe such "
            "as vardrop.sparse_vd(), or pass no threshold."
        )
    if not isinstance(threshold, Mapping):
        if len({(r.threshold, r.keep_above) for r in relevances.values()}) > 1:
            raise VardropError(
                f"Expected one threshold for modules with one rule, but got {threshold} for "
                f"several rules. Pass one threshold for each of {sorted(relevances)}."
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


def check_means(net: nn.Module, what: str) -> None:
    """Raise an error for layers of mean zero, which a plain model cannot represent."""
    for name, layer in named_modules_of(net, Variational).items():
        if layer.posterior is not None and layer.posterior.zero_mean:
            raise VardropError(
                f"Expected layers that have means {what}, but got '{name}' "
                f"({type(layer).__name__}) with {layer.posterior!r}, whose weights are only noise. "
                "Keep it noisy: vardrop.freeze predicts and exports with its draws."
            )


def zero_pruned_weights(
    net: nn.Module, threshold: Thresholds = None
) -> tuple[nn.Module, dict[str, Tensor]]:
    """Make a plain copy of a noisy model with zeros for its pruned weights.

    Args:
        net: a noisy model, or a plain model whose pruned weights are zero. It is left unchanged.
        threshold: on each method's relevance, as in `shrink`.

    Returns:
        The copy in evaluation mode, and the posterior standard deviation of every noisy weight by
        its name.

    >>> import vardrop as vd
    >>> net = vd.convert(nn.Linear(3, 2), vd.sparse_vd())
    >>> plain, deviations = zero_pruned_weights(net)
    >>> plain, list(deviations)
    (Linear(in_features=3, out_features=2, bias=True), ['weight'])
    """
    alive = {name: r.kept for name, r in rules(net, threshold).items()}
    plain = copy.deepcopy(net).eval()
    deviations: dict[str, Tensor] = {}
    layers, owners = named_modules_of(plain, Variational), parameter_owners(plain)
    for layer in layers.values():
        layer.check_gate_folds(owners)
    for name, module in list(plain.named_modules()):
        if name and name.rpartition(".")[0] in layers:
            continue  # the gate of a layer is folded into the layer
        if isinstance(module, Variational):
            _make_layer_plain(module, name, alive, deviations)
        elif isinstance(module, SwitchableDropout):
            plain = replace_module(plain, name, nn.Identity())
        elif isinstance(module, Gate):
            factors = [t for t in (module.unit_mean(), alive.get(name)) if t is not None]
            scaled: nn.Module = nn.Identity()
            if factors:
                factor = math.prod(factors, start=torch.ones(())).detach()
                scaled = Scale(factor.expand(module.units).clone(), module.axis)
            plain = replace_module(plain, name, scaled)
    return plain, deviations


_DECOMPOSED: dict[type[nn.Module], Callable[..., SlimAttention | Unrolled]] = {
    nn.MultiheadAttention: SlimAttention,
    **dict.fromkeys((nn.RNN, nn.LSTM, nn.GRU), Unrolled),
}


def decompose_layers(net: nn.Module) -> nn.Module:
    """Replace attention and recurrent layers by dense layers, in place.

    Layers that share their weights, and attention with `add_bias_kv`, are left unchanged.
    """
    named = list(net.named_modules(remove_duplicate=False))
    owners, names = parameter_owners(net), Counter(id(m) for _, m in named)
    for name, module in named:
        load_integration(type(module))
        make = _DECOMPOSED.get(type(module))
        shared = names[id(module)] > 1 or any(owners[id(p)] > 1 for p in module.parameters())
        if make is not None and not shared and getattr(module, "bias_k", None) is None:
            net = replace_module(net, name, make(module))
    for module in net.modules():
        disable_encoder_fastpath(module)
    return net


def recompose_layers(net: nn.Module) -> nn.Module:
    """Replace dense layers by torch's recurrent layers, and by its attention if no head is gone."""
    for name, layer in list(net.named_modules()):
        if isinstance(layer, SlimAttention | Unrolled) and (plain := layer.recompose()) is not None:
            net = replace_module(net, name, plain)
    return net


@torch.no_grad()
def _make_layer_plain(
    module: Variational, name: str, masks: dict[str, Tensor], deviations: dict[str, Tensor]
) -> None:
    """Zero the pruned weights and the weights of pruned gate units, and remove the noise."""
    parts = {join_name(name, part_name): part for part_name, part in module.sublayers().items()}
    layers, gate = {name: module, **parts}, module.gate
    for layer_name, layer in layers.items():
        for weight_name in layer.weight_axes:
            if (alive := masks.get(tensor_name(layer_name, weight_name))) is not None:
                getattr(layer, weight_name).mul_(alive)
    if gate is not None and (alive := masks.get(join_name(name, "gate"))) is not None:
        module.scale_units(alive, gate.side)
    gated = {id(weight): key for key, weight in module.gated_weights().items()} if gate else {}
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
    """Var(z w) of every weight w and the gate z of its layer: Var w (E z)^2 + Var z E(w^2).

    `key` is the name of the weight among the gated weights.
    """
    gate = layer.gate
    assert gate is not None

    def per_weight(units: Tensor) -> Tensor:
        return per_unit(layer.per_feature(units, key), variance, gate.side, tensor.axes)

    unit_mean, log_alpha = gate.unit_mean(), gate.get_log_alpha()
    mean = torch.ones_like(variance) if unit_mean is None else per_weight(unit_mean)
    total = variance * mean.square()
    if log_alpha is None:
        return total
    # The limit keeps alpha finite if E z, and with it the product, is zero.
    alpha = per_weight(log_alpha.clamp(max=80.0).exp().expand(gate.units))
    return total + alpha * mean.square() * (variance + to_float32_or_wider(tensor.mean).square())
