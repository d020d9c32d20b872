"""One step: forward, backward, clip, update; compiled, in mixed precision, in several processes.

Where its loss is not finite, the error says what was first to blame.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vardrop._core.calls import call, untouched
from vardrop._core.errors import NotFiniteError, VardropError
from vardrop.noisy import Noisy
from vardrop.objective import ELBO
from vardrop.tuning.processes import ALONE, World, own_generators

Precision = Literal["float32", "bfloat16"]


class Step:
    """Makes one step of training and returns (loss, nll, kl), detached.

    Args:
        elbo: the objective.
        optimizer: over its parameters.
        clip: the largest norm of the gradient; no bound where None.
        precision: "bfloat16" runs the forward pass under autocast.
        compile: pass the objective through `torch.compile`.
        world: the processes among which gradients are averaged.
    """

    def __init__(
        self,
        elbo: ELBO,
        optimizer: torch.optim.Optimizer,
        clip: float | None = None,
        precision: Precision = "float32",
        compile: bool = False,
        world: World = ALONE,
    ) -> None:
        if clip is not None and not clip > 0:
            raise VardropError(f"Expected `clip` to be positive, but got {clip}.")
        if precision not in ("float32", "bfloat16"):
            raise VardropError(
                f"Expected `precision` to be 'float32' or 'bfloat16', but got {precision!r}."
            )
        self.elbo, self.optimizer, self.clip = elbo, optimizer, clip
        self.mixed = precision == "bfloat16"
        wrapped = world.wrap(elbo)
        self.forward: Any = torch.compile(wrapped) if compile else wrapped

    def __call__(
        self, x: Tensor, y: Tensor, share: float = 1.0, weight: Tensor | None = None
    ) -> Tensor:
        """Step on a batch whose examples count `share` times in the mean over processes."""
        given = (x, y) if weight is None else (x, y, weight)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.mixed):
            out = self.forward(*given)
        loss = out.loss
        if share != 1.0:  # the KL is whole in every process, the likelihood a part of it
            loss = loss + (share - 1) * (loss - out.beta * out.kl / self.elbo.num_data)
        if not math.isfinite(float(loss.detach())):
            raise NotFiniteError(f"{float(loss.detach())} ({locate_nan(self.elbo, x, y)})")
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.elbo.parameters(), self.clip)
        self.optimizer.step()
        return torch.stack([loss.detach(), share * out.nll.detach(), out.kl.detach()])


def broken_parameter(module: nn.Module) -> str | None:
    """The first parameter or buffer that is not finite, by name."""
    for name, tensor in module.state_dict().items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            return name
    return None


@torch.no_grad()
def locate_nan(elbo: ELBO, x: Tensor, y: Tensor) -> str:
    """What made the loss of a batch not finite: data, a parameter, a layer's output, its KL."""
    for name, data in (("inputs", x), ("targets", y)):
        if data.is_floating_point() and not bool(data.isfinite().all()):
            return f"the {name} of the batch"
    if (broken := broken_parameter(elbo)) is not None:
        return f"parameter '{broken}'"
    if (found := _broken_output(elbo.net, x)) is not None:
        return f"the output of layer '{found}'"
    for name, module in elbo.net.named_modules():
        term = module.kl() if isinstance(module, Noisy) else None
        if term is not None and not bool(term.isfinite()):
            return f"the KL of layer '{name}'"
    return "the likelihood"


def _broken_output(net: nn.Module, x: Tensor) -> str | None:
    broken: list[str] = []

    def look(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor) and not bool(output.isfinite().all()):
                broken.append(name or "(net)")

        return hook

    handles = [m.register_forward_hook(look(name)) for name, m in net.named_modules()]
    try:
        with own_generators(x.device):
            call(net, untouched(x))
    finally:
        for handle in handles:
            handle.remove()
    return broken[0] if broken else None
