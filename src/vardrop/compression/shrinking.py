"""Shrink a net: take out what the posterior calls dead and prove that nothing else changed."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from vardrop.checks import check_net, check_type
from vardrop.compression.coupling import Unit, coupled_units
from vardrop.compression.flow import Inputs, as_inputs, check_runs, run
from vardrop.compression.layout import (
    CARRIERS,
    affine_layers,
    carrier_units,
    channel_axis,
    column_is_zero,
    cut,
    groups,
    resize,
    resize_carrier,
    units,
)
from vardrop.compression.masks import Thresholds, masked
from vardrop.compression.parts import Select
from vardrop.compression.removal import Dead, settle, shared_layers
from vardrop.compression.report import LayerReport, ShrinkReport, layer_costs
from vardrop.errors import VardropError

_TOLERANCE = 1e-5
_PROBES = 4


def plan_shrink(
    net: nn.Module,
    example_input: Any,
    threshold: Thresholds = None,
    drop_inputs: bool = False,
) -> ShrinkReport:
    """Say what `shrink` would take out of a net, layer by layer, and why dead units stay.

    The arguments are those of `shrink`.

    >>> import torch, vardrop as vd
    >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    >>> _ = net[2].weight.data[:, 1:].zero_()
    >>> print(plan_shrink(net, torch.zeros(1, 3)))
    layer  kind    weights  inputs  outputs  MACs     bytes
    0      Linear  12 -> 3  3 -> 3  4 -> 1   12 -> 3  64 -> 16
    2      Linear  8 -> 2   4 -> 1  2 -> 2   8 -> 2   40 -> 16
    total          20 -> 5                   20 -> 5  104 -> 32
    4.0 times fewer weights
    """
    small = shrink(net, example_input, threshold, drop_inputs)
    return small.report  # type: ignore[return-value]


@torch.inference_mode(mode=False)
@torch.enable_grad()  # type: ignore[no-untyped-call]
def shrink(
    net: nn.Module,
    example_input: Any,
    threshold: Thresholds = None,
    drop_inputs: bool = False,
) -> nn.Module:
    """A plain, smaller net with the outputs of the noisy net's means without its dead weights.

    Weights that the threshold calls dead are zero. Units that no weight reads are cut out; units
    that do not depend on the data are cut out and what they say is added to the next bias, exactly,
    or they stay. The given net is left as it is.

    Args:
        net: a noisy net, or a plain one whose zeros are its dead weights.
        example_input: one input (a tensor, or a tuple of arguments) of the usual shape.
        threshold: on each method's relevance (`vardrop.relevance`): one number, one by module name,
            the result of `choose_threshold`; the methods' own rules where None.
        drop_inputs: put a `Select` in front of layers that do not read all of their inputs.

    Returns:
        The small net in evaluation mode, with the `ShrinkReport` as its attribute `report` and the
        posterior deviations of its weights, which `pack` reads, as `deviations`.

    >>> import torch, vardrop as vd
    >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    >>> shrink(vd.convert(net, vd.sparse_vd()), torch.zeros(1, 3))
    Sequential(
      (0): Linear(in_features=3, out_features=4, bias=True)
      (1): ReLU()
      (2): Linear(in_features=4, out_features=2, bias=True)
    )

    Molchanov, Ashukha & Vetrov 2017, sec. 5.3, for the rule log alpha >= 3.
    """
    check_net(net)
    check_type("drop_inputs", drop_inputs, bool, "True or False")
    # A copy, because autograd refuses tensors that were made in inference mode.
    inputs = tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, as_inputs(example_input))
    _check_finite(net)
    plain, deviations = masked(net, threshold)
    check_runs(plain, inputs)
    before = layer_costs(plain, inputs)
    found = coupled_units(plain, inputs, shared_layers(plain, inputs))
    small, kept, notes = _proven(plain, inputs, found, deviations, drop_inputs)
    after = layer_costs(small, inputs)
    small.report = ShrinkReport(  # type: ignore[assignment]
        tuple(_layer_report(name, plain, before, after) for name in before), tuple(notes)
    )
    small.deviations = kept  # type: ignore[assignment]
    return small


def _check_finite(net: nn.Module) -> None:
    for name, parameter in net.named_parameters():
        if parameter.is_floating_point() and not bool(parameter.isfinite().all()):
            raise VardropError(
                f"Expected the parameters of `net` to be finite, but got NaN or infinity in "
                f"'{name}'. Train it again from an earlier checkpoint."
            )


def _layer_report(
    name: str, plain: nn.Module, before: dict[str, Any], after: dict[str, Any]
) -> LayerReport:
    layer = plain.get_submodule(name)
    start = dataclasses.replace(before[name], weights=layer.weight.numel())  # type: ignore
    inside = f"{name}.1" if name else "1"
    return LayerReport(name, type(layer).__name__, start, after.get(name) or after[inside])


def _proven(
    plain: nn.Module,
    inputs: Inputs,
    found: list[Unit],
    deviations: dict[str, Tensor],
    drop_inputs: bool,
) -> tuple[nn.Module, dict[str, Tensor], list[str]]:
    """Shrink with all units; where that is not equal, with those that are equal by themselves."""
    small, kept, notes = _cut_out(plain, inputs, found, deviations, drop_inputs)
    if _equal(plain, small, inputs):
        return small, kept, notes
    reasons = {
        shape: ""
        if _equal(plain, _cut_out(plain, inputs, _only(found, shape), {}, False)[0], inputs)
        else "taking it out changes the outputs"
        for shape in {u.shape for u in found if not u.reason}
    }
    found = [dataclasses.replace(u, reason=u.reason or reasons[u.shape]) for u in found]
    small, kept, notes = _cut_out(plain, inputs, found, deviations, drop_inputs)
    if not _equal(plain, small, inputs):
        raise VardropError(
            "Expected the shrunken net to equal the masked one, but got other outputs. "
            "Some operation between its layers mixes units in a way that could not be followed."
        )
    return small, kept, notes


def _only(found: list[Unit], shape: Any) -> list[Unit]:
    return [u if u.shape == shape else dataclasses.replace(u, reason="left out") for u in found]


def _equal(plain: nn.Module, small: nn.Module, inputs: Inputs) -> bool:
    """Whether two nets agree on the example and on random inputs like it."""
    generator = torch.Generator().manual_seed(0)

    def noise(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        return torch.randn(value.shape, generator=generator).to(value)

    for probe in [inputs, *(tree_map(noise, inputs) for _ in range(_PROBES))]:
        try:
            pairs = list(zip(run(plain, probe), run(small, probe), strict=True))
        except (RuntimeError, ValueError, IndexError):
            return False
        for a, b in pairs:
            if a.shape != b.shape or not torch.allclose(a, b, rtol=_TOLERANCE, atol=_TOLERANCE):
                return False
    return True


def _cut_out(
    plain: nn.Module,
    inputs: Inputs,
    found: list[Unit],
    deviations: dict[str, Tensor],
    drop_inputs: bool,
) -> tuple[nn.Module, dict[str, Tensor], list[str]]:
    net = copy.deepcopy(plain)
    dead = Dead(net, inputs, found)
    gone = settle(net, dead.removed)
    read = {place for unit in gone for place in unit.readers}
    emitted = {place for unit in gone for place in unit.emitters}
    carried = {place for unit in gone for place in unit.carriers}
    kept = dict(deviations)
    for name, layer in affine_layers(net).items():
        n_in, n_out = units(layer)
        left_in, left_out = _left(name, n_in, read), _left(name, n_out, emitted)
        weight = f"{name}.weight" if name else "weight"
        if weight in kept:
            kept[weight] = cut(layer, kept[weight], left_in, left_out)
        resize(layer, left_in, left_out)
    for name, module in net.named_modules():
        if type(module) in CARRIERS and any(n == name for n, _ in carried):
            resize_carrier(module, _left(name, carrier_units(module), carried))
        elif isinstance(module, nn.Embedding):
            _resize_embedding(module, _left(name, module.embedding_dim, emitted))
    if drop_inputs:
        net, kept = _select_inputs(net, kept)
    notes = [f"{n} units of '{name}' stay: {why}." for (name, why), n in dead.stays.items()]
    if gone != dead.removed:
        notes.append(f"{len(dead.removed) - len(gone)} units stay to keep shapes whole.")
    return net, kept, notes


def _left(name: str, count: int, gone: Iterable[tuple[str, int]]) -> list[int]:
    return [i for i in range(count) if (name, i) not in gone]


def _resize_embedding(module: nn.Embedding, keep: list[int]) -> None:
    weight = module.weight.detach()[:, keep].clone()
    module.weight = nn.Parameter(weight, module.weight.requires_grad)
    module.embedding_dim = len(keep)


def _select_inputs(
    net: nn.Module, deviations: dict[str, Tensor]
) -> tuple[nn.Module, dict[str, Tensor]]:
    """Let layers that do not read all of their inputs take the others only."""
    for name, layer in affine_layers(net).items():
        zero = column_is_zero(layer)
        if groups(layer) > 1 or not any(zero):
            continue
        keep = [i for i, z in enumerate(zero) if not z] or [0]
        weight = f"{name}.weight" if name else "weight"
        inside = f"{name}.1.weight" if name else "1.weight"
        everything = range(units(layer)[1])
        if weight in deviations:
            deviations[inside] = cut(layer, deviations.pop(weight), keep, everything)
        resize(layer, keep, everything)
        index = torch.tensor(keep, device=layer.weight.device)
        selecting = nn.Sequential(Select(index, channel_axis(layer)), layer).eval()
        if not name:
            return selecting, deviations
        net.set_submodule(name, selecting)
    return net, deviations
