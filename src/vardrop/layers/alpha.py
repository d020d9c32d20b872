"""log alpha of a model as data and as text: quantiles, sparsity at a threshold."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor, nn

from vardrop._core.checks import check_number
from vardrop._core.errors import VardropError
from vardrop.noisy import log_alpha, noisy_modules, noisy_weights


@dataclass(frozen=True)
class LayerAlpha:
    """log alpha of one noisy module. An alpha shared by several weights counts for each."""

    name: str
    weights: int
    low: float  # 10 % quantile
    median: float
    high: float  # 90 % quantile
    above: int  # weights with log alpha >= threshold


@dataclass(frozen=True)
class AlphaSummary:
    """log alpha by layer, with a printable form."""

    threshold: float
    layers: tuple[LayerAlpha, ...]

    def __str__(self) -> str:
        width = max(5, *(len(row.name) for row in self.layers))
        head = f"{'layer':<{width}}  {'weights':>9}  {'10 %':>7}  {'median':>7}  {'90 %':>7}"
        rows = (
            f"{r.name or '(net)':<{width}}  {r.weights:>9}  {r.low:>7.2f}  {r.median:>7.2f}  "
            f"{r.high:>7.2f}  {r.above / r.weights:.1%}"
            for r in self.layers
        )
        return "\n".join([f"{head}  >= {self.threshold:g}", *rows])


@dataclass(frozen=True)
class Sparsity:
    """The number of weights and of removed weights, by layer, with a printable form."""

    threshold: float
    weights: dict[str, int]
    removed: dict[str, int]

    @property
    def by_layer(self) -> dict[str, float]:
        """Fraction of removed weights of every layer."""
        return {name: self.removed[name] / n for name, n in self.weights.items()}

    @property
    def total(self) -> float:
        """Fraction of removed weights of all layers together."""
        return sum(self.removed.values()) / sum(self.weights.values())

    @property
    def compression(self) -> float:
        """The number of weights divided by the number of retained ones, which may be infinite."""
        left = sum(self.weights.values()) - sum(self.removed.values())
        return sum(self.weights.values()) / left if left else math.inf

    def __str__(self) -> str:
        layers = ", ".join(f"{name or '(net)'} {s:.1%}" for name, s in self.by_layer.items())
        return (
            f"sparsity at log alpha >= {self.threshold:g}: {self.total:.1%} "
            f"({self.compression:.1f}x) | {layers}"
        )


def spread_log_alpha(net: nn.Module) -> dict[str, Tensor]:
    """log alpha in the shape of each weight, a shared alpha repeated. An error if there is none."""
    alphas = log_alpha(net)
    if not alphas:
        kinds = sorted({type(m).__name__ for m in noisy_modules(net).values()})
        raise VardropError(
            f"Expected `net` to have modules with an alpha, but got {', '.join(kinds)}. "
            "Convert it with a Gaussian posterior, such as vardrop.sparse_vd()."
        )
    shapes = {name: tensor.mean.shape for name, _, tensor in noisy_weights(net)}
    return {name: la.expand(shapes.get(name, la.shape)) for name, la in alphas.items()}


def alpha_summary(net: nn.Module, threshold: float = 3.0) -> AlphaSummary:
    """Quantiles of log alpha by layer, and the number of weights at or above a threshold.

    Args:
        net: a model with noisy modules.
        threshold: on log alpha. The authors chose 3 from the histogram.

    Returns:
        One row per layer. Print it.

    >>> import torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Sequential(torch.nn.Linear(3, 2)), vd.variational_dropout())
    >>> print(alpha_summary(net))
    layer    weights     10 %   median     90 %  >= 3
    0              6     0.00     0.00     0.00  0.0%

    Molchanov, Ashukha & Vetrov 2017, sec. 5.
    """
    check_number("threshold", threshold)
    rows = []
    for name, la in spread_log_alpha(net).items():
        ordered = la.flatten().double().sort().values
        # Order statistics, not interpolated quantiles: log alpha may be infinite.
        low, median, high = (ordered[int(q * (len(ordered) - 1))].item() for q in (0.1, 0.5, 0.9))
        above = int((ordered >= threshold).sum())
        rows.append(LayerAlpha(name, len(ordered), low, median, high, above))
    return AlphaSummary(threshold, tuple(rows))


def sparsity(net: nn.Module, threshold: float = 3.0) -> Sparsity:
    """Fraction of weights with log alpha >= threshold, by layer and in all.

    Args:
        net: a model with noisy modules.
        threshold: on log alpha, a hyper-parameter. 3 is a drop rate of 0.953.

    Returns:
        The fractions by layer, and `total` for the model.

    >>> import torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Linear(3, 2), vd.sparse_vd())
    >>> sparsity(net).total
    0.0

    Molchanov, Ashukha & Vetrov 2017, sec. 5.
    """
    summary = alpha_summary(net, threshold).layers
    return Sparsity(
        threshold, {r.name: r.weights for r in summary}, {r.name: r.above for r in summary}
    )
