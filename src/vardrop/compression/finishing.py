"""What a small net may go through: sparse execution, training of what is left, BatchNorm anew."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vardrop._core.calls import untouched
from vardrop._core.checks import check_integer, check_net, check_type
from vardrop._core.errors import VardropError
from vardrop.compression.kinds import replaced, selected
from vardrop.compression.running import (
    Inputs,
    as_inputs,
    called,
    check_plain,
    check_runs,
    hooks,
    race,
    run,
)
from vardrop.noisy import evaluating, mode_of, modules_of

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


def _layer_inputs(net: nn.Module, inputs: Inputs) -> dict[str, tuple[nn.Module, Tensor]]:
    """Every dense layer, together with the `Select` before it, and what it is given."""
    seen: dict[str, tuple[nn.Module, Tensor]] = {}

    def note(name: str) -> Callable[..., None]:
        return lambda layer, args: seen.update({name: (layer, args[0].detach().clone())})

    pairs = {n: found for n, m in net.named_modules() if (found := selected(m)) is not None}
    within = {layer for _, layer in pairs.values()}
    handles = [
        module.register_forward_pre_hook(note(name))
        for name, module in net.named_modules()
        if module not in within and type(pairs.get(name, (None, module))[1]) is nn.Linear
    ]
    with hooks(*handles):
        run(net, inputs)
    return seen


def _candidates(module: Any, inputs: int) -> list[nn.Module]:
    """Other ways to run a dense layer: as CSR, and without the `Select` before it."""
    pair = selected(module)
    if pair is None:
        return [SparseLinear(module)]
    select, layer = pair[0], module[1]
    full = nn.Linear(inputs, layer.out_features, layer.bias is not None).to(layer.weight)
    with torch.no_grad():
        full.weight.zero_().index_copy_(1, select.index, layer.weight)
        if layer.bias is not None:
            full.bias.copy_(layer.bias)
    return [nn.Sequential(select, SparseLinear(layer)), full, SparseLinear(full)]


def sparsify(net: nn.Module, example_input: Any) -> nn.Module:
    """A copy of a plain net in which every dense layer runs in the way that is fastest here.

    Each `nn.Linear` is timed as it is, as CSR, and (after a `Select`) with all of its inputs, at
    the example's batch size; then the whole net. The plain net comes back where nothing is gained.
    For prediction on CPU.

    Args:
        net: a plain net, such as the result of `shrink`.
        example_input: an input of the batch size that matters.

    >>> import torch
    >>> type(sparsify(torch.nn.Sequential(torch.nn.Linear(4, 2)), torch.zeros(1, 4))[0])
    <class 'torch.nn.modules.linear.Linear'>
    """
    inputs = untouched(as_inputs(example_input))
    check_plain(net)
    check_runs(net, inputs)
    if any(p.device.type != "cpu" for p in net.parameters()):
        raise VardropError("Expected `net` to be on the CPU, but got another device. Call .cpu().")
    fast = copy.deepcopy(net)
    with torch.no_grad():
        for name, (layer, x) in _layer_inputs(net, inputs).items():
            best = _fastest(layer, x)
            if best is not layer:
                fast = _if_it_runs(fast, name, best.eval(), inputs)
    with torch.no_grad(), evaluating(net), evaluating(fast):
        times = race(
            {"fast": partial(called, fast, inputs), "net": partial(called, net, inputs)}, rounds=5
        )
    return fast if times["fast"] < times["net"] else copy.deepcopy(net)


def _if_it_runs(net: nn.Module, name: str, module: nn.Module, inputs: Inputs) -> nn.Module:
    """The net with another module in place, unless other code reads what only the old one has."""
    old = net.get_submodule(name)
    other = replaced(net, name, module)
    try:
        run(other, inputs)
    except Exception:
        return replaced(other, name, old)
    return other


def _fastest(layer: nn.Module, x: Tensor) -> nn.Module:
    ways = [layer, *_candidates(layer, x.shape[-1])]
    times = race({str(i): partial(way, x) for i, way in enumerate(ways)}, rounds=3)
    best = min(range(1, len(ways)), key=lambda i: times[str(i)])
    return ways[best] if times[str(best)] < _MARGIN * times["0"] else layer


def _keep_zeros(parameter: nn.Parameter) -> Any:
    kept = parameter.detach() != 0
    return parameter.register_hook(lambda gradient: gradient * kept)


def fine_tune(
    net: nn.Module,
    data: Iterable[tuple[Any, Tensor]],
    loss: Callable[[Any, Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
    epochs: int = 1,
) -> nn.Module:
    """Train the weights that are left, in place; weights at zero stay at zero.

    Args:
        net: a plain net, such as the result of `shrink`; BatchNorm keeps its statistics.
        data: batches (inputs, targets), read once per epoch.
        loss: `loss(output, target)`, such as `torch.nn.functional.cross_entropy`.
        optimizer: over the parameters of `net`, without momentum from before.
        epochs: how many times to go through the data.

    >>> import torch
    >>> net = torch.nn.Linear(2, 1)
    >>> _ = net.weight.data[0, 0].zero_()
    >>> data = [(torch.ones(4, 2), torch.zeros(4, 1))]
    >>> net = fine_tune(net, data, torch.nn.functional.mse_loss, torch.optim.Adam(net.parameters()))
    >>> net.weight[0, 0].item()
    0.0
    """
    _check_tuning(net, data, optimizer, epochs)
    weights = [p for p in net.parameters() if p.dim() > 1 and p.requires_grad]
    with hooks(*(_keep_zeros(p) for p in weights)):
        for epoch in range(epochs):
            batches = 0
            for x, y in data:
                optimizer.zero_grad(set_to_none=True)
                value = loss(called(net, as_inputs(x)), y)
                if not bool(value.isfinite()):
                    raise VardropError(
                        f"Expected a finite loss, but got {value.item()} in batch {batches} of "
                        f"epoch {epoch}. The net is as it was before that batch."
                    )
                value.backward()
                optimizer.step()
                batches += 1
            if batches == 0:
                raise VardropError(
                    f"Expected `data` to give batches in every epoch, but got none in epoch "
                    f"{epoch}. Give a list or a loader, not an iterator."
                )
    return net


def _check_tuning(net: Any, data: Any, optimizer: torch.optim.Optimizer, epochs: Any) -> None:
    check_net(net)
    check_type("data", data, Iterable, "batches of (inputs, targets)")
    check_type("optimizer", optimizer, torch.optim.Optimizer, "an optimizer")
    check_integer("epochs", epochs)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not held & {id(p) for p in net.parameters()}:
        raise VardropError(
            "Expected `optimizer` to hold parameters of `net`, but got none of them. "
            "Build it over net.parameters() after shrinking."
        )


@torch.no_grad()
def reestimate_batchnorm(net: nn.Module, data: Iterable[Any]) -> nn.Module:
    """Measure the mean and variance of every BatchNorm again, averaged over batches, in place.

    Weights that went changed the statistics that BatchNorm remembers. Modes and momenta are left
    as they were; where a batch fails, so are the statistics.

    Args:
        net: a plain net.
        data: batches of inputs (or of (input, target), whose targets are not looked at).

    >>> import torch
    >>> net = torch.nn.BatchNorm1d(1)
    >>> _ = reestimate_batchnorm(net, [torch.tensor([[0.0], [2.0]])])
    >>> net.running_mean, net.running_var
    (tensor([1.]), tensor([2.]))
    """
    check_net(net)
    check_type("data", data, Iterable, "batches of inputs")
    norms = {
        name: m
        for name, m in modules_of(net, nn.modules.batchnorm._BatchNorm).items()
        if m.track_running_stats
    }
    if not norms:
        raise VardropError(
            "Expected `net` to have BatchNorm with running statistics, but got none."
        )
    with _measuring(net, norms):
        batches = 0
        for batch in data:
            net(batch[0] if isinstance(batch, list | tuple) else batch)
            batches += 1
        if batches == 0:
            raise VardropError("Expected `data` to give batches of inputs, but got none.")
        for name, norm in norms.items():
            if not all(bool(b.isfinite().all()) for b in norm.buffers()):
                raise VardropError(
                    f"Expected finite inputs to '{name}', but got NaN or infinity. "
                    "The statistics are as they were."
                )
    return net


@contextmanager
def _measuring(net: nn.Module, norms: dict[str, Any]) -> Iterator[None]:
    """BatchNorm starts anew with a plain average; all is as it was where that fails."""
    modes = {m: mode_of(m) for m in net.modules()}
    momenta = {m: m.momentum for m in norms.values()}
    before = {m: copy.deepcopy(dict(m.named_buffers())) for m in norms.values()}
    try:
        net.eval()
        for norm in norms.values():
            norm.reset_running_stats()
            norm.momentum = None
            norm.train()
        yield
    except BaseException:
        for norm, buffers in before.items():
            for key, value in buffers.items():
                norm.get_buffer(key).copy_(value)
        raise
    finally:
        for norm, momentum in momenta.items():
            norm.momentum = momentum
        for module, training in modes.items():
            module.training = training
