"""Cut dead units out of a copy of a model, and check that its outputs stay equal."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vardrop._core.encoder import disable_encoder_fastpath, update_encoder_fastpath
from vardrop._core.errors import VardropError
from vardrop.compression import layer_views
from vardrop.compression.layer_views import replace_module, replace_tensor
from vardrop.compression.mask import decompose_layers, recompose_layers
from vardrop.compression.modules.pruned_attention import SlimAttention
from vardrop.compression.modules.select import Lookup, Select
from vardrop.compression.probes import CODE_ERRORS, Inputs, Probes, run
from vardrop.compression.remove_units import Removal, cut_out, data_flow, keep_equal_widths
from vardrop.compression.units import Unit, UnitGraph
from vardrop.noisy import Noisy, named_modules_of


def copy_decomposed(plain: nn.Module) -> nn.Module:
    """A copy with attention and recurrent layers as dense layers."""
    net = decompose_layers(copy.deepcopy(plain))
    for layer in named_modules_of(net, SlimAttention).values():
        layer.fold_constants()
    return net


class Cut:
    """A copy of a decomposed model without its dead units, with torch's layers again.

    `removed` are all units that are zero. `gone` are the units of these that could be cut out.
    `selects` are the remaining inputs of layers that do not read all inputs.
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
        self.removed, self.gone = removal.removed, keep_equal_widths(net, removal.removed)
        cut_out(net, self.gone)
        self.notes = [
            f"'{name}' keeps {layer.num_heads} of {count} heads."
            for name, layer in named_modules_of(net, SlimAttention).items()
            if layer.num_heads < (count := layer.embed_dim // layer.head_dim)
        ]
        for (name, reason), count in removal.stays.items():
            self.notes.append(f"{count} units of '{name}' stay: {reason}.")
        if back := len(self.removed) - len(self.gone):
            self.notes.append(f"{back} units stay to keep layers of equal width.")
        self.net = recompose_layers(net)
        if ties:
            _tie_equal(self.net, ties)
        update_encoder_fastpath(self.net, Noisy)
        self.selects: dict[str, tuple[int, ...]] = {}
        if drop_inputs:
            self._drop_inputs(inputs)

    def equals(self, probes: Probes) -> bool:
        """Whether the outputs are equal, if necessary without the fast path of encoders."""
        if probes.equal(self.net):
            return True
        for module in self.net.modules():
            disable_encoder_fastpath(module)
        return probes.equal(self.net)

    def _drop_inputs(self, inputs: Inputs) -> None:
        """Put a selection before layers that do not read all of their inputs."""
        for name, keep in _find_read_inputs(self.net).items():
            layer = self.net.get_submodule(name)
            self.net = select_inputs(self.net, {name: keep})
            try:
                run(self.net, inputs)
            except AttributeError as failure:  # other code reads attributes of the layer
                self.notes.append(f"'{name}' keeps inputs that it does not read: {failure}.")
                self.net = replace_module(self.net, name, layer)
                continue
            self.selects[name] = keep
            if isinstance(layer, nn.Embedding):
                entries = f"{len(keep)} of {layer.num_embeddings} entries"
                self.notes.append(f"'{name}' keeps {entries}, and a zero.")


def _find_read_inputs(net: nn.Module) -> dict[str, tuple[int, ...]]:
    """The inputs that layers read, and the entries of embeddings that are not zero.

    Only layers that do not read all of their inputs are included.
    """
    attention = named_modules_of(net, SlimAttention)
    owners, reads = layer_views.parameter_owners(net), {}
    for name, view in layer_views.affine_layers(net).items():
        unread, unshared = view.unread(), owners[id(view.layer.weight)] == 1
        is_projection = name.rpartition(".")[0] in attention and name not in attention
        if unshared and view.groups == 1 and bool(unread.any()) and not is_projection:
            reads[name] = tuple((~unread).nonzero().flatten().tolist()) or (0,)
    for name, table in named_modules_of(net, nn.Embedding).items():
        keep = tuple(table.weight.detach().any(1).nonzero().flatten().tolist())
        unshared = type(table) is nn.Embedding and owners[id(table.weight)] == 1
        if unshared and table.max_norm is None and len(keep) < table.num_embeddings - 1:
            reads[name] = keep
    return reads


def cut_dead_units(
    parts: nn.Module,
    inputs: Inputs,
    graph: UnitGraph,
    probes: Probes,
    make_cut: Callable[..., Cut],
    advance: Callable[[], None],
) -> Cut:
    """Cut all units, or if that changes an output, the units that change none by themselves."""
    obstacle, flow = graph.obstacle, {}
    if obstacle is None:
        try:
            flow = data_flow(parts, inputs)
        except CODE_ERRORS as failure:  # the model's code raises an error for NaN
            obstacle = str(failure)
    units = () if obstacle else graph.units

    def attempt(reasons: Mapping[tuple[tuple[str, ...], ...], str]) -> Cut | None:
        """The cut of all units except units of these shapes, if the outputs stay equal."""
        chosen = units
        if reasons:
            pairs = ((u, u.reason or reasons.get(u.shape)) for u in units)
            chosen = tuple(dataclasses.replace(u, reason=reason) for u, reason in pairs)
        cut = make_cut(parts, inputs, chosen, flow)
        advance()
        return cut if cut.equals(probes) else None

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
        text = f"No unit is removed: marks cannot be followed through this model ({obstacle})."
        cut.notes.append(text)
    elif not cut.removed and not cut.notes:
        cut.notes.append("No unit is removed: none of those that could be followed is dead.")
    return cut


@torch.no_grad()
def cut_deviations(
    plain: nn.Module, deviations: Mapping[str, Tensor], cut: Cut
) -> dict[str, Tensor]:
    """The standard deviations of the remaining weights.

    `plain` becomes a model of standard deviations in place, which is cut like the weights.
    """
    for parameter in plain.parameters():
        parameter.fill_(-1)  # no standard deviation
    for name, deviation in deviations.items():
        owner, _, tensor = name.rpartition(".")
        replace_tensor(plain.get_submodule(owner), tensor, deviation)
    net = decompose_layers(plain)
    cut_out(net, cut.gone)
    net = select_inputs(recompose_layers(net), cut.selects)
    named = net.named_parameters(remove_duplicate=False)
    return {n: p.detach() for n, p in named if p.dim() > 1 and bool((p != -1).any())}


def select_inputs(net: nn.Module, selects: Mapping[str, tuple[int, ...]]) -> nn.Module:
    """Put a `Select` or a `Lookup` before layers, which then read only these inputs."""
    for name, keep in selects.items():
        layer: Any = copy.deepcopy(net.get_submodule(name))
        index = torch.tensor(keep, device=layer.weight.device, dtype=torch.long)
        first: nn.Module
        if (view := layer_views.affine(layer)) is not None:
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


def find_tied_parameters(net: nn.Module) -> list[list[str]]:
    """The names of every parameter that has several names.

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
    """Tie parameters again that were tied before and are still equal."""
    parameters = dict(net.named_parameters(remove_duplicate=False))
    for names in ties:
        distinct: list[nn.Parameter] = []
        for name in (n for n in names if n in parameters):
            same = next((p for p in distinct if torch.equal(p, parameters[name])), None)
            if same is None:
                distinct.append(parameters[name])
            else:
                owner, _, tensor = name.rpartition(".")
                setattr(net.get_submodule(owner), tensor, same)
