"""Sparse execution where it wins: dense or CSR, layer by layer, by the clock."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vardrop.compression.flow import Inputs, as_inputs, evaluating, hooks, run
from vardrop.errors import VardropError

_MARGIN = 0.95  # CSR has to win clearly, so that a noisy clock does not choose it


class SparseLinear(nn.Module):
    """A dense layer whose weight is stored and multiplied as CSR, for prediction.

    y = (W x^T)^T + b with W in compressed sparse rows. Input (*, in_features).

    >>> import torch
    >>> layer = torch.nn.Linear(3, 2)
    >>> x = torch.ones(4, 3)
    >>> torch.allclose(SparseLinear(layer)(x), layer(x))
    True
    """

    rows: Tensor
    columns: Tensor
    values: Tensor
    bias: Tensor | None

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls its CSR support a beta
            weight = layer.weight.detach().to_sparse_csr()
        self.register_buffer("rows", weight.crow_indices().to(torch.int32))
        self.register_buffer("columns", weight.col_indices().to(torch.int32))
        self.register_buffer("values", weight.values())
        bias = None if layer.bias is None else layer.bias.detach().clone().unsqueeze(1)
        self.register_buffer("bias", bias)
        self._weight: Tensor | None = None

    @property
    def weight(self) -> Tensor:
        """The weight as a CSR tensor."""
        if self._weight is None or self._weight.values().data_ptr() != self.values.data_ptr():
            size = (self.out_features, self.in_features)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._weight = torch.sparse_csr_tensor(self.rows, self.columns, self.values, size)
        return self._weight

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_weight": None}  # CSR tensors cannot be copied

    def forward(self, input: Tensor) -> Tensor:
        """The output of the dense layer."""
        x = input.reshape(-1, self.in_features).t()
        weight = self.weight
        y = weight @ x if self.bias is None else torch.addmm(self.bias, weight, x)
        return y.t().reshape(*input.shape[:-1], self.out_features)

    def dense(self) -> nn.Linear:
        """The plain layer again."""
        layer = nn.Linear(self.in_features, self.out_features, self.bias is not None)
        with torch.no_grad():
            layer.weight.copy_(self.weight.to_dense())
            if self.bias is not None:
                layer.bias.copy_(self.bias.squeeze(1))
        return layer.to(self.values).eval()

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, nonzero={len(self.values)}"


def seconds(call: Callable[[], Any], budget: float = 0.02) -> float:
    """The best time of a call, over as many tries as fit into the budget, at least five."""
    call()
    best, tries, start = float("inf"), 0, time.perf_counter()
    while tries < 5 or time.perf_counter() - start < budget:
        begin = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - begin)
        tries += 1
    return best


def race(calls: dict[str, Callable[[], Any]], rounds: int = 10) -> dict[str, float]:
    """The best time of each of several calls, taken in turns so that other load hits all alike."""
    times = [{name: seconds(call) for name, call in calls.items()} for _ in range(rounds)]
    return {name: min(t[name] for t in times) for name in calls}


def _layer_inputs(net: nn.Module, inputs: Inputs) -> dict[str, Tensor]:
    seen: dict[str, Tensor] = {}

    def note(name: str) -> Callable[..., None]:
        return lambda layer, args: seen.update({name: args[0].detach().clone()})

    layers = {name: m for name, m in net.named_modules() if type(m) is nn.Linear}
    with hooks(*(m.register_forward_pre_hook(note(name)) for name, m in layers.items())):
        run(net, inputs)
    return seen


def sparsify(net: nn.Module, example_input: Any) -> nn.Module:
    """A copy of a plain net in which dense layers run as CSR where that is faster here.

    Every `nn.Linear` is timed both ways at the example's batch size, then the whole net; the plain
    net comes back where nothing is gained. For prediction on CPU.

    Args:
        net: a plain net, such as the result of `shrink`.
        example_input: an input of the batch size that matters.

    >>> import torch
    >>> type(sparsify(torch.nn.Sequential(torch.nn.Linear(4, 2)), torch.zeros(1, 4))[0])
    <class 'torch.nn.modules.linear.Linear'>
    """
    inputs = as_inputs(example_input)
    if any(p.device.type != "cpu" for p in net.parameters()):
        raise VardropError("Expected `net` to be on the CPU, but got another device. Call .cpu().")
    sparse = copy.deepcopy(net)
    changed = False
    with torch.no_grad():
        for name, x in _layer_inputs(net, inputs).items():
            layer = net.get_submodule(name)
            candidate = SparseLinear(layer)  # type: ignore[arg-type]
            times = race({"csr": partial(candidate, x), "dense": partial(layer, x)}, rounds=3)
            if times["csr"] < _MARGIN * times["dense"]:
                changed = True
                if not name:
                    return candidate
                sparse.set_submodule(name, candidate)
    if changed:
        with evaluating(net), evaluating(sparse):
            times = race({"csr": partial(sparse, *inputs), "dense": partial(net, *inputs)}, 5)
        if times["csr"] < times["dense"]:
            return sparse
    return copy.deepcopy(net)
