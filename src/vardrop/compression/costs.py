"""The costs of a model's modules for one example: multiplications (MACs), weights, bytes."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from torch.utils.flop_counter import flop_registry

from vardrop._core.calls import tensors_in
from vardrop._core.modules import hooks
from vardrop._core.torch_private import PlainAttention, TorchDispatchMode
from vardrop.compression.layer_views import affine_layers, join_name
from vardrop.compression.mask import decompose_layers
from vardrop.compression.modules.pruned_attention import SlimAttention
from vardrop.compression.probes import Inputs, run
from vardrop.noisy import named_modules_of


@dataclass(frozen=True)
class LayerCost:
    """The costs of one module.

    Args:
        weights: the number of nonzero weights.
        inputs, outputs: the numbers of units, for layers of a known type.
        macs: multiplications per example.
        bytes: of its tensors.
    """

    weights: int
    inputs: int
    outputs: int
    macs: int
    bytes: int


Costs = dict[str, LayerCost]  # by module


class CountedPass(TorchDispatchMode):
    """One pass of an example that counts the calls and the multiplications of every module.

    A product belongs to the innermost module that runs it, so products in the code of any module
    are counted by the rules of `torch.utils.flop_counter`. There are no rules for the fused kernels
    of recurrent layers, so decompose such a model first.
    """

    def __init__(self, net: nn.Module, inputs: Inputs) -> None:
        super().__init__()
        self.net, self.inputs = net, inputs
        self.calls, self._macs = Counter[str](), Counter[str]()
        self._running: list[str] = []

        def track(name: str | None, *_: object) -> None:
            if name is None:
                self._running.pop()
            else:
                self.calls[name] += 1
                self._running.append(name)

        named = list(net.named_modules())
        handles = [m.register_forward_pre_hook(partial(track, name)) for name, m in named]
        handles += [m.register_forward_hook(partial(track, None)) for _, m in named]
        with hooks(*handles), PlainAttention(), self:
            run(net, inputs)

    def __torch_dispatch__(
        self, func: Any, types: object, args: Inputs = (), kwargs: dict[str, object] | None = None
    ) -> Any:
        returned = func(*args, **(kwargs or {}))
        if (count := flop_registry.get(func.overloadpacket)) is not None and self._running:
            self._macs[self._running[-1]] += count(*args, **(kwargs or {}), out_val=returned) // 2
        return returned

    def costs(self) -> Costs:
        """The costs of the affine layers, then of other modules that multiply."""
        macs = self._macs.copy()
        for name in named_modules_of(self.net, SlimAttention):
            products = macs.pop(name, 0)  # of queries with keys, and of weights with values
            for part in ("k_proj", "v_proj"):
                macs[join_name(name, part)] += products // 2
        batch = next((len(t) for t in tensors_in(self.inputs) if t.dim()), 1)
        layers = affine_layers(self.net)
        costs = Costs()
        for name in (*layers, *(n for n, _ in self.net.named_modules() if n not in layers)):
            view, module = layers.get(name), self.net.get_submodule(name)
            parameters = list(module.parameters(recurse=False))
            if view is not None or macs[name]:
                costs[name] = LayerCost(
                    weights=sum(int(p.count_nonzero()) for p in parameters if p.dim() > 1),
                    inputs=view.inputs if view else 0,
                    outputs=view.outputs if view else 0,
                    macs=macs[name] // max(batch, 1),
                    bytes=sum(p.nbytes for p in parameters),
                )
        return costs


def layer_costs(net: nn.Module, inputs: Inputs) -> Costs:
    """The costs of a model by module. Attention and recurrent layers count as dense layers."""
    return CountedPass(decompose_layers(copy.deepcopy(net)), inputs).costs()
