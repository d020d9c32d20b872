"""Passes that leave a net as it was (estimators, modes, buffers), and numbers with their error."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from vardrop._core.calls import arguments, one_tensor, plain_batch, untouched
from vardrop._core.checks import check_integer, check_number, check_type, shown
from vardrop._core.errors import VardropError
from vardrop.estimators import Estimator, check_estimator
from vardrop.layers import Variational
from vardrop.noisy import noisy_modules


@dataclass(frozen=True)
class Estimate:
    """A mean over independent repetitions, with its standard error."""

    value: float
    standard_error: float
    repetitions: int

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """Student's t interval around the value."""
        check_number("level", level, above=0, below=1)
        half = student_quantile(0.5 + level / 2, self.repetitions - 1) * self.standard_error
        return self.value - half, self.value + half

    def __str__(self) -> str:
        low, high = self.interval()
        return f"{self.value:.3g} (95 %: {low:.3g} to {high:.3g})"


def student_quantile(probability: float, df: int) -> float:
    """Quantile of Student's t, below 1 % off from df 3 on (Abramowitz & Stegun 26.7.5).

    >>> round(student_quantile(0.975, 10), 2)
    2.23
    """
    z = NormalDist().inv_cdf(probability)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / df ** (i + 1) for i, term in enumerate(terms))


Loader = Iterable[tuple[Any, Tensor]]


def batches(loader: Loader, repeats: int = 1) -> Iterator[tuple[Any, Tensor]]:
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
        yield called_with(net, copies, x), y


def called_with(net: nn.Module, tensors: dict[str, Tensor], x: Any) -> Any:
    """What a net says of a batch with other tensors in the place of its own: its `logits`, if any.

    A loss of the user's own gets any other output as it is.
    """
    args, kwargs = arguments(net, untouched(plain_batch(x)))
    found = functional_call(net, tensors, args, kwargs)
    return one_tensor(found) if hasattr(found, "logits") else found
