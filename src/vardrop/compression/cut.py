"""Cut dead units out of a copy of a model, and check that its outputs stay equal."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from vardrop._core.encoder import update_encoder_fastpath
from vardrop._core.errors import VardropError
from vardrop._core.modules import parameter_owners
from vardrop.compression.layer_views import affine_layers, replace_module, replace_tensor
from vardrop.compression.mask import decompose_layers, recompose_layers
from vardrop.compression.modules.pruned_attention import SlimAttention
from vardrop.compression.modules.select import Select
from vardrop.compression.probes import CODE_ERRORS, Inputs, Probes, run
from vardrop.compression.remove_units import Removal, cut_out, data_flow, keep_equal_widths
from vardrop.compression.units import Unit, UnitGraph
from vardrop.noisy import Noisy, named_modules_of


class Cut:
    """A copy of a decomposed model without its dead units, with torch's layers again.

    `removed` are all units that are zero. `gone` are the units of these that could be cut out.
    `selects` are the remaining inputs of layers that do not read all inputs.
    """

    def __init__(
        self,
        parts: nn.Module,
        inputs: Inputs,
        units: Sequence[Unit],
        flow: dict[str, list[Tensor]],
        ties: list[list[str]],
        drop_inputs: bool,
    ) -> None:
        net = copy.deepcopy(parts)
        removal = Removal(net, inputs, list(units), flow)
        self.removed, self.gone = removal.removed, list[Unit]()
        if self.removed:
            self.gone = keep_equal_widths(net, self.removed)
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
            self.net = select_inputs(self.net, {name: keep})
            try:
                run(self.net, inputs)
                self.selects[name] = keep
            except AttributeError as failure:
                self.notes.append(f"'{name}' keeps inputs that it does not read: {failure}.")
                self.net = replace_module(self.net, name, view.layer)


def cut_dead_units(
    parts: nn.Module,
    inputs: Inputs,
    graph: UnitGraph,
    probes: Probes,
    net: nn.Module,
    drop_inputs: bool,
    advance: Callable[[], None],
) -> Cut:
    """Cut all units, or if that changes an output, the units that change none by themselves.

    `parts` is decomposed. Parameters that are tied in `net` are tied again if they stay equal.
    """
    obstacle, ties, flow = graph.obstacle, find_tied_parameters(net), {}
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
        cut = Cut(parts, inputs, chosen, flow, ties, drop_inputs)
        advance()
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
    if cut.gone:
        cut_out(net, cut.gone)
    net = recompose_layers(net)
    if cut.selects:
        net = select_inputs(net, cut.selects)
    named = net.named_parameters(remove_duplicate=False)
    return {n: p.detach() for n, p in named if p.dim() > 1 and bool((p != -1).any())}


def select_inputs(net: nn.Module, selects: Mapping[str, tuple[int, ...]]) -> nn.Module:
    """Put a `Select` before layers, which then read only these inputs."""
    for name, keep in selects.items():
        (view,) = affine_layers(copy.deepcopy(net.get_submodule(name))).values()
        index = torch.tensor(keep, device=view.weight.device)
        is_read = torch.zeros(view.inputs, dtype=torch.bool).index_fill(0, index.cpu(), True)
        view.resize(is_read, torch.ones(view.outputs, dtype=torch.bool))
        selected = nn.Sequential(Select(index, view.axis), view.layer).eval()
        net = replace_module(net, name, selected)
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
            own = parameters[name]
            distinct.append(next((p for p in distinct if torch.equal(p, own)), own))
            owner, _, tensor = name.rpartition(".")
            setattr(net.get_submodule(owner), tensor, distinct[-1])
