"""Noise on the weights and features of layers: the kind of `Recipe`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from vardrop._core.errors import VardropError
from vardrop.conversion.rules import ConversionRule, has_parameters
from vardrop.gates import FeatureNoise, Gate
from vardrop.layers import NOISY_TYPES, Ties, Variational
from vardrop.noisy import Noisy, named_modules_of
from vardrop.recipes import Recipe

# Nobody asked for noise on weights that are not trained, as the base under an adapter is.
FROZEN = "its weights are frozen; name it with `include` if it is meant"
# Why modules of these types, or of subclasses, stay; a noisy layer is refused where it is selected.
_UNSUPPORTED: dict[type, str] = {
    Variational: "",
    Noisy: "a gate or head with noise of its own",
    LazyModuleMixin: "its shape is not known yet; run one batch through the net first",
    nn.EmbeddingBag: "bags reduce rows inside one torch function",
}


def layer_rule(recipe: Recipe, modules: Sequence[nn.Module], everywhere: bool) -> ConversionRule:
    """The kind of a recipe: new noise in plain layers, or gates on top of gates that are there."""
    gate = recipe.gate
    if gate is not None and gate.parent_noise is not None:
        return _TakenOver(recipe, gate, gate.parent_noise)
    return NoisyLayers(recipe, everywhere)


class NoisyLayers(ConversionRule):
    """Plain layers become the noisy layers of their types."""

    def __init__(self, recipe: Recipe, everywhere: bool) -> None:
        self.recipe, self.everywhere = recipe, everywhere
        self.rewrites = recipe.posterior is not None and recipe.posterior.zero_mean

    def reason(self, module: nn.Module) -> str | None:
        if not has_parameters(module) or type(module) is NonDynamicallyQuantizableLinear:
            return None  # the output projection of attention goes with it
        if type(module) in NOISY_TYPES:
            return self._own_reason(module)
        for base in type(module).__mro__:
            if base in _UNSUPPORTED:
                return _UNSUPPORTED[base]
            if base in NOISY_TYPES:
                return f"a subclass of {base.__name__} with behaviour of its own"
        return "no weights that can be noisy"

    def _own_reason(self, module: nn.Module) -> str:
        noisy = NOISY_TYPES[type(module)]
        weights = [module._parameters.get(name) for name in noisy.weights_of(module)]
        for weight in weights:
            if weight is None:
                return (
                    "its weight is computed from other tensors (weight_norm, spectral_norm) "
                    "before each pass; remove that first"
                )
            if not weight.is_floating_point():
                return f"its weights are {weight.dtype}"
            if weight.numel() == 0:
                return "no units to gate" if self.recipe.gate is not None else "it has no weights"
        asked = not self.everywhere or any(w is not None and w.requires_grad for w in weights)
        return noisy.unsupported_reason(module, self.recipe.gate) or ("" if asked else FROZEN)

    def tie_reasons(self, net: nn.Module, changes: Mapping[str, nn.Module]) -> Mapping[str, str]:
        """A weight that a module which cannot be noisy has too stays plain: it is one weight.

        Modules that are left out by name may be converted later, with the same noise.
        """
        if self.recipe.posterior is None:
            return {}
        plain = {
            id(parameter): name
            for name, module in net.named_modules()
            if self.reason(module)
            for parameter in module.parameters(recurse=False)
        }
        return {
            name: f"its weight is tied to '{plain[id(weight)]}', which stays plain"
            for name, module in changes.items()
            for weight in self.weights(module)
            if id(weight) in plain
        }

    def check(self, net: nn.Module, changes: Mapping[str, nn.Module]) -> None:
        for name, module in changes.items():
            if self.noisy_type(module) is None:
                raise VardropError(
                    f"Expected module '{name or '(net)'}' to be plain, but got "
                    f"{type(module).__name__}, which is noisy already. Leave it out with "
                    "`exclude`, or call vardrop.revert first."
                )
        super().check(net, changes)
        self._check_ties(net, changes)

    def _check_ties(self, net: nn.Module, changes: Mapping[str, nn.Module]) -> None:
        """Refuse a second method for a weight that another module has made noisy."""
        mine = self.recipe.posterior, self.recipe.prior
        layers = named_modules_of(net, Variational).values()
        there = {id(t.mean): t for layer in layers for t in layer.noisy_tensors().values()}
        for parameter in (p for m in changes.values() for p in m.parameters(recurse=False)):
            other = there.get(id(parameter))
            if mine[0] is None or other is None or mine == (other.posterior, other.prior):
                continue
            raise VardropError(
                "Expected modules with one weight to have one posterior and one prior, but got "
                f"{mine[0]!r} with {mine[1]!r} beside {other.posterior!r} with {other.prior!r}. "
                "Convert them with the same recipe, or untie them."
            )

    def change(self, module: nn.Module, noise: Ties) -> None:
        r = self.recipe
        method = r.posterior, r.prior, r.estimator, r.gate, r.noisy_bias
        module.__class__ = NOISY_TYPES[type(module)]
        cast(Variational, module).add_noise(*method, noise)


class _TakenOver(ConversionRule):
    """Gates of trained layers are taken over by gates that build on them; the weights stay."""

    def __init__(self, recipe: Recipe, gate: FeatureNoise, base: FeatureNoise) -> None:
        self.recipe, self.gate, self.base = recipe, gate, base

    def reason(self, module: nn.Module) -> str | None:
        if not has_parameters(module):
            return None
        there = _gate_of(module)
        return self.gate.takeover_error(None if there is None else there.noise)

    def becomes(self, module: nn.Module) -> str:
        return f"its gate is taken over by {type(self.gate).__name__}"

    def check(self, net: nn.Module, changes: Mapping[str, nn.Module]) -> None:
        super().check(net, changes)
        if self.recipe.posterior is not None:
            raise VardropError(
                f"Expected no `posterior` beside a gate that takes over trained ones, but got "
                f"{self.recipe.posterior!r}. The weights keep what they have; leave it out."
            )

    def change(self, module: nn.Module, noise: Ties) -> None:
        there = _gate_of(module)
        assert there is not None
        module.gate = self.gate.take_over(there)

    def restore(self, module: nn.Module, noise: Ties) -> None:
        NoisyLayers(replace(self.recipe, gate=self.base), False).change(module, noise)
        self.change(module, noise)


def ties(net: nn.Module) -> Ties:
    """The noise that is there, by the weight or bias that it belongs to."""
    noise: Ties = {}
    for layer in named_modules_of(net, Variational).values():
        for tensor in layer.noisy_tensors().values():
            noise.setdefault(id(tensor.mean), {}).update({**tensor.noise, **tensor.hyper})
    return noise


def _gate_of(module: nn.Module) -> Gate | None:
    return module.gate if isinstance(module, Variational) else None
