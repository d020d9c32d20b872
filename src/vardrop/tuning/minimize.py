"""The training loop of every verb that trains.

`minimize` takes one optimizer step per batch. Everything else that happens during a training
(records, checkpoints, progress, stopping) is a `Callback`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from vardrop._core.calls import Batch, call_net, clone_batch, tensors_in
from vardrop._core.errors import NotFiniteError, VardropError
from vardrop._core.modules import hooks
from vardrop._core.progress import ProgressLine
from vardrop._core.rng import preserve_rng
from vardrop.noisy import Noisy
from vardrop.objective import ELBO
from vardrop.objective.compile import descend


class Position(NamedTuple):
    """The progress of a training.

    Args:
        epoch: the number of finished epochs.
        step: the number of finished steps of the current epoch.
        stopped: whether a callback ended the training.
    """

    epoch: int = 0
    step: int = 0
    stopped: bool = False


class Callback:
    """Is called during a training. A method that returns True ends the training."""

    def on_epoch_start(self, at: Position) -> None:
        """Called when an epoch starts, or continues at `at.step`.

        Args:
            at: the progress.
        """

    def on_step(self, at: Position, loss: Tensor) -> bool | None:
        """Called after every step.

        Args:
            at: the progress, including this step.
            loss: the detached loss of this step.

        Returns:
            True to end the training.
        """

    def on_epoch_end(self, at: Position) -> bool | None:
        """Called after every epoch.

        Args:
            at: the progress, including this epoch.

        Returns:
            True to end the training.
        """


class ShowProgress(ProgressLine, Callback):
    """A progress line that shows the steps and the loss of a training."""

    def on_step(self, at: Position, loss: Tensor) -> None:
        self.advance(text=f"epoch {at.epoch + 1}, loss {float(loss):.4g}")


_Batch = TypeVar("_Batch")


def minimize(
    loss: Callable[[_Batch, Position], Tensor],
    batches: Callable[[Position], Iterable[_Batch]],
    optimizer: torch.optim.Optimizer,
    *,
    epochs: int,
    schedule: Callable[[Position], Sequence[float]] | None = None,
    callbacks: Sequence[Callback] = (),
    start: Position = Position(),  # noqa: B008  a constant
    max_norm: float | None = None,
    explain: Callable[[_Batch], str] | None = None,
) -> Position:
    """Minimize a loss over batches, in place.

    If it is interrupted, or a loss is not finite, the parameters keep their last values.

    Args:
        loss: the loss of a batch at a position, a scalar.
        batches: the batches of an epoch from a position on.
        optimizer: over the parameters.
        epochs: the number of epochs, including epochs before `start`.
        schedule: the learning rate of each parameter group at a position; unchanged if None.
        callbacks: called in this order.
        start: the position to continue from.
        max_norm: the largest norm of the gradient; None for no limit.
        explain: names the cause if the loss of a batch is not finite.

    Returns:
        The position at the end.

    >>> weight = torch.nn.Parameter(torch.tensor(1.0))
    >>> optimizer = torch.optim.SGD([weight], lr=0.5)
    >>> minimize(lambda x, at: (weight - x) ** 2, lambda at: [3.0], optimizer, epochs=2)
    Position(epoch=2, step=0, stopped=False)
    >>> weight.item()
    3.0
    """
    at = start
    while at.epoch < epochs:
        for callback in callbacks:
            callback.on_epoch_start(at)
        for batch in batches(at):
            rates = () if schedule is None else schedule(at)
            for group, lr in zip(optimizer.param_groups, rates, strict=False):
                group["lr"] = lr
            batch_loss = loss(batch, at)
            if not math.isfinite(float(batch_loss.detach())):
                cause = "" if explain is None else f" ({explain(batch)})"
                raise NotFiniteError(
                    f"Expected a finite loss, but got {float(batch_loss.detach())}{cause} in epoch "
                    f"{at.epoch + 1}, step {at.step + 1}. Lower the learning rate, clip the "
                    "gradients or lengthen the KL warm-up."
                )
            descend(batch_loss, optimizer, max_norm)
            at = at._replace(step=at.step + 1)
            if True in [callback.on_step(at, batch_loss.detach()) for callback in callbacks]:
                return at._replace(stopped=True)
        if at.step == 0:
            raise VardropError(
                f"Expected batches in every epoch, but got none in epoch {at.epoch + 1}. Pass a "
                "list or a loader, not an iterator."
            )
        at = Position(at.epoch + 1)
        if True in [callback.on_epoch_end(at) for callback in callbacks]:
            return at._replace(stopped=True)
    return at


def find_nonfinite(module: nn.Module) -> str | None:
    """The name of the first parameter or buffer that is not finite."""
    tensors = [(n, t) for n, t in module.state_dict().items() if t.is_floating_point()]
    return next((name for name, t in tensors if not bool(t.isfinite().all())), None)


@torch.no_grad()
def explain_nonfinite(elbo: ELBO, x: Batch, y: Tensor) -> str:
    """The cause of a loss that is not finite: the data, a parameter, a layer's output or its KL."""
    for name, tensors in (("inputs", tensors_in(x)), ("targets", [y])):
        if not all(bool(t.isfinite().all()) for t in tensors if t.is_floating_point()):
            return f"the {name} of the batch"
    if (parameter := find_nonfinite(elbo)) is not None:
        return f"parameter '{parameter}'"
    names = {module: name or "(net)" for name, module in elbo.net.named_modules()}
    layers: list[str] = []

    def check(module: nn.Module, inputs: object, output: object) -> None:
        if isinstance(output, Tensor) and not bool(output.isfinite().all()):
            layers.append(names[module])

    handles = [module.register_forward_hook(check) for module in names]
    with hooks(*handles), preserve_rng(tensors_in(x)[0].device):
        call_net(elbo.net, clone_batch(x))
    if layers:
        return f"the output of layer '{layers[0]}'"
    for module, name in names.items():
        kl = module.kl() if isinstance(module, Noisy) else None
        if kl is not None and not bool(kl.isfinite()):
            return f"the KL of layer '{name}'"
    return "the likelihood"
