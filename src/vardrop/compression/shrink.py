"""Shrink a model: zero its pruned weights, find dead units, cut them out, and compare."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vardrop._core.calls import Batch, call_net, clone_batch
from vardrop._core.checks import check_type
from vardrop._core.encoder import update_encoder_fastpath
from vardrop._core.errors import VardropError
from vardrop._core.modules import parameter_owners
from vardrop._core.progress import ProgressLine
from vardrop.compression import mask
from vardrop.compression.costs import Costs, LayerCost, layer_costs
from vardrop.compression.layer_views import affine_layers, join_name, replace_module, replace_tensor
from vardrop.compression.mask import Thresholds, zero_pruned_weights
from vardrop.compression.modules.pruned_attention import SlimAttention
from vardrop.compression.modules.select import Select
from vardrop.compression.probes import (
    CODE_ERRORS,
    Inputs,
    Probes,
    check_runs,
    run,
    time_interleaved,
    to_arguments,
)
from vardrop.compression.remove_units import Flow, Removal, cut_out, data_flow, keep_equal_widths
from vardrop.compression.trace_units import Unit, UnitGraph, trace_units
from vardrop.likelihoods import check_model
from vardrop.noisy import Noisy, named_modules_of

_QUANTITIES = {"macs": "MACs", "bytes": "bytes", "inputs": "inputs", "outputs": "outputs"}
_NO_COST = LayerCost(0, 0, 0, 0, 0)


@dataclass(frozen=True)
class LayerReport:
    """The costs of one layer.

    Args:
        name: of the layer in the model.
        kind: the name of its class.
        before, after: its costs before and after shrinking.
    """

    name: str
    kind: str
    before: LayerCost
    after: LayerCost


@dataclass(frozen=True, eq=False)
class ShrinkPlan:
    """The changes that `shrink` made. Print it.

    Args:
        layers: every layer before and after, and other modules that multiply.
        notes: the remaining heads, and the reasons why dead units stay.
        proof: the inputs on which the small model was compared with the masked model.
        change: the largest change of an output of the example by the threshold, which is the
            difference between the small model and the noisy model in evaluation mode. 0 for a
            model without noise.
        latency: the best time of a call with the example, in seconds, of the model without noise
            and of the small model.
        standard_deviations: posterior standard deviations of the remaining weights by name, for
            `pack`.
        thresholds: the threshold on each module's relevance, by name.
    """

    layers: tuple[LayerReport, ...]
    notes: tuple[str, ...]
    proof: str
    change: float
    latency: tuple[float, float]
    standard_deviations: Mapping[str, Tensor] = field(repr=False)
    thresholds: Mapping[str, float] = field(repr=False)

    def total(self, quantity: str) -> tuple[int, int]:
        """A quantity of `LayerCost`, summed over the layers before and after.

        Args:
            quantity: "macs", "bytes", "weights", "inputs" or "outputs".

        Returns:
            The sums before and after.
        """
        before = sum(getattr(r.before, quantity) for r in self.layers)
        return before, sum(getattr(r.after, quantity) for r in self.layers)

    @property
    def compression(self) -> float:
        """The number of weights before, divided by the number of remaining weights."""
        before, after = self.total("weights")
        return before / max(after, 1)

    def __str__(self) -> str:
        totals = {q: "{} -> {}".format(*self.total(q)) for q in ("macs", "bytes", "weights")}
        before, after = (f"{1e3 * seconds:.3g}" for seconds in self.latency)
        rows = [("layer", "kind", *_QUANTITIES.values())]
        for r in self.layers:
            pairs = ((getattr(r.before, q), getattr(r.after, q)) for q in _QUANTITIES)
            rows.append((r.name or "(net)", r.kind, *(f"{b} -> {a}" for b, a in pairs)))
        rows.append(("total", "", totals["macs"], totals["bytes"], "", ""))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        change = f"The threshold changes the outputs of the example by at most {self.change:.2g}."
        lines = [
            f"MACs {totals['macs']}, bytes {totals['bytes']}",
            f"latency {before} -> {after} ms for the example",
            *table,
            *self.notes,
            self.proof,
            *([change] if self.thresholds else []),
            f"weights that are not zero: {totals['weights']}, {self.compression:.1f} times fewer",
        ]
        return "\n".join(lines)


class Shrunk(NamedTuple):
    """The result of `shrink`.

    Args:
        net: the small model, in evaluation mode.
        plan: the changes that were made.
    """

    net: nn.Module
    plan: ShrinkPlan


@torch.inference_mode(mode=False)
def shrink(
    net: nn.Module,
    example_input: Batch,
    threshold: Thresholds = None,
    drop_inputs: bool = False,
    *,
    progress: bool | None = None,
) -> Shrunk:
    """Make a plain, smaller model with the same outputs as the masked means of a noisy model.

    Weights beyond the threshold are set to zero. Units that no weight reads are removed. Units that
    do not depend on the data are removed if their constant can be added to the next bias exactly.
    The result is compared with the masked model on the example and on random inputs of several
    scales. Units whose removal would change an output there stay.

    Args:
        net: a noisy model, or a plain model whose pruned weights are zero. It is left unchanged,
            also after Ctrl-C.
        example_input: one input of the usual shape: a tensor, a tuple of arguments, or a dictionary
            of named arguments.
        threshold: on each method's relevance (`vardrop.relevance`): one number, one number per
            module name, or the result of `choose_threshold`. None uses the rules of the methods.
        drop_inputs: put a `Select` before layers that do not read all of their inputs.
        progress: show a progress line on standard error; None shows it on a terminal.

    Returns:
        `net`, the small model in evaluation mode, and `plan`, the changes and the reasons why dead
        units stay. Print the plan. `pack` takes both.

    >>> import torch, vardrop as vd
    >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    >>> _ = net[2].weight.data[:, 1:].zero_()
    >>> small, plan = shrink(net, torch.zeros(1, 3))
    >>> small
    Sequential(
      (0): Linear(in_features=3, out_features=1, bias=True)
      (1): ReLU()
      (2): Linear(in_features=1, out_features=2, bias=True)
    )
    >>> print(plan)  # doctest: +ELLIPSIS
    MACs 20 -> 5, bytes 104 -> 32
    latency ... ms for the example
    layer  kind    MACs     bytes      inputs  outputs
    0      Linear  12 -> 3  64 -> 16   3 -> 3  4 -> 1
    2      Linear  8 -> 2   40 -> 16   4 -> 1  2 -> 2
    total          20 -> 5  104 -> 32
    Equal on the example and on 5 random inputs of scale 0.01 to 100.
    weights that are not zero: 20 -> 5, 4.0 times fewer

    Molchanov, Ashukha & Vetrov 2017, sec. 5.3, for the rule log alpha >= 3.
    """
    check_model(net)
    check_type("drop_inputs", drop_inputs, bool, "True or False")
    numbers = ((name, p) for name, p in net.named_parameters() if p.is_floating_point())
    if broken := [name for name, p in numbers if not bool(p.isfinite().all())]:
        raise VardropError(
            f"Expected the parameters of `net` to be finite, but got NaN or infinity in "
            f"'{broken[0]}'. Train it again from an earlier checkpoint."
        )
    mask.check_means(net, "to shrink")
    # Tensors that were made in inference mode stay inference tensors, so the inputs are cloned.
    inputs, relevances = clone_batch(to_arguments(example_input)), mask.rules(net, threshold)
    plain, deviations = zero_pruned_weights(net, threshold)
    with ProgressLine("shrink", progress=progress) as line:
        check_runs(plain, inputs)
        parts = mask.decompose_layers(copy.deepcopy(plain))
        graph, probes = trace_units(parts, inputs, line.advance), Probes(plain, inputs)
        cut = _cut_dead_units(parts, graph, probes, drop_inputs, line)
        nets = {"before": plain, "after": cut.net}
        calls = {key: partial(call_net, m, clone_batch(inputs)) for key, m in nets.items()}
        with torch.no_grad():
            before, after = time_interleaved(calls, rounds=1).values()
    cut.notes += [
        f"'{name}' ({type(module).__name__}) stays noisy: it has no plain equivalent."
        for name, module in named_modules_of(plain, Noisy).items()
    ]
    plan = ShrinkPlan(
        layers=_layer_reports(parts, graph.costs, layer_costs(cut.net, inputs), cut.selects),
        notes=tuple(cut.notes),
        proof=str(probes),
        change=0.0 if all(bool(r.kept.all()) for r in relevances.values()) else probes.change(net),
        latency=(before, after),
        standard_deviations=_cut_deviations(plain, deviations, cut),
        thresholds={name: r.threshold for name, r in relevances.items()},
    )
    return Shrunk(cut.net, plan)


def _layer_reports(
    net: nn.Module, before: Costs, after: Costs, selects: Container[str]
) -> tuple[LayerReport, ...]:
    reports = []
    for name, cost in before.items():
        module = net.get_submodule(name)
        weights = sum(p.numel() for p in module.parameters(recurse=False) if p.dim() > 1)
        start = dataclasses.replace(cost, weights=weights)
        left = after.get(join_name(name, "1") if name in selects else name, _NO_COST)
        reports.append(LayerReport(name, type(module).__name__, start, left))
    return tuple(reports)


class _Cut:
    """A copy of a decomposed model without its dead units, with torch's layers again.

    `removed` are all units that are zero. `gone` are the units of these that could be cut out.
    `selects` are the remaining inputs of layers that do not read all inputs.
    """

    def __init__(
        self, parts: nn.Module, inputs: Inputs, units: list[Unit], flow: Flow, drop_inputs: bool
    ) -> None:
        net = copy.deepcopy(parts)
        removal = Removal(net, inputs, units, flow)
        self.removed, self.gone = removal.removed, keep_equal_widths(net, removal.removed)
        cut_out(net, self.gone)
        self.notes = [
            f"'{name}' keeps {layer.num_heads} of {count} heads."
            for name, layer in named_modules_of(net, SlimAttention).items()
            if layer.num_heads < (count := layer.embed_dim // layer.head_dim)
        ]
        stays = removal.stays.items()
        self.notes += [f"{count} units of '{name}' stay: {why}." for (name, why), count in stays]
        if back := len(self.removed) - len(self.gone):
            self.notes.append(f"{back} units stay to keep layers of equal width.")
        self.net = mask.recompose_layers(net)
        update_encoder_fastpath(self.net, Noisy)
        self.selects: dict[str, tuple[int, ...]] = {}
        if drop_inputs:
            self._drop_inputs(inputs)

    def _drop_inputs(self, inputs: Inputs) -> None:
        """Put a `Select` before layers that do not read all of their inputs.

        A layer whose attributes are read by other code stays as it is.
        """
        owners, attention = parameter_owners(self.net), named_modules_of(self.net, SlimAttention)
        for name, view in affine_layers(self.net).items():
            is_shared = owners[id(view.layer.weight)] > 1 or name.rpartition(".")[0] in attention
            keep = tuple((~view.unread()).nonzero().flatten().tolist()) or (0,)
            if view.groups > 1 or is_shared or len(keep) == view.inputs:
                continue
            self.net = _select_inputs(self.net, name, keep)
            try:
                run(self.net, inputs)
                self.selects[name] = keep
            except CODE_ERRORS as failure:  # or it does not run since units were removed
                self.notes.append(f"'{name}' keeps inputs that it does not read: {failure}.")
                self.net = replace_module(self.net, name, view.layer)


def _cut_dead_units(
    parts: nn.Module, graph: UnitGraph, probes: Probes, drop_inputs: bool, line: ProgressLine
) -> _Cut:
    """Cut all units, or if that changes an output, the units that change none by themselves.

    `parts` is decomposed.
    """
    obstacle, flow = graph.obstacle, Flow()
    if obstacle is None:
        try:
            flow = data_flow(parts, probes.example)
        except CODE_ERRORS as failure:  # the model's code raises an error for NaN
            obstacle = str(failure)
    units = () if obstacle else graph.units

    def attempt(reasons: Mapping[tuple[tuple[str, ...], ...], str]) -> _Cut | None:
        """The cut of all units except units of these shapes, if the outputs stay equal."""
        chosen = [dataclasses.replace(u, reason=u.reason or reasons.get(u.shape)) for u in units]
        cut = _Cut(parts, probes.example, chosen, flow, drop_inputs)
        line.advance()
        return cut if probes.equal(cut.net) else None

    if (cut := attempt({})) is None:
        shapes = {u.shape for u in units if u.reason is None}
        alone = {shape: attempt(dict.fromkeys(shapes - {shape}, "left out")) for shape in shapes}
        reason = "removing it changes the outputs"
        cut = attempt({shape: reason for shape, equal in alone.items() if equal is None})
    if cut is None:
        raise VardropError(
            "Expected the small model to equal the masked model, but got other outputs. An "
            "operation between its layers mixes units in a way that could not be followed."
        )
    if obstacle:
        reason = f"marks cannot be followed through this model ({obstacle})"
        cut.notes.append(f"No unit is removed: {reason}.")
    elif not (cut.removed or cut.notes):
        cut.notes.append("No unit is removed: none of those that could be followed is dead.")
    return cut


@torch.no_grad()
def _cut_deviations(
    plain: nn.Module, deviations: Mapping[str, Tensor], cut: _Cut
) -> dict[str, Tensor]:
    """The standard deviations of the remaining weights.

    `plain` becomes a model of standard deviations in place, which is cut like the weights.
    """
    for parameter in plain.parameters():
        parameter.fill_(-1)  # no standard deviation
    for name, deviation in deviations.items():
        owner, _, tensor = name.rpartition(".")
        replace_tensor(plain.get_submodule(owner), tensor, deviation)
    net = mask.decompose_layers(plain)
    cut_out(net, cut.gone)
    net = mask.recompose_layers(net)
    for name, keep in cut.selects.items():
        net = _select_inputs(net, name, keep)
    named = net.named_parameters(remove_duplicate=False)
    return {n: p.detach() for n, p in named if p.dim() > 1 and bool((p != -1).any())}


def _select_inputs(net: nn.Module, name: str, keep: tuple[int, ...]) -> nn.Module:
    """Put a `Select` before a layer, which then reads only these inputs."""
    (view,) = affine_layers(copy.deepcopy(net.get_submodule(name))).values()
    index = torch.tensor(keep, device=view.weight.device)
    is_read = torch.zeros(view.inputs, dtype=torch.bool).index_fill(0, index.cpu(), True)
    view.resize(is_read, torch.ones(view.outputs, dtype=torch.bool))
    selected = nn.Sequential(Select(index, view.axis), view.layer).eval()
    return replace_module(net, name, selected)
