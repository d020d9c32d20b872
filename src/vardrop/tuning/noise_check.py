"""A warning if the learned noise of a model did not move during a training."""

from __future__ import annotations

import warnings

from torch import Tensor

from vardrop.noisy import Noisy, named_modules_of
from vardrop.objective import ELBO
from vardrop.tuning.minimize import Callback, Position

_STEPS = 200  # shorter trainings are not checked
_MOVE = 0.3  # mean change of the logarithm of a variance or of a rate
_LOGARITHMS = ("log_sigma2", "log_alpha")
_ENTRIES = 1000  # compared entries of a tensor


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
        is_long = at.epoch >= self.epochs and self.steps >= _STEPS
        if not (is_long and self.start and self.elbo.beta > 0):
            return
        move = max(float((_sample_entries(p) - old).abs().mean()) for p, old in self.start)
        if move < _MOVE:
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
