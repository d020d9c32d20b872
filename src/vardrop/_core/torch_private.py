"""Every private name of torch that the library relies on, with the reason.

A torch release may move or remove any of them. Import them from here, so that one file changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch._C import FunctionSchema, _functorch

# torch.compiler.disable does the same, but imports the compiler, which takes a second.
from torch._compile import _disable_dynamo as disable_dynamo

# The type of the functions that such modes receive.
from torch._ops import OpOverload as OpOverload
from torch.autograd import forward_ad
from torch.nn import functional
from torch.overrides import TorchFunctionMode

# Modes that intercept every operation, also inside modules of other libraries.
from torch.utils._python_dispatch import (
    TorchDispatchMode as TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
)

# For batches of nested tuples, lists and dictionaries. torch.utils has no public functions.
from torch.utils._pytree import (
    tree_leaves as tree_leaves,
    tree_map as tree_map,
    tree_map_only as tree_map_only,
)

Function = TypeVar("Function", bound=Callable[..., Any])


class FunctionContext(Protocol):
    """The `ctx` of an `autograd.Function`. torch has no public type with the saved tensors."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    save_for_backward: Callable[..., None]
    save_for_forward: Callable[..., None]
    set_materialize_grads: Callable[[bool], None]


def in_transform() -> bool:
    """Whether a `torch.func` transform such as vmap is active. There is no public query."""
    return torch._C._are_functorch_transforms_active()


def in_forward_mode() -> bool:
    """Whether derivatives are carried forwards (`torch.func.jvp`). There is no public query."""
    return forward_ad._current_level >= 0


def in_checkpoint() -> bool:
    """Whether activation checkpointing replaces saved tensors. There is no public query."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def save_modes() -> Callable[[], None]:
    """A function that ends all transforms and dispatch modes which begin after this call.

    An interrupt may come before their context managers are able to do so.
    """
    depth = _functorch.get_dynamic_layer_stack_depth()
    modes = len(_get_current_dispatch_mode_stack())

    def restore() -> None:
        _functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
        while len(_get_current_dispatch_mode_stack()) > modes:
            _pop_mode()

    return restore


def disable_compiler(function: Function, reason: str) -> Function:
    """A function that `torch.compile` does not trace. `fullgraph=True` reports the reason."""
    untraced: Any = disable_dynamo(function, recursive=False)
    untraced._torchdynamo_disable, untraced._torchdynamo_disable_msg = True, reason
    return untraced


def schema(operator: OpOverload) -> FunctionSchema:
    """The declaration of an operator: its name and its arguments."""
    return operator._schema


def backward_hooks(tensor: Tensor) -> list[Callable[[Tensor], Tensor | None]]:
    """The hooks that `Tensor.register_hook` added. There is no public query."""
    return list((tensor._backward_hooks or {}).values())


def unwrap(net: nn.Module) -> nn.Module:
    """The module inside a wrapper for compilation or data-parallel training, else the module.

    `torch.compile` keeps the model under `_orig_mod` and gives no public access to it.
    """
    if isinstance(net, nn.parallel.DistributedDataParallel | nn.DataParallel):
        return unwrap(net.module)
    inner = net._modules.get("_orig_mod")
    return net if inner is None else unwrap(inner)


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The parameters of one module by name, None included. The public iterators skip ties."""
    return module._parameters


def own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers of one module by name, including ties, without its children."""
    for tensors in (module._parameters, module._buffers):
        yield from ((name, t) for name, t in tensors.items() if t is not None)


def has_plain_forward(module: nn.Module) -> bool:
    """Whether a call of a module runs the `forward` of its class: no hook, no replaced method."""
    return not (module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def separate_state(state: dict[str, Any]) -> None:
    """Cut the last links of a copied module state to the module that it was copied from."""
    state.pop("_compiled_call_impl", None)  # it would call the original
    if "_flat_weights" in state:  # a recurrent layer writes into this list
        state["_flat_weights"] = list(state["_flat_weights"])


def set_parameters(state: dict[str, Any], parameters: Mapping[str, Tensor | None]) -> None:
    """Put other parameters into the state of a module, and into the list of a recurrent layer."""
    state["_parameters"] = parameters
    if "_flat_weights_names" in state:
        names = state["_flat_weights_names"]
        state["_flat_weights"] = [parameters.get(name) for name in names]
        # torch would otherwise notice that these are not its parameters.
        state["_flat_weight_refs"] = [None] * len(names)


class PlainAttention(TorchFunctionMode):
    """Compute attention as matrix products and a softmax.

    Fused kernels treat a NaN score as masked, their products are not counted, and exporters have no
    dropout in them.
    """

    def __torch_function__(
        self,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> Any:
        if func is not functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return torch.ops.aten._scaled_dot_product_attention_math(*args, **(kwargs or {}))[0]
