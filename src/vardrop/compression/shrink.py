"""Shrink a net: zero what the posterior calls dead, trace the units, cut them out, compare."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vardrop._core.calls import call_net, clone_batch
from vardrop._core.checks import check_net, check_type
from vardrop._core.encoder import disable_encoder_fastpath, update_encoder_fastpath
from vardrop._core.errors import VardropError
from vardrop.compression.costs import LayerCost, layer_costs
from vardrop.compression.layer_views import (
    affine,
    affine_layers,
    join_name,
    replace_module,
    replace_tensor,
)
from vardrop.compression.mask import (
    Thresholds,
    check_means,
    decompose_layers,
    find_gated_ties,
    parameter_owners,
    recompose_layers,
    rules,
    zero_pruned_weights,
)
from vardrop.compression.modules.attention import SlimAttention
from vardrop.compression.modules.select import Lookup, Select
from vardrop.compression.probes import (
    CODE_ERRORS,
    Inputs,
    Probes,
    check_runs,
    run,
    time_interleaved,
    to_arguments,
)
from vardrop.compression.remove_units import Removal, cut_out, data_flow, keep_equal_widths
from vardrop.compression.trace_units import Unit, UnitGraph, trace_units
from vardrop.noisy import Noisy, evaluating, named_modules_of, sampling

_QUANTITIES = {"macs": "MACs", "bytes": "bytes", "inputs": "inputs", "outputs": "outputs"}
_NO_COST = LayerCost(0, 0, 0, 0, 0)


@dataclass(frozen=True)
class LayerReport:
    """One layer before and after."""

    name: str
    kind: str
    before: LayerCost
    after: LayerCost


@dataclass(frozen=True, eq=False)
class ShrinkPlan:
    """What shrinking did to a net; print it, and `apply` it to the same net elsewhere.

    Args:
        layers: every layer before and after, and other modules that multiply.
        notes: which heads are left, and why dead units stay where they do.
        proof: the inputs on which the small net was compared with the masked one.
        change: the largest change of an output of the example by the threshold: the small net
            against the noisy net in evaluation mode. 0 for a net without noise.
        latency: the best time of a call with the example, in seconds, of the net without its noise
            and of the small net, measured in turns; None in a sweep of thresholds.
        standard_deviations: of the posterior, of the weights that are left, by name, for `pack`.
        thresholds: on each module's relevance, by name.
        units: what goes, and what is zero but stays to keep shapes whole.
        selects: the inputs (the entries of an embedding) that a layer still reads, by its name,
            where it drops some.
        example: the example input.
    """

    layers: tuple[LayerReport, ...]
    notes: tuple[str, ...]
    proof: str
    change: float
    latency: tuple[float, float] | None
    standard_deviations: Mapping[str, Tensor] = field(repr=False)
    thresholds: Mapping[str, float] = field(repr=False)
    units: tuple[Unit, ...] = field(repr=False)
    selects: Mapping[str, tuple[int, ...]] = field(repr=False)
    example: Inputs = field(repr=False)

    @torch.inference_mode(mode=False)
    def apply(self, net: nn.Module) -> nn.Module:
        """Cut the units of a stored plan out of the net that it was made for.

        Nothing is traced again; the result is compared with the masked net on the example.

        Returns:
            The small net, in evaluation mode; `net` stays as it is.

        >>> import torch, vardrop as vd
        >>> net = vd.convert(torch.nn.Linear(20, 2), vd.sparse_vd())
        >>> plan = vd.shrink(net, torch.zeros(1, 20)).plan
        >>> plan.apply(net)
        Linear(in_features=20, out_features=2, bias=True)
        """
        check_net(net)
        plain = zero_pruned_weights(net, self.thresholds or None)[0]
        check_runs(plain, self.example)
        parts = _copy_decomposed(plain)
        flow = data_flow(parts, self.example) if self.units else {}
        cut = _Cut(parts, self.example, self.units, flow, find_tied_parameters(net))
        cut.net = _select_inputs(cut.net, self.selects)
        if len(cut.removed) != len(self.units) or not cut.equals(Probes(plain, self.example, ())):
            raise VardropError(
                "Expected `net` to be the one that was planned for, but got another, or it "
                "has changed since. Call vardrop.shrink again."
            )
        return cut.net

    def total(self, quantity: str) -> tuple[int, int]:
        """A quantity of `LayerCost` summed over the layers, before and after."""
        before = sum(getattr(r.before, quantity) for r in self.layers)
        return before, sum(getattr(r.after, quantity) for r in self.layers)

    @property
    def compression(self) -> float:
        """Weights before over weights that are left."""
        before, after = self.total("weights")
        return before / max(after, 1)

    def __str__(self) -> str:
        totals = {q: "{} -> {}".format(*self.total(q)) for q in ("macs", "bytes", "weights")}
        summary = [f"MACs {totals['macs']}, bytes {totals['bytes']}"]
        if self.latency is not None:
            before, after = (f"{1e3 * seconds:.3g}" for seconds in self.latency)
            summary.append(f"latency {before} -> {after} ms for the example")
        rows = [("layer", "kind", *_QUANTITIES.values())]
        for r in self.layers:
            pairs = ((getattr(r.before, q), getattr(r.after, q)) for q in _QUANTITIES)
            rows.append((r.name or "(net)", r.kind, *(f"{b} -> {a}" for b, a in pairs)))
        rows.append(("total", "", totals["macs"], totals["bytes"], "", ""))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        table = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
        last = f"weights that are not zero: {totals['weights']}, {self.compression:.1f} times fewer"
        change = f"The threshold changes the outputs of the example by at most {self.change:.2g}."
        return "\n".join(
            line.rstrip()
            for line in (
                *(*summary, *table, *self.notes, self.proof),
                *([change] if self.thresholds else []),
                last,
            )
        )


class Shrunk(NamedTuple):
    """A small net in evaluation mode, and the plan that says what went."""

    net: nn.Module
    plan: ShrinkPlan


def shrink(
    net: nn.Module, example_input: Any, threshold: Thresholds = None, drop_inputs: bool = False
) -> Shrunk:
    """A plain, smaller net with the outputs of the noisy net's means without its dead weights.

    Weights that the threshold calls dead are zero. Units that no weight reads are cut out; units
    that do not depend on the data are cut out and what they say is added to the next bias, exactly,
    or they stay. The result is compared with the masked net on the example and on random inputs of
    several scales; units whose removal would show there stay. The given net is left as it is.

    Args:
        net: a noisy net, or a plain one whose zeros are its dead weights.
        example_input: one input of the usual shape: a tensor, a tuple of arguments, or a dictionary
            of named ones.
        threshold: on each method's relevance (`vardrop.relevance`): one number, one by module name,
            the result of `choose_threshold`; the methods' own rules where None.
        drop_inputs: put a `Select` in front of layers that do not read all of their inputs, and a
            `Lookup` in front of embeddings, whose entries that are zero then share one.

    Returns:
        `net`, the small net in evaluation mode, and `plan`, what went and why dead units stay.
        Print the plan; `pack` takes both.

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
    check_net(net)
    check_type("drop_inputs", drop_inputs, bool, "True or False")
    return shrink_traced(net, to_arguments(example_input), threshold, drop_inputs)


@torch.inference_mode(mode=False)
def shrink_traced(
    net: nn.Module,
    inputs: Inputs,
    threshold: Thresholds = None,
    drop_inputs: bool = False,
    graph: UnitGraph | None = None,
) -> Shrunk:
    """`shrink` with the units of a graph that was traced before, if there is one."""
    inputs = clone_batch(
        inputs
    )  # a copy, because tensors that were made in inference mode stay such
    for name, parameter in net.named_parameters():
        if parameter.is_floating_point() and not bool(parameter.isfinite().all()):
            raise VardropError(
                f"Expected the parameters of `net` to be finite, but got NaN or infinity in "
                f"'{name}'. Train it again from an earlier checkpoint."
            )
    check_means(net, "to shrink")
    relevances = rules(net, threshold)
    plain, deviations = zero_pruned_weights(net, threshold)
    check_runs(plain, inputs)
    probes, parts = Probes(plain, inputs), _copy_decomposed(plain)
    traced = trace_units(parts, inputs) if graph is None else graph
    cut = _cut_dead_units(parts, inputs, traced, probes, find_tied_parameters(net), drop_inputs)
    change, latency = 0.0, None
    if not all(bool(r.kept.all()) for r in relevances.values()):
        with sampling(net, on=False):
            change = probes.change(net)
    if graph is None:
        latency = _latencies(plain, cut.net, inputs)
    plan = ShrinkPlan(
        layers=_layer_reports(parts, traced.costs, layer_costs(cut.net, inputs), cut.selects),
        notes=(*cut.notes, *_notes_on_ties_and_noise(net, plain, cut.net)),
        proof=str(probes),
        change=change,
        latency=latency,
        standard_deviations=_cut_deviations(plain, deviations, cut),
        thresholds={name: r.threshold for name, r in relevances.items()},
        units=tuple(cut.removed),
        selects=cut.selects,
        example=inputs,
    )
    return Shrunk(cut.net, plan)


def _latencies(plain: nn.Module, small: nn.Module, inputs: Inputs) -> tuple[float, float]:
    """The best time of a call of both nets."""
    nets = {"before": plain, "after": small}
    with torch.no_grad(), evaluating(plain), evaluating(small):
        calls = {key: partial(call_net, net, clone_batch(inputs)) for key, net in nets.items()}
        times = time_interleaved(calls, rounds=1)
    return times["before"], times["after"]


def _copy_decomposed(plain: nn.Module) -> nn.Module:
    net = decompose_layers(copy.deepcopy(plain))
    for layer in named_modules_of(net, SlimAttention).values():
        layer.fold_constants()
    return net


class _Cut:
    """A copy of a decomposed net without its dead units, in torch's own layers again.

    `removed` are the units that are zero, `gone` those of them that could be cut out, and `selects`
    are the inputs that are left of layers that do not read all of them.
    """

    def __init__(
        self,
        parts: nn.Module,
        inputs: Inputs,
        units: tuple[Unit, ...],
        flow: dict[str, list[Tensor]],
        ties: list[list[str]],
        drop_inputs: bool = False,
    ) -> None:
        net = copy.deepcopy(parts)
        removal = Removal(net, inputs, list(units), flow)
        self.removed = self.gone = removal.removed
        if self.removed:
            self.gone = keep_equal_widths(net, self.removed)
            cut_out(net, self.gone)
        self.notes = [
            f"'{name}' keeps {layer.num_heads} of {count} heads."
            for name, layer in named_modules_of(net, SlimAttention).items()
            if layer.num_heads < (count := layer.embed_dim // layer.head_dim)
        ]
        for (name, why), count in removal.stays.items():
            self.notes.append(f"{count} units of '{name}' stay: {why}.")
        if back := len(self.removed) - len(self.gone):
            self.notes.append(f"{back} units stay to keep shapes whole.")
        self.net = recompose_layers(net)
        if ties:
            _tie_equal(self.net, ties)
        update_encoder_fastpath(self.net, Noisy)
        self.selects = self._drop_inputs(inputs) if drop_inputs else {}

    def equals(self, probes: Probes) -> bool:
        """Whether the cut net agrees, on torch's fused path where that gives the same."""
        if probes.equal(self.net):
            return True
        for module in self.net.modules():
            disable_encoder_fastpath(module)
        return probes.equal(self.net)

    def _drop_inputs(self, inputs: Inputs) -> dict[str, tuple[int, ...]]:
        """Let layers that do not read all of their inputs take the others only."""
        attention = named_modules_of(self.net, SlimAttention).items()
        projections = {
            join_name(name, part) for name, m in attention for part, _ in m.named_children()
        }
        owners, wanted, selects = parameter_owners(self.net), {}, {}
        for name, view in affine_layers(self.net).items():
            unread, unshared = view.unread(), owners[id(view.layer.weight)] == 1
            if unshared and view.groups == 1 and bool(unread.any()) and name not in projections:
                wanted[name] = tuple((~unread).nonzero().flatten().tolist()) or (0,)
        for name, table in named_modules_of(self.net, nn.Embedding).items():
            keep = tuple(table.weight.detach().any(1).nonzero().flatten().tolist())
            unshared = type(table) is nn.Embedding and owners[id(table.weight)] == 1
            if unshared and table.max_norm is None and len(keep) < table.num_embeddings - 1:
                wanted[name] = keep
        for name, keep in wanted.items():
            layer = self.net.get_submodule(name)
            self.net = _select_inputs(self.net, {name: keep})
            try:
                run(self.net, inputs)
            except AttributeError as failure:  # other code reads what the layer has
                self.notes.append(f"'{name}' keeps inputs that it does not read: {failure}.")
                self.net = replace_module(self.net, name, layer)
                continue
            selects[name] = keep
            if isinstance(layer, nn.Embedding):
                entries = f"{len(keep)} of {layer.num_embeddings} entries"
                self.notes.append(f"'{name}' keeps {entries}, and a zero.")
        return selects


def _cut_dead_units(
    parts: nn.Module,
    inputs: Inputs,
    graph: UnitGraph,
    probes: Probes,
    ties: list[list[str]],
    drop_inputs: bool,
) -> _Cut:
    """Cut all units; where that is not equal, those that are equal by themselves."""
    obstacle, flow = graph.obstacle, {}
    if obstacle is None:
        try:
            flow = data_flow(parts, inputs)
        except CODE_ERRORS as failure:  # the code of the net lets no mark through
            obstacle = str(failure)
    units = () if obstacle else graph.units

    def attempt(reasons: Mapping[Any, str]) -> _Cut | None:
        """The cut of all units but those of these shapes, if the net stays equal."""
        chosen = units
        if reasons:
            reasoned = ((u, u.reason or reasons.get(u.shape)) for u in units)
            chosen = tuple(dataclasses.replace(u, reason=reason) for u, reason in reasoned)
        cut = _Cut(parts, inputs, chosen, flow, ties, drop_inputs)
        return cut if cut.equals(probes) else None

    if (cut := attempt({})) is None:
        shapes = {u.shape for u in units if u.reason is None}
        apart = (dict.fromkeys(shapes - {shape}, "left out") for shape in shapes)
        alone = zip(shapes, map(attempt, apart), strict=True)
        why = "taking it out changes the outputs"
        cut = attempt({shape: why for shape, equal in alone if equal is None})
    if cut is None:
        raise VardropError(
            "Expected the shrunken net to equal the masked one, but got other outputs. "
            "Some operation between its layers mixes units in a way that could not be followed."
        )
    if obstacle:
        text = f"No unit goes: marks cannot be followed through this net ({obstacle})."
        cut.notes.append(text)
    return cut


def _notes_on_ties_and_noise(net: nn.Module, plain: nn.Module, small: nn.Module) -> list[str]:
    shared = {name for names in find_tied_parameters(small) for name in names}
    untied = [name for name in find_gated_ties(net) if join_name(name, "weight") not in shared]
    return [f"'{n}' gets weights of its own: its gate is folded in." for n in untied] + [
        f"'{name}' ({type(module).__name__}) stays noisy: it has no plain twin."
        for name, module in named_modules_of(plain, Noisy).items()
    ]


@torch.no_grad()
def _cut_deviations(
    plain: nn.Module, deviations: Mapping[str, Tensor], cut: _Cut
) -> dict[str, Tensor]:
    """The standard deviations of the weights that are left: a net of them is cut as the weights.

    `plain` becomes that net, in place.
    """
    for parameter in plain.parameters():
        parameter.fill_(-1)  # no standard deviation
    for name, deviation in deviations.items():
        owner, _, tensor = name.rpartition(".")
        replace_tensor(plain.get_submodule(owner), tensor, deviation)
    net = decompose_layers(plain)
    if cut.gone:
        cut_out(net, cut.gone)
    net = recompose_layers(net)
    if cut.selects:
        net = _select_inputs(net, cut.selects)
    named = net.named_parameters(remove_duplicate=False)
    return {n: p.detach() for n, p in named if p.dim() > 1 and bool((p != -1).any())}


def _select_inputs(net: nn.Module, selects: Mapping[str, tuple[int, ...]]) -> nn.Module:
    """Put a `Select` or a `Lookup` before layers, which read these of their inputs only."""
    for name, keep in selects.items():
        layer: Any = copy.deepcopy(net.get_submodule(name))
        index = torch.tensor(keep, device=layer.weight.device, dtype=torch.long)
        first: nn.Module
        if (view := affine(layer)) is not None:
            read = torch.zeros(view.inputs, dtype=torch.bool)
            read[index] = True
            view.resize(read, torch.ones(view.outputs, dtype=torch.bool))
            first = Select(index, view.axis)
        else:  # an embedding keeps one of the other entries for all of them
            other = next(i for i in range(layer.num_embeddings) if i not in set(keep))
            numbers = torch.full((layer.num_embeddings,), len(keep), device=index.device)
            numbers[index] = torch.arange(len(keep), device=index.device)
            replace_tensor(layer, "weight", layer.weight.detach()[[*keep, other]])
            layer.num_embeddings, layer.padding_idx = len(layer.weight), None
            first = Lookup(numbers)
        net = replace_module(net, name, nn.Sequential(first, layer).eval())
    return net


def _layer_reports(
    net: nn.Module,
    before: Mapping[str, LayerCost],
    after: Mapping[str, LayerCost],
    selects: Mapping[str, Any],
) -> tuple[LayerReport, ...]:
    reports = []
    for name, cost in before.items():
        module = net.get_submodule(name)
        weights = sum(p.numel() for p in module.parameters(recurse=False) if p.dim() > 1)
        left = after.get(join_name(name, "1") if name in selects else name, _NO_COST)
        start = dataclasses.replace(cost, weights=weights)
        reports.append(LayerReport(name, type(module).__name__, start, left))
    return tuple(reports)


def find_tied_parameters(net: nn.Module) -> list[list[str]]:
    """The names of every parameter that has several.

    >>> net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2))
    >>> net[1].weight = net[0].weight
    >>> find_tied_parameters(net)
    [['0.weight', '1.weight']]
    """
    names: dict[int, list[str]] = {}
    for name, parameter in net.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def _tie_equal(net: nn.Module, ties: list[list[str]]) -> None:
    """Let parameters that were one be one again where they are still equal."""
    parameters = dict(net.named_parameters(remove_duplicate=False))
    for names in ties:
        distinct: list[nn.Parameter] = []
        for name in names:
            if (mine := parameters.get(name)) is None:
                continue
            same = next((k for k in distinct if torch.equal(k, mine)), None)
            if same is None:
                distinct.append(mine)
            elif same is not mine:
                owner, _, tensor = name.rpartition(".")
                setattr(net.get_submodule(owner), tensor, same)
