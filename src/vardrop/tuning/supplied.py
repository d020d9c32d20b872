"""What a user brings to a training: batches of any kind, and how a net is judged on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from vardrop._core.calls import untouched
from vardrop._core.checks import check_type
from vardrop._core.errors import VardropError
from vardrop._core.torch_private import tree_map_only
from vardrop.compression.probes import Data, Inputs, batches, outputs, to_arguments
from vardrop.likelihoods import Categorical

Loss = Callable[[Any, Tensor], Tensor]
_BATCH = 128


class Batches:
    """Training data as batches on a device; two tensors are shuffled at every pass.

    >>> data = Batches((torch.zeros(40, 3), torch.zeros(40, 1)), torch.device("cpu"), seed=0)
    >>> data.count, [len(y) for _, y in data.once()]
    (8, [5, 5, 5, 5, 5, 5, 5, 5])
    """

    def __init__(self, data: Data, device: torch.device, seed: int) -> None:
        check_type("train", data, Iterable, "two tensors or batches of (inputs, targets)")
        self.data, self.device = data, device
        self.generator = torch.Generator().manual_seed(seed)
        self.pair = isinstance(data, tuple) and len(data) == 2 and isinstance(data[0], Tensor)
        if self.pair:
            rows = sum(len(y) for _, y in batches(data, "train"))
            self.size = max(2, min(_BATCH, rows // 8))
            self.count = max(1, rows // self.size)
            return
        if iter(data) is data:
            raise VardropError(
                "Expected `train` to be read once per epoch, but got an iterator. "
                "Give a list, a DataLoader or two tensors."
            )
        try:
            self.count = len(data)  # type: ignore[arg-type]
        except TypeError:  # a loader of a stream
            self.count = sum(1 for _ in data)
        if self.count == 0:
            raise VardropError("Expected `train` to give batches, but got none.")

    def once(self) -> Iterator[tuple[Inputs, Tensor]]:
        """One pass; of two tensors, without the rows that do not fill a batch."""
        for batch in self._shuffled() if self.pair else self.data:
            pair = isinstance(batch, tuple | list) and len(batch) == 2
            if not pair or not isinstance(batch[1], Tensor):
                raise VardropError(
                    f"Expected `train` to give (inputs, targets), but got {batch!r}."
                )
            x, y = tree_map_only(Tensor, lambda t: t.to(self.device), tuple(batch))
            yield untouched(to_arguments(x)), y

    def _shuffled(self) -> Iterator[tuple[Tensor, Tensor]]:
        x, y = self.data
        assert isinstance(x, Tensor)
        assert isinstance(y, Tensor)
        order = torch.randperm(len(x), generator=self.generator)
        for rows in order.split(self.size)[: self.count]:
            yield x[rows.to(x.device)], y[rows.to(y.device)]


@dataclass(frozen=True)
class Judge:
    """How a net is judged: the loss that trains it, and the score that people read."""

    loss: Loss
    score: str  # accuracy, rmse or loss
    value: Callable[[Tensor, Tensor], float]

    def drop(self, before: float, after: float) -> float:
        """How much was lost: of accuracy, as a fraction of the RMSE, or of a loss."""
        if self.score == "accuracy":
            return before - after
        return after / max(before, 1e-12) - 1 if self.score == "rmse" else after - before


def judge_for(net: nn.Module, data: Data, loss: Loss | None) -> Judge:
    """The loss and the score that fit a net and its data."""
    output, target = outputs(net, data, "validation")
    judge = _judge(loss, output, target)
    value = judge.loss(output, target)
    if not isinstance(value, Tensor) or value.dim() or not bool(value.isfinite()):
        raise VardropError(
            "Expected `loss` to give one finite number for `net` on `validation`, but got "
            f"{value}. Give a trained net, and the mean over a batch."
        )
    return judge


def _judge(loss: Loss | None, output: Tensor, target: Tensor) -> Judge:
    whole = not target.is_floating_point()
    if whole and output.dim() == target.dim() + 1:
        classes = loss if isinstance(loss, Categorical) else Categorical()
        return Judge(loss or functional.cross_entropy, "accuracy", partial(_accuracy, classes))
    if loss is not None:
        return Judge(loss, "loss", lambda o, y: float(loss(o, y)))
    if whole or output.shape != target.shape:
        raise VardropError(
            "Expected targets to be classes (N, ...) of outputs (N, classes, ...), or numbers of "
            f"the shape of the output, but got {target.dtype} of shape {tuple(target.shape)} and "
            f"outputs of shape {tuple(output.shape)}. Reshape them, or pass `loss`."
        )
    # Of order one, as the price on the cost supposes, whatever the units of the target.
    spread = max(float(target.double().var()), 1e-12)
    return Judge(lambda o, y: functional.mse_loss(o, y) / spread, "rmse", _rmse)


def _accuracy(classes: Categorical, output: Tensor, target: Tensor) -> float:
    hits = output.argmax(classes.class_axis) == target
    return float(hits[classes.counted(target)].double().mean())


def _rmse(output: Tensor, target: Tensor) -> float:
    return float((output - target).double().square().mean().sqrt())
