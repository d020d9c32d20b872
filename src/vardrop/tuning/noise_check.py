"""A warning for learned noise that did not move while a model was trained."""

from __future__ import annotations

import warnings

from torch import Tensor, nn

from vardrop.noisy import Noisy, named_modules_of

_STEPS = 200  # a shorter training is not judged
_MOVE = 0.3  # of a logarithm of a variance or of a rate, on average
_LOGARITHMS = ("log_sigma2", "log_alpha")  # of variances, whose unit is known
_ENTRIES = 1000  # of a tensor that are compared


class NoiseCheck:
    """Remembers where the learned noise of a model starts, and warns if it is still there.

    Noise cannot move within a schedule of few steps at a small learning rate: Adam moves a
    parameter by at most its rate in a step, and log sigma^2 has several units to go.
    """

    def __init__(self, net: nn.Module) -> None:
        modules = named_modules_of(net, Noisy).values()
        self.start = [(t, _entries(t)) for module in modules for t in _learned(module)]

    def warn(self, steps: int) -> None:
        """Warn after `steps` steps if no noise tensor has moved by 0.3 on average."""
        if steps < _STEPS or not self.start:
            return
        moves = [float((_entries(now) - before).abs().mean()) for now, before in self.start]
        if max(moves) < _MOVE:
            warnings.warn(
                f"The noise has hardly moved in {steps} steps: the noise parameters changed by at "
                f"most {max(moves):.2g} on average. The result is the model without learned noise. "
                "Use a larger learning rate for them (vardrop.parameter_groups(elbo, lr, "
                "noise_lr=0.1)) or train for longer.",
                stacklevel=3,
            )


def _learned(module: Noisy) -> list[Tensor]:
    own = module.named_parameters(recurse=False)
    return [p for name, p in own if name in _LOGARITHMS and p.requires_grad]


def _entries(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    step = max(1, flat.numel() // _ENTRIES)
    return flat[::step].clone()
