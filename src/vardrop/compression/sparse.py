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

from vardrop.compression.flow import (
    Inputs,
    as_inputs,
    check_plain,
    check_runs,
    evaluating,
    hooks,
    run,
)
from vardrop.compression.parts import is_selecting, replaced
from vardrop.errors import VardropError

_MARGIN = 0.95  # another way has to win clearly, so that a noisy clock does not choose it


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
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach().clone())
        self._ready: tuple[Tensor, Tensor | None] | None = None

    def _tensors(self) -> tuple[Tensor, Tensor | None]:
        """The weight as a CSR tensor on the memory of the buffers, and the bias; built once."""
        size = (self.out_features, self.in_features)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            weight = torch.sparse_csr_tensor(self.rows, self.columns, self.values, size)
        self._ready = weight, self.bias
        return self._ready

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self._ready = None  # the buffers move
        return super()._apply(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ready": None}  # CSR tensors cannot be copied

    def forward(self, input: Tensor) -> Tensor:
        """The output of the dense layer."""
        weight, bias = self._ready or self._tensors()
        if len(input) == 1 and input.dim() == 2:  # a single example: a product with a vector
            x = input.reshape(-1)
            y = torch.mv(weight, x) if bias is None else torch.addmv(bias, weight, x)
            return y.unsqueeze(0)
        x = input.reshape(-1, self.in_features).t()
        y = weight @ x if bias is None else torch.addmm(bias.unsqueeze(1), weight, x)
        return y.t().reshape(*input.shape[:-1], self.out_features)

    def dense(self) -> nn.Linear:
        """The plain layer again."""
        layer = nn.Linear(self.in_features, self.out_features, self.bias is not None)
        with torch.no_grad():
            layer.weight.copy_(self._tensors()[0].to_dense())
            if self.bias is not None:
                layer.bias.copy_(self.bias)
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


def _layer_inputs(net: nn.Module, inputs: Inputs) -> dict[str, tuple[nn.Module, Tensor]]:
    """Every dense layer, together with the `Select` before it, and what it is given."""
    seen: dict[str, tuple[nn.Module, Tensor]] = {}

    def note(name: str) -> Callable[..., None]:
        return lambda layer, args: seen.update({name: (layer, args[0].detach().clone())})

    selecting = {n: m for n, m in net.named_modules() if is_selecting(m) and _is_linear(m[1])}
    inside = {m[1] for m in selecting.values()}
    layers = {n: m for n, m in net.named_modules() if _is_linear(m) and m not in inside}
    handles = [m.register_forward_pre_hook(note(n)) for n, m in (layers | selecting).items()]
    with hooks(*handles):
        run(net, inputs)
    return seen


def _is_linear(module: Any) -> bool:
    return type(module) is nn.Linear


def _candidates(module: Any, inputs: int) -> list[nn.Module]:
    """Other ways to run a dense layer: as CSR, and without the `Select` before it."""
    if _is_linear(module):
        return [SparseLinear(module)]
    select, layer = module
    full = nn.Linear(inputs, layer.out_features, layer.bias is not None).to(layer.weight)
    with torch.no_grad():
        full.weight.zero_().index_copy_(1, select.index, layer.weight)
        if layer.bias is not None:
            full.bias.copy_(layer.bias)
    return [nn.Sequential(select, SparseLinear(layer)), full, SparseLinear(full)]


def sparsify(net: nn.Module, example_input: Any) -> nn.Module:
    """A copy of a plain net in which every dense layer runs in the way that is fastest here.

    Each `nn.Linear` is timed as it is, as CSR, and (behind a `Select`) with all of its inputs, at
    the example's batch size; then the whole net. The plain net comes back where nothing is gained.
    For prediction on CPU.

    Args:
        net: a plain net, such as the result of `shrink`.
        example_input: an input of the batch size that matters.

    >>> import torch
    >>> type(sparsify(torch.nn.Sequential(torch.nn.Linear(4, 2)), torch.zeros(1, 4))[0])
    <class 'torch.nn.modules.linear.Linear'>
    """
    inputs = as_inputs(example_input)
    check_plain(net)
    check_runs(net, inputs)
    if any(p.device.type != "cpu" for p in net.parameters()):
        raise VardropError("Expected `net` to be on the CPU, but got another device. Call .cpu().")
    fast = copy.deepcopy(net)
    with torch.no_grad():
        for name, (layer, x) in _layer_inputs(net, inputs).items():
            best = _fastest(layer, x)
            if best is not layer:
                fast = replaced(fast, name, best.eval())
    with evaluating(net), evaluating(fast):
        times = race({"fast": partial(fast, *inputs), "net": partial(net, *inputs)}, rounds=5)
    return fast if times["fast"] < times["net"] else copy.deepcopy(net)


def _fastest(layer: nn.Module, x: Tensor) -> nn.Module:
    ways = [layer, *_candidates(layer, x.shape[-1])]
    times = race({str(i): partial(way, x) for i, way in enumerate(ways)}, rounds=3)
    best = min(range(1, len(ways)), key=lambda i: times[str(i)])
    return ways[best] if times[str(best)] < _MARGIN * times["0"] else layer
