"""Shrink a net: plan what the posterior calls dead, prove that nothing else changes, cut it out."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from vardrop._core.calls import tensors_in, untouched
from vardrop._core.checks import check_net, check_type
from vardrop._core.errors import VardropError
from vardrop.compression.kinds import (
    Affine,
    Lookup,
    Select,
    affine,
    affine_layers,
    inside,
    replaced,
)
from vardrop.compression.masks import (
    Thresholds,
    check_means,
    gated_ties,
    is_whole,
    masked,
    put_together,
    rules,
    taken_apart,
    without_dead,
)
from vardrop.compression.modules.attention import SlimAttention
from vardrop.compression.removal import Removal, cut_out, data_flow, fixed_layers, rebalanced
from vardrop.compression.running import (
    Inputs,
    Probes,
    Removable,
    as_inputs,
    check_runs,
    hooks,
    run,
)
from vardrop.compression.tracing import Unit, coupled_units
from vardrop.noisy import Noisy, leave_fused_path, modules_of, settle_fused_path


@dataclass(frozen=True)
class LayerCost:
    """One layer: weights that are not zero, units, multiplications per example, bytes."""

    weights: int
    inputs: int
    outputs: int
    macs: int
    bytes: int


@dataclass(frozen=True)
class LayerReport:
    """One layer before and after."""

    name: str
    kind: str
    before: LayerCost
    after: LayerCost


@dataclass(frozen=True, eq=False)
class ShrinkPlan:
    """What shrinking does to a net; print it, and `apply` it.

    Args:
        layers: every layer before and after.
        notes: which heads are left, and why dead units stay where they do.
        proof: the inputs on which the small net was compared with the masked one.
        deviations: posterior deviations of the weights that are left, by name, for `pack`.
        thresholds: on each module's relevance, by name.
        units: what goes, and what is zero but stays to keep shapes whole.
        selects: the inputs (the entries of an embedding) that a layer still reads, by its name,
            where it drops some.
        example: the example input.
    """

    layers: tuple[LayerReport, ...]
    notes: tuple[str, ...]
    proof: str
    deviations: Mapping[str, Tensor] = field(repr=False)
    thresholds: Mapping[str, float] = field(repr=False)
    units: tuple[Unit, ...] = field(repr=False)
    selects: Mapping[str, tuple[int, ...]] = field(repr=False)
    example: Inputs = field(repr=False)

    def apply(self, net: nn.Module) -> nn.Module:
        """The small net, in evaluation mode; `net`, the one that was planned for, stays as it is.

        >>> import torch, vardrop as vd
        >>> net = vd.convert(torch.nn.Linear(20, 2), vd.sparse_vd())
        >>> plan = vd.plan_shrink(net, torch.zeros(1, 20))
        >>> plan.apply(net)
        Linear(in_features=20, out_features=2, bias=True)
        """
        check_net(net)
        with torch.inference_mode(mode=False):
            plain = masked(net, self.thresholds or None)[0]
            check_runs(plain, self.example)
            apart = _apart(plain, {})
            flow = data_flow(apart, self.example) if self.units else {}
            trial = _Trial(
                apart, self.example, list(self.units), flow, {}, False, tied_parameters(net)
            )
            for name, keep in self.selects.items():
                layer = _selecting(trial.net.get_submodule(name), keep)
                trial.net = replaced(trial.net, name, layer)
            same = trial.equals(Probes(plain, self.example))
            if len(trial.zeroed) != len(self.units) or not same:
                raise VardropError(
                    "Expected `net` to be the one that was planned for, but got another, or it "
                    "has changed since. Call vardrop.plan_shrink again."
                )
        return trial.net

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
        head = ("layer", "kind", "weights", "inputs", "outputs", "MACs", "bytes")
        quantities = ("weights", "inputs", "outputs", "macs", "bytes")
        rows: list[tuple[str, ...]] = [head]
        for r in self.layers:
            pairs = ((getattr(r.before, q), getattr(r.after, q)) for q in quantities)
            rows.append((r.name or "(net)", r.kind, *(f"{b} -> {a}" for b, a in pairs)))
        sums = {q: "{} -> {}".format(*self.total(q)) for q in quantities}
        rows.append(("total", "", sums["weights"], "", "", sums["macs"], sums["bytes"]))
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
        lines.append(f"{self.compression:.1f} times fewer weights")
        return "\n".join(line.rstrip() for line in [*lines, *self.notes, self.proof])


def plan_shrink(
    net: nn.Module,
    example_input: Any,
    threshold: Thresholds = None,
    drop_inputs: bool = False,
) -> ShrinkPlan:
    """Plan what `shrink` takes out of a net: layer by layer, and why dead units stay.

    Whether the code between the layers survives the cut is tried on a copy; the given net is left
    as it is. The arguments are those of `shrink`.

    >>> import torch, vardrop as vd
    >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    >>> _ = net[2].weight.data[:, 1:].zero_()
    >>> print(plan_shrink(net, torch.zeros(1, 3)))
    layer  kind    weights  inputs  outputs  MACs     bytes
    0      Linear  12 -> 3  3 -> 3  4 -> 1   12 -> 3  64 -> 16
    2      Linear  8 -> 2   4 -> 1  2 -> 2   8 -> 2   40 -> 16
    total          20 -> 5                   20 -> 5  104 -> 32
    4.0 times fewer weights
    Equal on the example and on 5 random inputs of scale 0.01 to 100.
    """
    return planned(net, example_input, threshold, drop_inputs)[0]


def shrink(
    net: nn.Module,
    example_input: Any,
    threshold: Thresholds = None,
    drop_inputs: bool = False,
) -> nn.Module:
    """A plain, smaller net with the outputs of the noisy net's means without its dead weights.

    Weights that the threshold calls dead are zero. Units that no weight reads are cut out; units
    that do not depend on the data are cut out and what they say is added to the next bias, exactly,
    or they stay. The result is compared with the masked net on the example and on random inputs of
    several scales; units whose removal would show there stay. The given net is left as it is.

    The same as `plan_shrink(...).apply(net)`: keep the plan to print it, and for `pack`.

    Args:
        net: a noisy net, or a plain one whose zeros are its dead weights.
        example_input: one input of the usual shape: a tensor, a tuple of arguments, or a dictionary
            of named ones.
        threshold: on each method's relevance (`vardrop.relevance`): one number, one by module name,
            the result of `choose_threshold`; the methods' own rules where None.
        drop_inputs: put a `Select` in front of layers that do not read all of their inputs, and a
            `Lookup` in front of embeddings, whose entries that are zero then share one.

    Returns:
        The small net, in evaluation mode.

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
    return planned(net, example_input, threshold, drop_inputs)[1]


@torch.inference_mode(mode=False)
def planned(
    net: nn.Module, example_input: Any, threshold: Thresholds, drop_inputs: bool
) -> tuple[ShrinkPlan, nn.Module]:
    """The plan, and the small net on which it was tried."""
    check_net(net)
    check_type("drop_inputs", drop_inputs, bool, "True or False")
    # A copy, because tensors that were made in inference mode stay such.
    inputs = untouched(as_inputs(example_input))
    _check_finite(net)
    check_means(net, "to shrink")
    rule = rules(net, threshold)
    plain, deviations = without_dead(net, rule)
    check_runs(plain, inputs)
    probes, apart = Probes(plain, inputs), _apart(plain, deviations)
    found, flow, notes = _followed(apart, inputs)
    ties = tied_parameters(net)

    def attempt(units: list[Unit]) -> _Trial:
        return _Trial(apart, inputs, units, flow, deviations, drop_inputs, ties)

    trial = _proven(attempt, found, probes)
    shared = {name for names in tied_parameters(trial.net) for name in names}
    untied = [name for name in gated_ties(net) if inside(name, "weight") not in shared]
    notes += [f"'{n}' gets weights of its own: its gate is folded in." for n in untied]
    for name, module in modules_of(plain, Noisy).items():
        notes.append(f"'{name}' ({type(module).__name__}) stays noisy: it has no plain twin.")
    layers, before = affine_layers(apart), layer_costs(apart, inputs)
    plan = ShrinkPlan(
        layers=tuple(_layer_report(n, v, before[n], trial.costs) for n, v in layers.items()),
        notes=(*trial.notes, *notes),
        proof=str(probes),
        deviations=trial.deviations,
        thresholds={name: r.threshold for name, r in rule.items()},
        units=tuple(trial.zeroed),
        selects=trial.selects,
        example=inputs,
    )
    return plan, trial.net


def _apart(plain: nn.Module, deviations: dict[str, Tensor]) -> nn.Module:
    """A copy of a plain net with its attention and recurrent layers as dense layers."""
    net = taken_apart(copy.deepcopy(plain), deviations)
    for layer in modules_of(net, SlimAttention).values():
        layer.fold_constants()
    return net


def _check_finite(net: nn.Module) -> None:
    for name, parameter in net.named_parameters():
        if parameter.is_floating_point() and not bool(parameter.isfinite().all()):
            raise VardropError(
                f"Expected the parameters of `net` to be finite, but got NaN or infinity in "
                f"'{name}'. Train it again from an earlier checkpoint."
            )


class _Trial:
    """A cut carried out on a copy of a plain net."""

    def __init__(
        self,
        plain: nn.Module,
        inputs: Inputs,
        found: list[Unit],
        flow: dict[str, list[Tensor]],
        deviations: dict[str, Tensor],
        drop_inputs: bool,
        ties: list[list[str]],
    ) -> None:
        self.net = copy.deepcopy(plain)
        self.notes: list[str] = []
        self.selects: dict[str, tuple[int, ...]] = {}
        self.zeroed: list[Unit] = []
        self.deviations = dict(deviations)
        if found:
            self._cut(Removal(self.net, inputs, found, flow))
        self.costs: dict[str, LayerCost] = {}
        self._measure(inputs)
        self.net = put_together(self.net, self.deviations)
        _tie_equal(self.net, ties)
        settle_fused_path(self.net)
        if drop_inputs:
            self._select_inputs(inputs)
            self._measure(inputs)

    def _measure(self, inputs: Inputs) -> None:
        try:
            self.costs |= layer_costs(self.net, inputs)
        except Exception:  # the code between the layers does not survive the cut: it equals nothing
            self.costs = {}

    def equals(self, probes: Probes) -> bool:
        """Whether the cut net agrees, on torch's fused path where that gives the same."""
        if probes.equal(self.net):
            return True
        for module in self.net.modules():
            leave_fused_path(module)
        return probes.equal(self.net)

    def _cut(self, removal: Removal) -> None:
        self.zeroed = removal.removed
        gone = rebalanced(self.net, self.zeroed)
        self.deviations = cut_out(self.net, gone, self.deviations)
        for name, layer in modules_of(self.net, SlimAttention).items():
            if layer.num_heads < (count := layer.embed_dim // layer.head_dim):
                self.notes.append(f"'{name}' keeps {layer.num_heads} of {count} heads.")
        for (name, why), count in removal.stays.items():
            self.notes.append(f"{count} units of '{name}' stay: {why}.")
        if back := len(self.zeroed) - len(gone):
            self.notes.append(f"{back} units stay to keep shapes whole.")

    def _select_inputs(self, inputs: Inputs) -> None:
        """Let layers that do not read all of their inputs take the others only."""
        attention = modules_of(self.net, SlimAttention).items()
        whole = {inside(name, part) for name, m in attention for part, _ in m.named_children()}
        tied = Counter(id(p) for m in self.net.modules() for p in m.parameters(recurse=False))
        for name, view in affine_layers(self.net).items():
            unread, own = view.unread(), tied[id(view.layer.weight)] == 1
            if own and view.groups == 1 and any(unread) and name not in whole:
                keep = tuple(i for i, u in enumerate(unread) if not u) or (0,)
                self._select(name, view.layer, keep, inputs)
        for name, layer in modules_of(self.net, nn.Embedding).items():
            keep = tuple(layer.weight.detach().any(1).nonzero().flatten().tolist())
            own = type(layer) is nn.Embedding and tied[id(layer.weight)] == 1
            if own and layer.max_norm is None and len(keep) < layer.num_embeddings - 1:
                self._select(name, layer, keep, inputs)
                text = f"'{name}' keeps {len(keep)} of {layer.num_embeddings} entries, and a zero."
                self.notes += [text] if name in self.selects else []

    def _select(self, name: str, layer: Any, keep: tuple[int, ...], inputs: Inputs) -> None:
        """Put a layer that reads these inputs only in the place of another, if that runs."""
        net = replaced(self.net, name, _selecting(layer, keep))
        try:
            run(net, inputs)
        except Exception as failure:  # other code reads what the layer has
            self.notes.append(f"'{name}' keeps inputs that it does not read: {failure}.")
            self.net = replaced(net, name, layer)
            return
        self.net, self.selects[name] = net, keep
        if (deviation := self.deviations.pop(inside(name, "weight"), None)) is not None:
            self.deviations[inside(name, "1.weight")] = _kept_inputs(layer, deviation, keep)


def tied_parameters(net: nn.Module) -> list[list[str]]:
    """The names of every parameter that has several.

    >>> net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2))
    >>> net[1].weight = net[0].weight
    >>> tied_parameters(net)
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
        kept: list[nn.Parameter] = []
        for name in names:
            if (mine := parameters.get(name)) is None:
                continue
            same = next((k for k in kept if torch.equal(k, mine)), None)
            if same is None:
                kept.append(mine)
            elif same is not mine:
                owner, _, own = name.rpartition(".")
                setattr(net.get_submodule(owner), own, same)


def _selecting(layer: Any, keep: tuple[int, ...]) -> nn.Module:
    """A copy of a layer that reads some of its inputs only, after a `Select` or a `Lookup`."""
    layer = copy.deepcopy(layer)
    index = torch.tensor(keep, device=layer.weight.device, dtype=torch.long)
    if (view := affine(layer)) is not None:
        view.resize(keep, range(view.outputs))
        return nn.Sequential(Select(index, view.axis), layer).eval()
    numbers = torch.full((layer.num_embeddings,), len(keep), device=index.device)
    numbers[index] = torch.arange(len(keep), device=index.device)
    rows = _kept_inputs(layer, layer.weight.detach(), keep)
    layer.weight = nn.Parameter(rows, layer.weight.requires_grad)
    layer.num_embeddings, layer.padding_idx = len(rows), None
    return nn.Sequential(Lookup(numbers), layer).eval()


def _kept_inputs(layer: Any, tensor: Tensor, keep: tuple[int, ...]) -> Tensor:
    """The part of a tensor like a weight for these inputs; an embedding keeps one of the others."""
    if (view := affine(layer)) is not None:
        return view.cut(tensor, keep, range(view.outputs))
    other = next(i for i in range(len(tensor)) if i not in set(keep))
    return tensor[[*keep, other]]


def _followed(
    plain: nn.Module, inputs: Inputs
) -> tuple[list[Unit], dict[str, list[Tensor]], list[str]]:
    """The units of a net and its data; a note where its own code lets no mark through."""
    try:
        flow = data_flow(plain, inputs)
        return coupled_units(plain, inputs, fixed_layers(plain, inputs)), flow, []
    except Exception as failure:
        return [], {}, [f"No unit goes: marks cannot be followed through this net ({failure})."]


def _proven(attempt: Callable[[list[Unit]], _Trial], found: list[Unit], probes: Probes) -> _Trial:
    """Shrink with all units; where that is not equal, with those that are equal by themselves."""
    trial = attempt(found)
    if trial.equals(probes):
        return trial
    reasons = {
        shape: None
        if attempt(_only(found, shape)).equals(probes)
        else "taking it out changes the outputs"
        for shape in {u.shape for u in found if u.reason is None}
    }
    trial = attempt([dataclasses.replace(u, reason=u.reason or reasons[u.shape]) for u in found])
    if not trial.equals(probes):
        raise VardropError(
            "Expected the shrunken net to equal the masked one, but got other outputs. "
            "Some operation between its layers mixes units in a way that could not be followed."
        )
    return trial


def _only(found: list[Unit], shape: tuple[tuple[str, ...], ...]) -> list[Unit]:
    return [u if u.shape == shape else dataclasses.replace(u, reason="left out") for u in found]


def layer_costs(net: nn.Module, inputs: Inputs) -> dict[str, LayerCost]:
    """The cost of every affine layer at one example; others are taken apart into such.

    The products of queries with keys are counted with the keys, those of weights with values with
    the values.
    """
    if any(map(is_whole, net.modules())):
        net = taken_apart(copy.deepcopy(net), {})
    layers, attention = affine_layers(net), modules_of(net, SlimAttention)
    macs: Counter[str] = Counter()

    def count(name: str, view: Affine) -> Callable[..., None]:
        def hook(layer: nn.Module, args: Inputs, output: Tensor) -> None:
            # A transposed layer multiplies its kernel once per input position, others per output.
            where, each = (args[0], view.inputs) if view.kind.transposed else (output, view.outputs)
            macs[name] += view.weight.numel() * (where.numel() // each)

        return hook

    def count_pairs(name: str) -> Callable[..., None]:
        def hook(layer: SlimAttention, args: Inputs, kwargs: dict[str, Any], output: Any) -> None:
            for part in ("k_proj", "v_proj"):
                macs[inside(name, part)] += layer.pairs(*args, **kwargs) * layer.head_dim

        return hook

    handles: list[Removable] = [
        v.layer.register_forward_hook(count(n, v)) for n, v in layers.items()
    ]
    for name, layer in attention.items():
        handles.append(layer.register_forward_hook(count_pairs(name), with_kwargs=True))
    batch = next((len(t) for t in tensors_in(inputs) if t.dim()), 1)
    with hooks(*handles):
        run(net, inputs)
    return {
        name: LayerCost(
            int(view.weight.count_nonzero()),
            view.inputs,
            view.outputs,
            macs=macs[name] // max(batch, 1),
            bytes=sum(p.numel() * p.element_size() for p in view.layer.parameters()),
        )
        for name, view in layers.items()
    }


def _layer_report(
    name: str, view: Affine, before: LayerCost, after: dict[str, LayerCost]
) -> LayerReport:
    start = dataclasses.replace(before, weights=view.weight.numel())
    selecting = inside(name, "1")
    left = after[selecting if selecting in after else name]
    return LayerReport(name, type(view.layer).__name__, start, left)
