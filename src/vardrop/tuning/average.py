"""An exponential average of the parameters of a model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vardrop.tuning.minimize import Callback, Position

_LEAST_WEIGHT = 1e-3  # of the newest parameters, after 1000 steps


class ParameterAverage(Callback):
    """Averages parameters over steps: a <- a + w (p - a), with w = max(0.001, 1 / t) at step t.

    All parameters are averaged, including the noise parameters. Buffers, such as the statistics of
    BatchNorm, keep the values of the last step. The module holds the average after every epoch and
    the latest parameters during an epoch. `other` holds the other values.

    Kingma & Ba 2015, "Adam", sec. 7.2 (temporal averaging).
    """

    def __init__(self, module: nn.Module) -> None:
        self.parameters = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self.other = {name: p.detach().clone() for name, p in self.parameters.items()}
        self.steps, self.in_use = 0, False

    def on_epoch_start(self, at: Position) -> None:
        if self.in_use:
            self._swap()

    @torch.no_grad()
    def on_step(self, at: Position, loss: Tensor) -> None:
        self.steps += 1
        for name, parameter in self.parameters.items():
            self.other[name].lerp_(parameter, max(_LEAST_WEIGHT, 1 / self.steps))

    def on_epoch_end(self, at: Position) -> None:
        self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, parameter in self.parameters.items():
            current = parameter.clone()
            parameter.copy_(self.other[name])
            self.other[name] = current
        self.in_use = not self.in_use

    def state(self) -> tuple[dict[str, Tensor], dict[str, int]]:
        """The values that the module does not hold, and JSON values."""
        tensors = {f"average.{name}": tensor for name, tensor in self.other.items()}
        return tensors, {"averaged_steps": self.steps, "average_in_use": int(self.in_use)}

    def load_state(self, tensors: dict[str, Tensor], values: dict[str, int]) -> None:
        """Continue from a stored state. The parameters of the module are loaded elsewhere."""
        for name, tensor in self.other.items():
            tensor.copy_(tensors[f"average.{name}"])
        self.steps, self.in_use = values["averaged_steps"], bool(values["average_in_use"])
