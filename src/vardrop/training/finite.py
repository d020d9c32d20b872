"""Where numbers stop being numbers: the first layer to blame."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vardrop.noisy import Noisy, untouched
from vardrop.objective import ELBO
from vardrop.training.processes import own_generators


def broken_parameter(module: nn.Module) -> str | None:
    """The first parameter or buffer that is not finite, by name."""
    for name, tensor in module.state_dict().items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            return name
    return None


@torch.no_grad()
def culprit(elbo: ELBO, x: Tensor, y: Tensor) -> str:
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
            net(untouched(x))
    finally:
        for handle in handles:
            handle.remove()
    return broken[0] if broken else None
