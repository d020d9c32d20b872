"""The fast path of `nn.TransformerEncoder`, which reads weights without calling their layers."""

from __future__ import annotations

from torch import nn

_FLAGS = {
    nn.TransformerEncoderLayer: "activation_relu_or_gelu",
    nn.TransformerEncoder: "use_nested_tensor",
}


def update_encoder_fastpath(net: nn.Module, noisy: type[nn.Module]) -> None:
    """Disable the fast path of encoders with a module of type `noisy` inside, enable it otherwise.

    The fast path would leave out the noise of weights and the means of gates.
    """
    for module in (m for m in net.modules() if isinstance(m, tuple(_FLAGS))):
        layers = [m for m in module.modules() if isinstance(m, nn.TransformerEncoderLayer)]
        replaced = any(not isinstance(m.self_attn, nn.MultiheadAttention) for m in layers)
        if replaced or any(isinstance(m, noisy) for m in module.modules()):
            disable_encoder_fastpath(module)
        else:
            vars(module).update(vars(module).pop("_fastpath", {}))


def disable_encoder_fastpath(module: nn.Module) -> None:
    """Disable the fast path of one module. Modules that are not encoders are left unchanged."""
    for kind, flag in _FLAGS.items():
        if isinstance(module, kind) and getattr(module, flag):
            vars(module)["_fastpath"] = {flag: getattr(module, flag)}
            setattr(module, flag, 0)


def is_encoder_fastpath_disabled(module: nn.Module) -> bool:
    """Whether `disable_encoder_fastpath` was called for a module."""
    return "_fastpath" in vars(module)
