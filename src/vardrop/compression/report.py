"""What a net costs, layer by layer, before and after."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from vardrop.compression.flow import Inputs, hooks, run
from vardrop.compression.layout import affine_layers, units


@dataclass(frozen=True)
class LayerCost:
    """One layer: weights that are not zero, units, multiplications an example, bytes."""

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


@dataclass(frozen=True)
class ShrinkReport:
    """What shrinking does to a net: its layers, and why dead units stay where they do."""

    layers: tuple[LayerReport, ...]
    notes: tuple[str, ...] = ()

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
        sums = {q: self.total(q) for q in quantities}
        pairs_text = (f"{b} -> {a}" for q, (b, a) in sums.items() if q not in ("inputs", "outputs"))
        weights, macs, size = pairs_text
        rows.append(("total", "", weights, "", "", macs, size))
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
        lines.append(f"{self.compression:.1f} times fewer weights")
        return "\n".join(line.rstrip() for line in [*lines, *self.notes])


def layer_costs(net: nn.Module, inputs: Inputs) -> dict[str, LayerCost]:
    """The cost of every affine layer at one example."""
    positions: dict[str, int] = {}

    def count(name: str) -> Any:
        def hook(layer: Any, args: tuple[Tensor, ...], output: Tensor) -> None:
            # A transposed layer multiplies its kernel once an input position, others an output.
            where = args[0] if layer_is_transposed(layer) else output
            each = units(layer)[0] if layer_is_transposed(layer) else units(layer)[1]
            positions[name] = positions.get(name, 0) + where.numel() // each

        return hook

    layers = affine_layers(net)
    batch = next((len(t) for t in inputs if isinstance(t, Tensor) and t.dim()), 1)
    with hooks(*(layer.register_forward_hook(count(n)) for n, layer in layers.items())):
        run(net, inputs)
    return {
        name: LayerCost(
            int(layer.weight.detach().count_nonzero()),
            *units(layer),
            macs=layer.weight.numel() * positions.get(name, 0) // max(batch, 1),
            bytes=sum(p.numel() * p.element_size() for p in layer.parameters()),
        )
        for name, layer in layers.items()
    }


def layer_is_transposed(layer: Any) -> bool:
    """Whether a layer is a transposed convolution."""
    return isinstance(layer, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d)
