"""Why a module stays as it is under a recipe."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from vardrop.conversion.dropout import dropout_reason, handed_on
from vardrop.gates import DROPOUT_TYPES, BetaBernoulli, DependentBetaBernoulli
from vardrop.layers import NOISY_TYPES, Embedding, Variational
from vardrop.noisy import Noisy
from vardrop.recipes import Recipe

# The reason to leave a module as it is, empty where it changes, None where it is not concerned.
Reason = Callable[[nn.Module], str | None]

_UNSUPPORTED: dict[type[nn.Module], str] = {
    nn.MultiheadAttention: "attention multiplies its packed weights inside one torch function",
    nn.LSTM: "recurrent layers run inside one torch function",
    nn.GRU: "recurrent layers run inside one torch function",
    nn.RNN: "recurrent layers run inside one torch function",
    nn.LSTMCell: "recurrent cells run inside one torch function",
    nn.GRUCell: "recurrent cells run inside one torch function",
    nn.RNNCell: "recurrent cells run inside one torch function",
    nn.EmbeddingBag: "bags reduce rows inside one torch function",
}


def reasons(modules: list[nn.Module], recipe: Recipe, everywhere: bool) -> Reason:
    """The question to ask of every module of a net, for one recipe.

    `everywhere` is True where no `where` narrows the choice.
    """
    if recipe.head is not None:
        linear = [m for m in modules if type(m) is nn.Linear]
        allowed = linear[-1:] if everywhere else linear
        return lambda module: _unless_frozen(_head_reason(module, allowed), module, everywhere)
    if recipe.existing and any(type(m) in DROPOUT_TYPES for m in modules):
        handed = handed_on(modules)
        return lambda module: dropout_reason(module, handed)
    return lambda module: _unless_frozen(_layer_reason(module, recipe), module, everywhere)


def _unless_frozen(reason: str | None, module: nn.Module, everywhere: bool) -> str | None:
    """Nobody asked for noise on weights that are not trained, as the base under an adapter is."""
    if reason != "" or not everywhere or type(module) not in NOISY_TYPES:
        return reason
    weight = module.weight
    assert isinstance(weight, Tensor)
    return (
        ""
        if weight.requires_grad
        else "its weights are frozen; name it with `where` if it is meant"
    )


def _head_reason(module: nn.Module, allowed: list[nn.Linear]) -> str | None:
    if not list(module.parameters(recurse=False)):
        return None
    if type(module) is not nn.Linear:
        return "a head takes the place of a linear layer"
    if not any(module is m for m in allowed):
        return "not the last linear layer; name another with `where`"
    return "one output; a head needs at least 2 classes" if module.out_features < 2 else ""


def _layer_reason(module: nn.Module, recipe: Recipe) -> str | None:
    hidden = dropout_reason(module, frozenset()) if recipe.existing else None
    if hidden:
        return hidden
    if not list(module.parameters(recurse=False)) and not isinstance(module, LazyModuleMixin):
        return None
    if recipe.existing and recipe.gate is None:
        return "the net has no dropout module; give `drop_rate` to put gates before its layers"
    return reason_to_skip(module, recipe)


def reason_to_skip(module: nn.Module, recipe: Recipe) -> str:
    """Why a module cannot take the recipe; empty where it can."""
    if is_staged(recipe):
        return _dependent_reason(module)
    if isinstance(module, Variational):
        return ""  # refused by name, where it is selected
    return _own_reason(module, recipe) if type(module) in NOISY_TYPES else _kind_reason(module)


def _kind_reason(module: nn.Module) -> str:
    if isinstance(module, Noisy):
        return "a gate or head with noise of its own"
    if isinstance(module, LazyModuleMixin):
        return "its shape is not known yet; run one batch through the net first"
    if type(module) in _UNSUPPORTED:
        return _UNSUPPORTED[type(module)]
    base = next((b for b in NOISY_TYPES if isinstance(module, b)), None)
    if base is not None:
        return f"a subclass of {base.__name__} with behaviour of its own"
    return "no weights that can be noisy"


def _own_reason(module: nn.Module, recipe: Recipe) -> str:
    weight = module.weight
    assert isinstance(weight, Tensor)
    if "weight" not in module._parameters:
        return (
            "its weight is computed from other tensors (weight_norm, spectral_norm) before each "
            "pass; remove that first"
        )
    if not weight.is_floating_point():
        return f"its weights are {weight.dtype}"
    if weight.numel() == 0:
        return "no units to gate" if recipe.gate is not None else "it has no weights"
    return _embedding_reason(module, recipe) if isinstance(module, nn.Embedding) else ""


def is_staged(recipe: Recipe) -> bool:
    """Whether the recipe takes over the gates of a net that is noisy already."""
    return isinstance(recipe.gate, DependentBetaBernoulli) and not recipe.gate.joint


def _dependent_reason(module: nn.Module) -> str:
    gate = module.gate if isinstance(module, Variational) else None
    if gate is not None and isinstance(gate.noise, BetaBernoulli):
        return ""
    return (
        "no Beta-Bernoulli gate to build on; convert with beta_bernoulli() and train first, "
        "or use joint=True"
    )


def _embedding_reason(module: nn.Embedding, recipe: Recipe) -> str:
    if module.max_norm is not None:
        return "max_norm rewrites its weights in the forward pass"
    if module.sparse:
        return "sparse gradients do not go with a KL over all weights"
    if recipe.gate is not None:
        return f"an index has no features to gate ({Embedding.__name__} takes posteriors only)"
    return ""
