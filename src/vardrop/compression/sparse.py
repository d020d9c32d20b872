"""Sparse execution: dense layers as CSR if that is faster.

With 95% zeros and one thread, `SparseLinear` is 2.0 and 3.1 times as fast as `nn.Linear` for 300 x
784 weights (1 and 256 examples), and 3.0 and 9.3 times for 1000 x 1000 weights.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from vardrop._core.calls import Batch, call_net, clone_batch
from vardrop._core.errors import VardropError
from vardrop._core.modules import hooks
from vardrop.compression.layer_views import replace_module
from vardrop.compression.probes import (
    Inputs,
    check_plain,
    check_runs,
    run,
    time_interleaved,
    to_arguments,
)
from vardrop.layers.dense import dense
from vardrop.noisy import evaluating

_MARGIN = 0.95  # CSR has to be clearly faster than dense, because the clock is noisy


class SparseLinear(nn.Module):
    """A dense layer whose weight is stored and multiplied as CSR, for prediction.

    y = (W x^T)^T + b with W in compressed sparse rows. Input (*, in_features).

    Args:
        layer: the dense layer.

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
        with warnings.catch_warnings(action="ignore"):  # torch calls its CSR support a beta
            weight = layer.weight.detach().to_sparse_csr()
        self.register_buffer("rows", weight.crow_indices().to(torch.int32))
        self.register_buffer("columns", weight.col_indices().to(torch.int32))
        self.register_buffer("values", weight.values())
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach().clone())
        self._ready: tuple[Tensor, Tensor | None] | None = None

    def _tensors(self) -> tuple[Tensor, Tensor | None]:
        """The weight as a CSR tensor that shares memory with the buffers, and the bias."""
        size = (self.out_features, self.in_features)
        with warnings.catch_warnings(action="ignore"):
            weight = torch.sparse_csr_tensor(self.rows, self.columns, self.values, size)
        self._ready = weight, self.bias
        return self._ready

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SparseLinear:
        self._ready = None  # the buffers move
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_ready": None}  # CSR tensors cannot be copied

    def forward(self, input: Tensor) -> Tensor:
        """The output of the dense layer."""
        weight, bias = self._ready or self._tensors()
        if len(input) == 1 and input.dim() == 2:  # a single example: a product with a vector
            x = input[0]
            y = torch.mv(weight, x) if bias is None else torch.addmv(bias, weight, x)
            return y.unsqueeze(0)
        x = input.reshape(-1, self.in_features).t()
        y = weight @ x if bias is None else torch.addmm(bias.unsqueeze(1), weight, x)
        return y.t().reshape(*input.shape[:-1], self.out_features)

    @property
    def weight(self) -> Tensor:
        """The weight as a dense tensor, for code that reads it."""
        return self._tensors()[0].to_dense()

    def dense(self) -> nn.Linear:
        """A plain dense layer with the same weights."""
        return dense(self.weight, self.bias).eval().requires_grad_()

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, nonzero={len(self.values)}"


def sparsify(net: nn.Module, example_input: Batch) -> nn.Module:
    """Copy a plain model, with dense layers as CSR if that is faster on this machine.

    Each `nn.Linear` is timed as dense and as CSR at the example's batch size, then the entire
    model. If CSR is not faster, the copy is dense. For prediction on the CPU.

    Args:
        net: a plain model, such as the result of `shrink`.
        example_input: an input with the batch size of later predictions.

    Returns:
        The copy in evaluation mode.

    >>> import torch
    >>> type(sparsify(torch.nn.Sequential(torch.nn.Linear(4, 2)), torch.zeros(1, 4))[0])
    <class 'torch.nn.modules.linear.Linear'>
    """
    inputs = clone_batch(to_arguments(example_input))
    check_plain(net)
    check_runs(net, inputs)
    if any(p.device.type != "cpu" for p in net.parameters()):
        raise VardropError("Expected `net` to be on the CPU, but got another device. Call .cpu().")
    fast, seen = copy.deepcopy(net), dict[str, tuple[nn.Linear, Tensor]]()

    def note(name: str, layer: nn.Linear, args: Inputs) -> None:
        seen[name] = layer, args[0].detach().clone()

    layers = {name: m for name, m in net.named_modules() if type(m) is nn.Linear}
    with hooks(*(m.register_forward_pre_hook(partial(note, n)) for n, m in layers.items())):
        run(net, inputs)
    with torch.no_grad(), evaluating(net), evaluating(fast):
        for name, (layer, x) in seen.items():
            sparse = SparseLinear(layer).eval()
            calls = {"dense": partial(layer, x), "sparse": partial(sparse, x)}
            times = time_interleaved(calls, rounds=3)
            if times["sparse"] < _MARGIN * times["dense"]:
                fast = replace_module(fast, name, sparse)
        calls = {key: partial(call_net, n, inputs) for key, n in (("fast", fast), ("net", net))}
        times = time_interleaved(calls, rounds=5)
    return fast if times["fast"] < times["net"] else copy.deepcopy(net)
