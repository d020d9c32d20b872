"""Dropout in the code of unregistered classes, found by running them in training mode."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from vardrop._core.calls import call_net, clone_batch, tensors_in
from vardrop._core.encoder import disable_encoder_fastpath
from vardrop._core.errors import VardropError
from vardrop._core.modules import clone_modules
from vardrop._core.torch_private import OpOverload, schema, tree_map_only
from vardrop.functional import (
    GeneratorNoise,
    RandomOpMode,
    call_with_generator,
    draw_from,
    restore_state_on_error,
)
from vardrop.functional.random import Answer
from vardrop.gates.functional_dropout import is_custom
from vardrop.noisy import Noisy


@restore_state_on_error
def find_functional_dropout(
    net: nn.Module, example_input: Any, training: bool = True
) -> dict[str, float]:
    """Find the rates of dropout in custom code, by the name of the innermost module that draws.

    It runs one pass of a copy. Classes of other packages that are not registered are in training
    mode. The model, its modes and its BatchNorm are unchanged. Dropout means torch functions with a
    drop rate: `dropout` and its variants, attention and `bernoulli`.

    Args:
        net: a model.
        example_input: an input of the model.
        training: the mode of these classes. False finds dropout that evaluation mode draws too.

    Returns:
        The rates by module name.

    >>> import torch
    >>> class Block(torch.nn.Module):
    ...     __module__ = "mine"  # a class of your own
    ...     def forward(self, x):
    ...         return torch.nn.functional.dropout(x, 0.25, self.training)
    >>> find_functional_dropout(torch.nn.Sequential(Block(), torch.nn.Dropout()), torch.ones(3))
    {'0': 0.25}
    """
    # The largest rate of a module comes last.
    return {name: rate for name, _, rate in sorted(_dropout_calls(net, example_input, training))}


def find_unswitched_dropout(net: nn.Module, x: Any) -> list[str]:
    """Find custom modules that draw dropout in training mode only, so that predictions lack it.

    A model is searched once, and again after a class or a number among the attributes has changed.
    An error is raised if the training mode of such a module controls more than dropout.

    Args:
        net: a model.
        x: a batch.

    Returns:
        The names of the modules.
    """
    modules = list(net.modules())
    seen = [(type(m), [v for v in list(vars(m).values()) if type(v) is float]) for m in modules]
    if (checked := _CHECKED.get(net)) is not None and checked[0] == seen:
        return checked[1]
    missed = Counter(_dropout_calls(net, x, training=True) if any(map(is_custom, modules)) else ())
    if missed:
        missed -= Counter(_dropout_calls(net, x, training=False))
    names = list(dict.fromkeys(name for name, *_ in missed))
    if names and not controls_only_dropout(net, x, names):
        name, kind, rate = next(iter(missed))
        raise VardropError(
            f"Expected dropout that can be switched, but got dropout of {rate:g} in the code of "
            f"module '{name or '(net)'}' ({kind}), whose training mode controls more than dropout, "
            "so that predictions would be without it. Call a dropout module instead, such as "
            f"torch.nn.Dropout({rate:g}); or call "
            f"vardrop.gates.register_functional_dropout({kind}, ...) with its rates."
        )
    _CHECKED[net] = seen, names
    return names


# By model the types and numbers that were seen, and the names of the modules that were listed.
_CHECKED: WeakKeyDictionary[nn.Module, tuple[list[Any], list[str]]] = WeakKeyDictionary()


def controls_only_dropout(net: nn.Module, x: Any, names: Container[str]) -> bool:
    """Whether the training mode of some modules changes an output by its dropout only.

    With the expected value of every mask, the outputs of both modes are equal then.

    Args:
        net: a model.
        x: a batch.
        names: of the modules.

    Returns:
        Whether the outputs are equal.
    """
    evaluated, trained = (
        tensors_in(_rehearse(net, x, _expected_mask, chosen, [])) for chosen in ((), names)
    )
    return len(evaluated) == len(trained) and all(
        a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)
        for a, b in zip(evaluated, trained, strict=True)
    )


def _expected_mask(function: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a random function, with the expected value of a mask of dropout."""
    name = schema(function).name
    if name == "aten::native_dropout":
        return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
    if "bernoulli" not in name:
        return call_with_generator(function, args, kwargs)
    probability = args[1] if len(args) > 1 else kwargs.get("p", 0.5 if "_" in name else args[0])
    mask = args[0] if name.endswith("_") else torch.empty_like(args[0])
    return mask.copy_(torch.as_tensor(probability, dtype=mask.dtype).expand_as(mask))


def _dropout_calls(net: nn.Module, x: Any, training: bool) -> list[tuple[str, str, float]]:
    """The custom modules that draw dropout in a pass of a copy: names, classes and rates."""
    entered: list[tuple[str, str]] = []
    drawn: list[tuple[str, str, float]] = []

    def answer(function: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        rate = _rate_of_call(function, args, kwargs)
        if rate > 0 and entered:
            drawn.append((*entered[-1], rate))
        return call_with_generator(function, args, kwargs)

    _rehearse(net, x, answer, None if training else (), entered)
    return drawn


def _rehearse(
    net: nn.Module,
    x: Any,
    answer: Answer,
    names: Container[str] | None,
    entered: list[tuple[str, str]],
) -> Any:
    """The output of a pass of a copy with some modules in training mode, which changes nothing.

    These are the modules with the names, or all custom ones for None. `entered` lists the custom
    modules that are running, with their classes.
    """
    twin, data = clone_modules(net), [(p, p.data) for p in net.parameters()]
    for name, module in twin.named_modules():
        disable_encoder_fastpath(module)
        custom = is_custom(module)
        module.training = custom if names is None else name in names
        if isinstance(module, Noisy):
            module.sampling = False
        if custom:
            for key, buffer in module._buffers.items():  # which a BatchNorm writes into
                module._buffers[key] = None if buffer is None else buffer.clone()
            entry = name, type(module).__name__
            module.register_forward_pre_hook(lambda *_, entry=entry: entered.append(entry))
            module.register_forward_hook(lambda *_: entered.pop() and None)
    try:
        with torch.no_grad(), draw_from(GeneratorNoise(0)), _Rehearsal(answer, net):
            return call_net(twin, clone_batch(x))
    except Exception as error:
        error.add_note(
            "vardrop ran the code of custom classes in training mode, to look for dropout in it. "
            "If a class cannot run like this, register that it has none: "
            "vardrop.gates.register_functional_dropout(kind, lambda module: {})."
        )
        raise
    finally:
        for parameter, before in data:
            if parameter.data_ptr() != before.data_ptr():
                parameter.data = before


class _Rehearsal(RandomOpMode):
    """`RandomOpMode` in which writes into tensors of the model go to copies."""

    def __init__(self, answer: Answer, net: nn.Module) -> None:
        super().__init__(answer)
        self.storages = set(map(_storage, chain(net.parameters(), net.buffers()))) - {0}

    def __torch_dispatch__(
        self,
        function: OpOverload,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if schema(function).is_mutable:
            args, kwargs = tree_map_only(
                Tensor, lambda t: t.clone() if _storage(t) in self.storages else t, (args, kwargs)
            )
        return super().__torch_dispatch__(function, types, args, kwargs)


def _storage(tensor: Tensor) -> int:
    """The address of the memory of a tensor, or 0 for an empty or a sparse tensor."""
    strided = tensor.layout == torch.strided and tensor.numel() > 0
    return tensor.untyped_storage().data_ptr() if strided else 0


def _rate_of_call(function: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """The drop rate of a random function of torch, or zero if it is no dropout."""
    arguments = schema(function).arguments
    options = {a.name: a.default_value for a in arguments if a.has_default_value()}
    options |= {a.name: option for a, option in zip(arguments, args, strict=False)} | kwargs
    if "bernoulli" in schema(function).name:  # its argument is the probability of a one
        keep = torch.as_tensor(options.get("p", args[0]), dtype=torch.float64)
        return round(1 - float(keep.mean()), 6)
    rate = options.get("p" if "dropout" in schema(function).name else "dropout_p")
    return 0.0 if rate is None else float(rate)
