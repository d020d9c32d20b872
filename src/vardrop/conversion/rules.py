"""The rules of conversion: their interface, noise in layers, and a head instead of the last layer.

There is one rule per kind of recipe. It decides which modules change, gives the reason for each
skipped module, and changes a module. The rule of `SwitchDropout` is in `dropout.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from vardrop._core.errors import VardropError
from vardrop._core.torch_private import own_parameters
from vardrop.estimators import flipout, local_reparameterization
from vardrop.gates import BetaBernoulli, DependentBetaBernoulli, Gate
from vardrop.heads import Head
from vardrop.layers import NOISY_TYPES, Ties, Variational
from vardrop.noisy import Noisy, NoisyTensor, named_modules_of
from vardrop.recipes import HeadRecipe, Recipe

# The weights of the base under an adapter, for example.
FROZEN = "its weights are frozen; name it with `include` if it is meant"


class Scope(NamedTuple):
    """The modules that a rule decides about."""

    net: nn.Module  # which contains them
    modules: Sequence[nn.Module]
    everywhere: bool = False  # whether `include` is missing
    example_input: Any = None


class ConversionRule(ABC):
    """The conversion of the modules of one model by one recipe."""

    rewrites: bool = False  # whether existing tensors get other values

    @abstractmethod
    def reason(self, module: nn.Module) -> str | None:
        """Why a module is skipped: empty if it changes, None if the plan does not list it."""

    def noisy_type(self, module: nn.Module) -> type[nn.Module] | None:
        """The noisy class of a plain module, or None."""
        return NOISY_TYPES.get(type(module))

    def becomes(self, module: nn.Module) -> str:
        """The text in a plan for a module that changes."""
        noisy = self.noisy_type(module)
        name, path = getattr(noisy, "__name__", ""), getattr(noisy, "__module__", "")
        return f"vardrop.{name}" if path.startswith("vardrop.layers.") else f"{path}.{name}"

    def weights(self, module: nn.Module) -> list[Tensor]:
        """The weights of a module and of its children that become noisy or gated."""
        weights = []
        for part in module.modules():
            noisy = NOISY_TYPES.get(type(part))
            names = ("weight",) if noisy is None else noisy.weights_of(part)
            weights += [w for name in names if (w := getattr(part, name, None)) is not None]
        return weights

    def check(self, net: nn.Module, changes: Mapping[str, nn.Module]) -> dict[str, str]:
        """Reasons to skip some of the selected modules. Raise if another one cannot be changed."""
        for name, module in changes.items():
            for weight in self.weights(module):
                if not weight.is_meta and not bool(torch.isfinite(weight).all()):
                    raise VardropError(
                        f"Expected the weights of module '{name or '(net)'}' to be finite, but got "
                        "NaN or infinity. Load a sound checkpoint, or train with a lower learning "
                        "rate."
                    )
        return {}

    @abstractmethod
    def change(self, module: nn.Module, noise: Ties) -> None:
        """Make a module noisy, also a plain module that a file describes as noisy.

        `noise` collects the noise tensors by weight, for tied weights.
        """


def has_parameters(module: nn.Module) -> bool:
    """Whether a module has parameters, apart from its children."""
    return any(True for _ in module.parameters(recurse=False))


def join_names(names: Sequence[str], most: int = 8) -> str:
    """Names for a sentence: all of a few, or the first of many.

    >>> join_names(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


# Why modules of these types and their subclasses are skipped. A selected noisy layer is an error.
_UNSUPPORTED: dict[type, str] = {
    Variational: "",
    Noisy: "a gate or head with its own noise",
    LazyModuleMixin: "its shape is not known yet; run one batch through the net first",
    nn.EmbeddingBag: "bags reduce rows inside one torch function",
}


# Layers that use one weight at several positions of an example. Local reparameterization would draw
# separate noise at each position, which is not the posterior predictive distribution of q(w).
_OVER_POSITIONS = (_ConvNd, nn.MultiheadAttention, nn.Embedding)


def layer_rule(recipe: Recipe, scope: Scope) -> ConversionRule:
    """The rule of a recipe: new noise in plain layers, or gates that replace existing gates."""
    if isinstance(recipe.gate, DependentBetaBernoulli) and not recipe.gate.joint:
        return _DependentGates(recipe, recipe.gate)
    if recipe.estimator is None:
        over_positions = any(isinstance(m, _OVER_POSITIONS) for m in scope.net.modules())
        default = flipout if over_positions else local_reparameterization
        recipe = replace(recipe, estimator=default)
    return NoisyLayers(recipe, scope.everywhere)


class NoisyLayers(ConversionRule):
    """Plain layers become the noisy layers of their types."""

    def __init__(self, recipe: Recipe, everywhere: bool) -> None:
        self.recipe, self.everywhere = recipe, everywhere
        self.rewrites = recipe.posterior is not None and recipe.posterior.zero_mean

    def reason(self, module: nn.Module) -> str | None:
        if not has_parameters(module) or type(module) is NonDynamicallyQuantizableLinear:
            return None  # the output projection of attention is converted with it
        if (noisy := NOISY_TYPES.get(type(module))) is None:
            for base in type(module).__mro__:
                if base in _UNSUPPORTED:
                    return _UNSUPPORTED[base]
                if base in NOISY_TYPES:
                    return f"a subclass of {base.__name__} with behaviour of its own"
            return "no weights that can be noisy"
        weights = [own_parameters(module).get(name) for name in noisy.weights_of(module)]
        trained = not self.everywhere or any(w is not None and w.requires_grad for w in weights)
        reason = noisy.unsupported_reason(module, self.recipe.gate) or ("" if trained else FROZEN)
        for weight in weights:
            if weight is None:
                reason = (
                    "its weight is computed from other tensors (weight_norm, spectral_norm) "
                    "before each pass; remove that first"
                )
            elif not weight.is_floating_point():
                reason = f"its weights are {weight.dtype}"
            elif weight.numel() == 0:
                reason = "no units to gate" if self.recipe.gate is not None else "it has no weights"
        return reason

    def check(self, net: nn.Module, changes: Mapping[str, nn.Module]) -> dict[str, str]:
        """A weight that is also used by a module without support for noise stays plain.

        The mean of a gate cannot be folded into a weight that an embedding uses too. Modules that
        are left out by name may be converted later, with the same noise. Raise if a selected module
        is noisy already, or if its weight has another method because another module uses it.
        """
        if self.recipe.posterior is None:
            embeddings = named_modules_of(net, nn.Embedding) if self.everywhere else {}
            reasons = dict.fromkeys(
                (id(module.weight) for module in embeddings.values()),
                "its weight is tied to an embedding, so its gate cannot be folded in; name it with "
                "`include` if it is meant",
            )
        else:
            reasons = {
                id(parameter): f"its weight is tied to '{name}', which stays plain"
                for name, module in net.named_modules()
                if self.reason(module)
                for parameter in module.parameters(recurse=False)
            }
        pairs = ((name, id(w)) for name, m in changes.items() for w in self.weights(m))
        tied = {name: reasons[weight] for name, weight in pairs if weight in reasons}
        changes = {name: module for name, module in changes.items() if name not in tied}
        for name, module in changes.items():
            if self.noisy_type(module) is None:
                raise VardropError(
                    f"Expected module '{name or '(net)'}' to be plain, but got "
                    f"{type(module).__name__}, which is noisy already. Leave it out with "
                    "`exclude`, or call vardrop.revert first."
                )
        super().check(net, changes)
        posterior, prior = self.recipe.posterior, self.recipe.prior
        noisy = {} if posterior is None else _noisy_tensors(net)
        for parameter in (p for m in changes.values() for p in m.parameters(recurse=False)):
            other = noisy.get(id(parameter))  # of a weight that another module uses too
            if other is not None and (posterior, prior) != (other.posterior, other.prior):
                raise VardropError(
                    "Expected modules with one weight to have one posterior and one prior, but got "
                    f"{posterior!r} with {prior!r} and {other.posterior!r} with {other.prior!r}. "
                    "Convert them with the same recipe, or untie them."
                )
        return tied

    def becomes(self, module: nn.Module) -> str:
        """A gate whose mean is not one at the start changes the outputs of a trained model."""
        gate, factor = self.recipe.gate, 1.0
        if gate is not None and not gate.input_dependent:
            with torch.device("cpu"):  # also inside a block for the meta device
                mean = gate.unit_mean(gate.initial(1))
            factor = 1.0 if mean is None else float(mean.mean())
        moves = abs(factor - 1) >= 1e-3
        text = f", features times {factor:.3g} at the start" if moves else ""
        return super().becomes(module) + text

    def change(self, module: nn.Module, noise: Ties) -> None:
        r = self.recipe
        assert r.estimator is not None  # `layer_rule` chooses it
        module.__class__ = NOISY_TYPES[type(module)]
        cast(Variational, module).add_noise(
            r.posterior, r.prior, r.estimator, r.gate, r.noisy_bias, tied=noise
        )


class _DependentGates(ConversionRule):
    """Beta-Bernoulli gates of trained layers are taken over by gates that build on them."""

    def __init__(self, recipe: Recipe, gate: DependentBetaBernoulli) -> None:
        self.recipe, self.gate = recipe, gate

    def reason(self, module: nn.Module) -> str | None:
        if not has_parameters(module):
            return None
        gate = module.gate if isinstance(module, Variational) else None
        if gate is not None and isinstance(gate.noise, BetaBernoulli):
            return ""
        return (
            "no Beta-Bernoulli gate to build on; convert with beta_bernoulli() and train first, "
            "or use joint=True"
        )

    def becomes(self, module: nn.Module) -> str:
        return f"its gate is taken over by {type(self.gate).__name__}"

    def check(self, net: nn.Module, changes: Mapping[str, nn.Module]) -> dict[str, str]:
        if self.recipe.posterior is not None:
            raise VardropError(
                f"Expected no `posterior` with a gate that takes over trained gates, but got "
                f"{self.recipe.posterior!r}. The weights keep their posterior. Leave it out."
            )
        return super().check(net, changes)

    def change(self, module: nn.Module, noise: Ties) -> None:
        if not isinstance(module, Variational):  # from a file
            NoisyLayers(replace(self.recipe, gate=self.gate.base), False).change(module, noise)
        module.gate = self.gate.take_over(cast(Gate, module.gate))


class LastLayer(ConversionRule):
    """One linear layer becomes a head: the last layer, or the layer that `include` names."""

    def __init__(self, recipe: HeadRecipe, scope: Scope) -> None:
        self.recipe, self.everywhere = recipe, scope.everywhere
        linear = [m for m in scope.modules if type(m) is nn.Linear]
        self.allowed = {id(m) for m in (linear[-1:] if scope.everywhere else linear)}

    def reason(self, module: nn.Module) -> str | None:
        if not has_parameters(module):
            return None
        if type(module) is not nn.Linear:
            return "a head takes the place of a linear layer"
        if id(module) not in self.allowed:
            return "not the last linear layer; name another with `include`"
        if module.out_features < 2:
            return "one output; a head needs at least 2 classes"
        return "" if module.weight.requires_grad or not self.everywhere else FROZEN

    def noisy_type(self, module: nn.Module) -> type[nn.Module] | None:
        return Head if type(module) is nn.Linear else None

    def becomes(self, module: nn.Module) -> str:
        return f"vardrop.Head with {self.recipe.rule!r}"

    def check(self, net: nn.Module, changes: Mapping[str, nn.Module]) -> dict[str, str]:
        if len(changes) > 1:
            raise VardropError(
                f"Expected `include` to select one linear layer for the head, but got "
                f"{join_names(list(changes))}. Name the last one."
            )
        return super().check(net, changes)

    def change(self, module: nn.Module, noise: Ties) -> None:
        module.__class__ = Head
        cast(Head, module).make_head(self.recipe.rule)


def ties(net: nn.Module) -> Ties:
    """The noise tensors of a model, by the id of their weight or bias."""
    return {key: {**tensor.noise, **tensor.hyper} for key, tensor in _noisy_tensors(net).items()}


def _noisy_tensors(net: nn.Module) -> dict[int, NoisyTensor]:
    layers = named_modules_of(net, Variational).values()
    return {id(t.mean): t for layer in layers for t in layer.noisy_tensors().values()}
