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
from vardrop._core.errors import VardropError
from vardrop._core.progress import ProgressLine
from vardrop.compression import mask
from vardrop.compression.costs import LayerCost, layer_costs
from vardrop.compression.cut import cut_dead_units, cut_deviations
from vardrop.compression.layer_views import join_name
from vardrop.compression.mask import Thresholds, zero_pruned_weights
from vardrop.compression.probes import Probes, check_runs, time_interleaved, to_arguments
from vardrop.compression.trace_units import trace_units
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
        lines = [f"MACs {totals['macs']}, bytes {totals['bytes']}"]
        lines.append(f"latency {before} -> {after} ms for the example")
        rows = [("layer", "kind", *_QUANTITIES.values())]
        for r in self.layers:
            pairs = ((getattr(r.before, q), getattr(r.after, q)) for q in _QUANTITIES)
            rows.append((r.name or "(net)", r.kind, *(f"{b} -> {a}" for b, a in pairs)))
        rows.append(("total", "", totals["macs"], totals["bytes"], "", ""))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            lines.append("  ".join(cells).rstrip())
        lines += [*self.notes, self.proof]
        if self.thresholds:
            lines.append(
                f"The threshold changes the outputs of the example by at most {self.change:.2g}."
            )
        weights = f"weights that are not zero: {totals['weights']}"
        return "\n".join([*lines, f"{weights}, {self.compression:.1f} times fewer"])


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
    for name, parameter in net.named_parameters():
        if parameter.is_floating_point() and not bool(parameter.isfinite().all()):
            raise VardropError(
                f"Expected the parameters of `net` to be finite, but got NaN or infinity in "
                f"'{name}'. Train it again from an earlier checkpoint."
            )
    mask.check_means(net, "to shrink")
    # Tensors that were made in inference mode stay inference tensors, so the inputs are cloned.
    inputs, relevances = clone_batch(to_arguments(example_input)), mask.rules(net, threshold)
    plain, deviations = zero_pruned_weights(net, threshold)
    with ProgressLine("shrink", progress=progress) as line:
        check_runs(plain, inputs)
        probes, parts = Probes(plain, inputs), mask.decompose_layers(copy.deepcopy(plain))
        graph = trace_units(parts, inputs, line.advance)
        cut = cut_dead_units(parts, inputs, graph, probes, net, drop_inputs, line.advance)
        nets = {"before": plain, "after": cut.net}
        calls = {key: partial(call_net, m, clone_batch(inputs)) for key, m in nets.items()}
        with torch.no_grad():
            before, after = time_interleaved(calls, rounds=1).values()
    for name, module in named_modules_of(plain, Noisy).items():
        kind = type(module).__name__
        cut.notes.append(f"'{name}' ({kind}) stays noisy: it has no plain equivalent.")
    is_pruned = not all(bool(r.kept.all()) for r in relevances.values())
    plan = ShrinkPlan(
        layers=_layer_reports(parts, graph.costs, layer_costs(cut.net, inputs), cut.selects),
        notes=tuple(cut.notes),
        proof=str(probes),
        change=probes.change(net) if is_pruned else 0.0,
        latency=(before, after),
        standard_deviations=cut_deviations(plain, deviations, cut),
        thresholds={name: r.threshold for name, r in relevances.items()},
    )
    return Shrunk(cut.net, plan)


def _layer_reports(
    net: nn.Module,
    before: Mapping[str, LayerCost],
    after: Mapping[str, LayerCost],
    selects: Container[str],
) -> tuple[LayerReport, ...]:
    reports = []
    for name, cost in before.items():
        module = net.get_submodule(name)
        weights = sum(p.numel() for p in module.parameters(recurse=False) if p.dim() > 1)
        start = dataclasses.replace(cost, weights=weights)
        left = after.get(join_name(name, "1") if name in selects else name, _NO_COST)
        reports.append(LayerReport(name, type(module).__name__, start, left))
    return tuple(reports)
