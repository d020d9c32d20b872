"""An exponential average of a module's parameters, and the switch between both sets of values."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_LEAST = 1e-3  # the weight of the newest parameters, once there were 1000 steps


class ParameterAverage:
    """Averages parameters over steps: a <- a + w (p - a), with w = max(0.001, 1 / t) at step t.

    All parameters are averaged, those of the noise too. Buffers, such as the statistics of
    BatchNorm, are those of the last step.

    Kingma & Ba 2015, "Adam", sec. 7.2 (temporal averaging).
    """

    def __init__(self, module: nn.Module) -> None:
        self.parameters = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self.other = {name: p.detach().clone() for name, p in self.parameters.items()}
        self.steps = 0
        self.in_use = False  # whether the module holds the average, and `other` the latest values

    @torch.no_grad()
    def update(self) -> None:
        """Count the parameters as they are now."""
        self.steps += 1
        weight = max(_LEAST, 1 / self.steps)
        for name, parameter in self.parameters.items():
            self.other[name].lerp_(parameter, weight)

    @torch.no_grad()
    def use(self, average: bool) -> None:
        """Let the module hold the average, or the latest parameters."""
        if average != self.in_use:
            for name, parameter in self.parameters.items():
                held = parameter.clone()
                parameter.copy_(self.other[name])
                self.other[name] = held
            self.in_use = average

    def state(self) -> tuple[dict[str, Tensor], dict[str, int]]:
        """What the module does not hold, and plain values."""
        tensors = {f"average.{name}": value for name, value in self.other.items()}
        return tensors, {"averaged_steps": self.steps, "average_in_use": int(self.in_use)}

    def load_state(self, tensors: dict[str, Tensor], values: dict[str, int]) -> None:
        """Stand where `state` was taken; the module's own parameters are loaded elsewhere."""
        for name, value in self.other.items():
            value.copy_(tensors[f"average.{name}"])
        self.steps, self.in_use = values["averaged_steps"], bool(values["average_in_use"])
