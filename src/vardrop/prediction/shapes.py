"""Output shapes of modules in a row, from the modules alone: cheaper than a pass to see them."""

from __future__ import annotations

import math

from torch import nn

from vardrop.layers import Conv2d, Linear

ELEMENTWISE = {
    nn.ReLU, nn.LeakyReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.ELU, nn.Softplus, nn.Identity,
}  # fmt: skip
Shape = tuple[int, ...]


def links(net: nn.Module) -> list[nn.Module]:
    """The modules of nested `nn.Sequential`s in the order of their calls; else the net itself."""
    if type(net) is nn.Sequential:
        return [link for child in net for link in links(child)]
    return [net]


def output_shape(module: nn.Module, shape: Shape) -> Shape | None:
    """The shape of one row behind a module, or None where the module or its input is not known."""
    kind = type(module)
    if kind in ELEMENTWISE:
        return shape
    if isinstance(module, nn.Flatten):
        whole = module.start_dim == 1 and module.end_dim == -1
        return (math.prod(shape),) if whole else None
    if isinstance(module, nn.Linear) and kind in (nn.Linear, Linear):
        return (*shape[:-1], module.out_features) if shape[-1] == module.in_features else None
    if isinstance(module, nn.Conv2d) and kind in (nn.Conv2d, Conv2d):
        fits = len(shape) == 3 and shape[0] == module.in_channels
        size = _windows(module, shape[1:]) if fits else None
        return size and (module.out_channels, *size)
    if kind is nn.MaxPool2d and len(shape) == 3:
        size = _windows(module, shape[1:])
        return size and (shape[0], *size)
    return None


def _windows(module: nn.Module, size: Shape) -> Shape | None:
    """How many windows fit along each axis."""
    if getattr(module, "ceil_mode", False) or isinstance(module.padding, str):
        return None
    kernel, stride, padding, dilation = (
        value if isinstance(value, tuple) else (value,) * len(size)
        for value in (module.kernel_size, module.stride, module.padding, module.dilation)
    )
    found = tuple(
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, k, s, p, d in zip(size, kernel, stride, padding, dilation, strict=True)
    )
    return found if min(found) > 0 else None
