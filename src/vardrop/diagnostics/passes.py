"""Passes over a net that leave it as it was: its estimators, modes and buffers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.func import functional_call

from vardrop.errors import VardropError
from vardrop.estimators import Estimator, check_estimator
from vardrop.layers import Variational
from vardrop.noisy import noisy_modules

Loader = Iterable[tuple[Tensor, Tensor]]


@contextmanager
def evaluating(net: nn.Module) -> Iterator[nn.Module]:
    """Put a net into eval mode for a while; every module gets its own mode back."""
    modes = [(m, m.training) for m in net.modules()]
    try:
        yield net.eval()
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def drawing(net: nn.Module, estimator: Estimator | None) -> Iterator[nn.Module]:
    """Let every noisy layer draw by `estimator` for a while (None: each by its own)."""
    layers = [m for m in noisy_modules(net).values() if isinstance(m, Variational) and m.posterior]
    before = [m.estimator for m in layers]
    if estimator is not None:
        for m in layers:
            assert m.posterior is not None
            check_estimator(estimator, m.posterior)
    try:
        for m in layers:
            m.estimator = estimator or m.estimator
        yield net
    finally:
        for m, own in zip(layers, before, strict=True):
            m.estimator = own


def outputs(net: nn.Module, loader: Loader, repeats: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Outputs and targets batch by batch; buffers (BatchNorm's statistics) stay as they are."""
    size = 0
    for _ in range(repeats):
        for x, y in loader:
            size = size or len(y)
            if len(y) != size:
                raise VardropError(
                    f"Expected batches of one size, but got {size} and {len(y)}: the variance "
                    "depends on it. Use drop_last=True."
                )
            copies = {name: b.clone() for name, b in net.named_buffers()}
            yield functional_call(net, copies, (x,)), y
