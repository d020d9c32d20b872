"""Callbacks of a training: an average of the parameters, and a warning about unchanged noise."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

from vardrop.noisy import Noisy, named_modules_of
from vardrop.objective import ELBO
from vardrop.tuning.minimize import Callback, Position

_LEAST_WEIGHT = 1e-3  # of the newest parameters, after 1000 steps
_STEPS = 200  # shorter trainings are not checked
_MOVE = 0.3  # mean change of the logarithm of a variance or of a rate
_LOGARITHMS = ("log_sigma2", "log_alpha")
_ENTRIES = 1000  # compared entries of a tensor


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


class NoiseCheck(Callback):
    """Remembers the initial noise of a model, and warns after the last epoch if it has not moved.

    Noise cannot move within few steps at a small learning rate: Adam changes a parameter by at most
    its learning rate in a step, and log sigma^2 has to change by several units.
    """

    def __init__(self, elbo: ELBO, epochs: int) -> None:
        self.elbo, self.epochs, self.steps = elbo, epochs, 0
        self.start = [
            (parameter, _sample_entries(parameter))
            for module in named_modules_of(elbo.net, Noisy).values()
            for name, parameter in module.named_parameters(recurse=False)
            if name in _LOGARITHMS and parameter.requires_grad
        ]

    def on_step(self, at: Position, loss: Tensor) -> None:
        self.steps += 1

    def on_epoch_end(self, at: Position) -> None:
        is_checked = at.epoch >= self.epochs and self.steps >= _STEPS and self.elbo.beta > 0
        moves = (float((_sample_entries(p) - old).abs().mean()) for p, old in self.start)
        if is_checked and (move := max(moves, default=_MOVE)) < _MOVE:
            warnings.warn(
                f"The noise has hardly moved in {self.steps} steps: the noise parameters changed "
                f"by at most {move:.2g} on average. The result is the model without learned noise. "
                "Use a larger learning rate for them (vardrop.parameter_groups(elbo, lr, "
                "noise_lr=0.1)) or train for longer.",
                stacklevel=4,
            )


def _sample_entries(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // _ENTRIES)].clone()
