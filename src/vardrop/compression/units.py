"""Units of a model: outputs and inputs of layers that can only be removed together."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from torch import nn

from vardrop.compression.costs import LayerCost
from vardrop.compression.layer_views import affine_layers, join_name
from vardrop.compression.modules.pruned_recurrent import Unrolled
from vardrop.noisy import named_modules_of

Place = tuple[str, int]  # the name of a module and one of its units
TO_THE_OUTPUT = "it reaches the output of the model"


@dataclass(frozen=True, eq=False)
class Unit:
    """A unit that can only be removed at all of its places together.

    Args:
        emitters: the outputs of layers that emit it.
        readers: the inputs of layers that read it.
        carriers: the entries of modules in between, such as norms.
        reason: why it has to stay, or None if it can be removed.
    """

    emitters: tuple[Place, ...]
    readers: tuple[Place, ...]
    carriers: tuple[Place, ...] = ()
    reason: str | None = None

    @property
    def shape(self) -> tuple[tuple[str, ...], ...]:
        """The modules that it passes. Units of one shape take the same way through the model."""
        parts = (self.emitters, self.readers, self.carriers)
        return tuple(tuple(sorted({name for name, _ in p})) for p in parts)


class UnitGraph(NamedTuple):
    """The units of a model and the costs of its modules.

    Args:
        units: all units, in the order of the model.
        costs: the costs of its modules by name.
        obstacle: why no unit could be followed, or None.
    """

    units: tuple[Unit, ...]
    costs: Mapping[str, LayerCost]
    obstacle: str | None = None


# The groups of a layer, or layers of one width: the inputs of every block, and the outputs.
Blocks = tuple[list[list[Place]], list[list[Place]]]


def equal_places(net: nn.Module) -> list[Blocks]:
    """Blocks that have to keep equally many inputs, and equally many outputs.

    The inputs of parts of a recurrent layer are not compared, so such blocks have none.
    """
    layers, blocks = affine_layers(net), list[Blocks]()
    for name, view in layers.items():
        ins, outs = (
            [[(name, group * size + i) for i in range(size)] for group in range(view.groups)]
            for size in (view.inputs // view.groups, view.outputs // view.groups)
        )
        blocks.append((ins, outs))
    for name, layer in named_modules_of(net, Unrolled).items():
        names = [join_name(name, part) for part in layer.equal_widths()]
        outs = [[(n, i) for i in range(layers[n].outputs)] for n in names]
        blocks.append(([[] for _ in names], outs))
    return blocks


_Member = TypeVar("_Member", bound=Hashable)


class DisjointSets(dict[_Member, _Member]):
    """Sets that are merged by joining pairs of members. The values are the parents of members."""

    def root(self, member: _Member) -> _Member:
        """The representative of a member's set. A new member is a set by itself."""
        while self.setdefault(member, member) != member:
            self[member] = self[self[member]]
            member = self[member]
        return member

    def join(self, one: _Member, other: _Member) -> None:
        """Merge the sets of two members."""
        self[self.root(one)] = self.root(other)
