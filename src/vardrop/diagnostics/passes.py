"""Passes over a net that leave it as it was: its estimators, modes and buffers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.func import functional_call

from vardrop.checks import check_integer, check_type, shown
from vardrop.errors import VardropError
from vardrop.estimators import Estimator, check_estimator
from vardrop.layers import Variational
from vardrop.noisy import noisy_modules, untouched

Loader = Iterable[tuple[Tensor, Tensor]]


def batches(loader: Loader, repeats: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
    """The pairs (x, y) of a loader, as often as asked; anything else is refused."""
    check_integer("repeats", repeats)
    check_type("loader", loader, Iterable, "an iterable of batches (x, y)")
    if repeats > 1 and iter(loader) is loader:
        raise VardropError(
            f"Expected `loader` to be gone through {repeats} times, but got an iterator, which "
            "ends after once. Pass a list or a DataLoader."
        )
    for _ in range(repeats):
        for batch in loader:
            pair = isinstance(batch, tuple | list) and len(batch) == 2
            if not pair or not isinstance(batch[1], Tensor):
                raise VardropError(
                    f"Expected `loader` to yield pairs (x, y) of tensors, but got {shown(batch)}."
                )
            yield batch[0], batch[1]


@contextmanager
def drawing(net: nn.Module, estimator: Estimator | None) -> Iterator[nn.Module]:
    """Let every noisy layer draw by `estimator` for a while (None: each by its own)."""
    layers = [m for m in noisy_modules(net).values() if isinstance(m, Variational) and m.posterior]
    before = [m.estimator for m in layers]
    check_type("estimator", estimator, Estimator | None, "an Estimator such as vardrop.flipout")
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
    for x, y in batches(loader, repeats):
        size = size or len(y)
        if len(y) != size:
            raise VardropError(
                f"Expected batches of one size, but got {size} and {len(y)}: the variance "
                "depends on it. Use drop_last=True."
            )
        copies = {name: b.clone() for name, b in net.named_buffers()}
        yield functional_call(net, copies, (untouched(x),)), y
