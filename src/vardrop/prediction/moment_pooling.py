"""Rules of moment propagation for pooling, by the name of the torch function."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from vardrop.prediction.moment_rules import Pair, Rule, UnsupportedError
from vardrop.prediction.quadrature import largest

_BLOCK = 2**17  # elements that stay in the cache together


def _averaging(function: Callable[..., Tensor]) -> Rule:
    """A mean of n independent elements has the mean of their variances divided by n."""

    def rule(x: Pair, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        mean = function(x.mean, *args, **kwargs)
        if x.variance is None:
            return mean, None
        if x.mean.numel() % mean.numel():
            raise UnsupportedError(f"{function.__name__} over windows of different sizes")
        return mean, function(x.variance, *args, **kwargs) * (mean.numel() / x.mean.numel())

    return rule


def _avg_pool(x: Pair, kernel_size: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    pool = functional.avg_pool2d if x.mean.dim() == 4 else functional.avg_pool1d
    mean = pool(x.mean, kernel_size, *args, **kwargs)
    if x.variance is None:
        return mean, None
    sizes = (kernel_size,) if isinstance(kernel_size, int) else tuple(kernel_size)
    window = math.prod(sizes) if len(sizes) > 1 else sizes[0] ** (x.mean.dim() - 2)
    return mean, pool(x.variance, kernel_size, *args, **kwargs) / window


def _max_pool2d(
    x: Pair,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
    rectified: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The largest of a window, and with `rectified` the largest of it and zero."""
    if x.variance is None:
        mean = x.mean.relu() if rectified else x.mean
        pooled = functional.max_pool2d(mean, kernel_size, stride, padding, dilation, ceil_mode)
        return pooled, None
    height, width = (kernel_size,) * 2 if isinstance(kernel_size, int) else kernel_size
    if padding not in (0, (0, 0)) or dilation not in (1, (1, 1)) or ceil_mode or (
        stride is not None and stride not in (kernel_size, (height, width))
    ):  # fmt: skip
        raise UnsupportedError("max_pool2d with overlap, padding or dilation")
    rows = max(1, _BLOCK * len(x.mean) // x.mean.numel())
    parts = [
        largest(_windows(m, height, width), _windows(v, height, width), rectified)
        for m, v in zip(x.mean.split(rows), x.variance.split(rows), strict=True)
    ]
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


def _windows(t: Tensor, height: int, width: int) -> list[Tensor]:
    rows, columns = t.shape[-2] // height * height, t.shape[-1] // width * width
    t = t[..., :rows, :columns]
    return [t[..., i::height, j::width] for i in range(height) for j in range(width)]


POOLING: dict[str, Rule] = {
    "adaptive_avg_pool1d": _averaging(functional.adaptive_avg_pool1d),
    "adaptive_avg_pool2d": _averaging(functional.adaptive_avg_pool2d),
    "mean": _averaging(torch.mean),
    "avg_pool1d": _avg_pool,
    "avg_pool2d": _avg_pool,
    "max_pool2d": _max_pool2d,
}
