"""What depends on the data: one pass through a net in which NaN marks data and zeros stop it.

The input is all NaN. An affine layer passes the mark on only through weights that are not zero, so
at every layer's input NaN means "depends on the data" and a number is a constant of the net, with
its exact value at every position, padding borders included.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from vardrop.checks import check_net, shown
from vardrop.compression.layout import AFFINE, affine_layers, channel_axis
from vardrop.compression.parts import Scale
from vardrop.errors import VardropError
from vardrop.noisy import Noisy

Inputs = tuple[Any, ...]


def as_inputs(example_input: Any) -> Inputs:
    """The positional arguments of a net, from one tensor or a tuple of them."""
    return example_input if isinstance(example_input, tuple) else (example_input,)


def check_plain(net: nn.Module) -> None:
    """Refuse all but a net without noise."""
    check_net(net)
    noisy = [name for name, m in net.named_modules() if isinstance(m, Noisy)]
    if noisy:
        raise VardropError(
            f"Expected `net` to be plain, but got noise in '{noisy[0]}'. Give the result of "
            "vardrop.shrink(net, example_input)."
        )


def check_runs(net: nn.Module, inputs: Inputs) -> None:
    """Refuse an example that holds nothing or that the net cannot be called with."""
    tensors = [t for t in tree_leaves(inputs) if isinstance(t, Tensor)]
    if not tensors or any(t.numel() == 0 for t in tensors):
        raise VardropError(
            "Expected `example_input` to be a tensor or a tuple of arguments with at least one "
            f"row, but got {shown(inputs[0] if len(inputs) == 1 else inputs)}."
        )
    for tensor in tensors:
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise VardropError("Expected `example_input` to be finite, but got NaN or infinity.")
    try:
        run(net, inputs)
    except Exception as failure:
        raise VardropError(
            f"Expected `net` to take `example_input`, but got {type(failure).__name__}: {failure}"
        ) from failure


@contextmanager
def hooks(*handles: Any) -> Iterator[None]:
    """Remove hooks at the end, whatever happens."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def evaluating(net: nn.Module) -> Iterator[None]:
    """Run a net without gradients and in evaluation mode, and leave the modes as they were."""
    before = {m: m.training for m in net.modules()}
    try:
        net.eval()
        with torch.no_grad():
            yield
    finally:
        for module, training in before.items():
            module.training = training


def run(net: nn.Module, inputs: Inputs) -> list[Tensor]:
    """The tensors that a net returns in evaluation mode."""
    with evaluating(net):
        return [t for t in tree_leaves(net(*inputs)) if isinstance(t, Tensor)]


def _marked(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return torch.full_like(value, torch.nan)
    return value


def _structure(layer: Any) -> Any:
    """A twin whose output is positive exactly where a mark arrives."""
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        twin.weight.copy_(layer.weight.ne(0))
        if twin.bias is not None:
            twin.bias.zero_()
    return twin


def _pass_on(twin: Any, seen: list[Tensor]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Hooks that take marks off a layer's input and put them on its output."""

    def before(layer: nn.Module, args: Inputs) -> Inputs:
        seen.append(args[0].detach().clone())
        return (torch.nan_to_num(args[0], nan=0.0), *args[1:])

    def after(layer: nn.Module, args: Inputs, output: Tensor) -> Tensor:
        marked = twin(torch.isnan(seen[-1]).to(output.dtype), *args[1:])
        return output.masked_fill(marked > 0.5, torch.nan)

    return before, after


def _mark_embedding(layer: Any, args: Inputs, output: Tensor) -> Tensor:
    """An entry of an embedding depends on the data unless all rows agree on it."""
    varies = (layer.weight != layer.weight[:1]).any(0)
    return output.masked_fill(varies, torch.nan)


def _stop_at_zero(layer: Any, args: Inputs, output: Tensor) -> Tensor:
    """A factor of zero lets nothing through."""
    closed = (layer.factor == 0).nonzero().flatten()
    return output.index_fill(layer.axis, closed, 0.0)


def data_flow(net: nn.Module, inputs: Inputs) -> dict[str, list[Tensor]]:
    """The input of every affine layer at each of its calls: NaN where it depends on the data."""
    seen: dict[str, list[Tensor]] = {}
    handles = []
    twins = {name: _structure(layer) for name, layer in affine_layers(net).items()}
    for name, module in net.named_modules():
        if type(module) in AFFINE:
            before, after = _pass_on(twins[name], seen.setdefault(name, []))
            handles += [
                module.register_forward_pre_hook(before),
                module.register_forward_hook(after),
            ]
        elif isinstance(module, nn.Embedding):
            handles.append(module.register_forward_hook(_mark_embedding))
        elif type(module) is Scale:
            handles.append(module.register_forward_hook(_stop_at_zero))
    with hooks(*handles):
        run(net, tree_map(_marked, inputs))
    return seen


def trace_units(
    net: nn.Module, inputs: Inputs, sources: dict[str, list[int]], readers: dict[str, list[int]]
) -> str:
    """Why the outputs `sources` of some layers go elsewhere than to the inputs `readers`.

    Marks those outputs by NaN, lets it run up to the next affine layers and looks where it arrived;
    empty where it is found at the readers alone.
    """
    reasons: list[str] = []
    handles = []
    for name, module in net.named_modules():
        if type(module) in AFFINE:
            reader = _reader(name, readers.get(name, []), reasons)
            handles.append(module.register_forward_pre_hook(reader))
        if name in sources:
            handles.append(module.register_forward_hook(_source(sources[name])))
    with hooks(*handles):
        outputs = run(net, inputs)
    if any(bool(torch.isnan(o).any()) for o in outputs if o.is_floating_point()):
        reasons.append("it reaches the output of the net")
    return reasons[0] if reasons else ""


def _source(units: list[int]) -> Callable[..., Any]:
    def mark(layer: Any, args: Inputs, output: Tensor) -> Tensor:
        axis = -1 if isinstance(layer, nn.Embedding) else channel_axis(layer)
        index = torch.tensor(units, device=output.device)
        return output.index_fill(axis, index, torch.nan)

    return mark


def _reader(name: str, expected: list[int], reasons: list[str]) -> Callable[..., Any]:
    def check(layer: Any, args: Inputs) -> Inputs:
        axis = channel_axis(layer) % args[0].dim()
        others = [d for d in range(args[0].dim()) if d != axis]
        arrived = set(torch.isnan(args[0]).any(others).nonzero().flatten().tolist())
        if arrived - set(expected):
            what = "mixes with other units" if expected else "goes an unknown way"
            reasons.append(f"it {what} before '{name}'")
        return (torch.nan_to_num(args[0], nan=0.0), *args[1:])

    return check
