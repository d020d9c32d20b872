"""Pictures of weights: removed weights by layer, and maps of small layers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter
from numpy.typing import NDArray

from vardrop.app.report.pictures import canvas
from vardrop.app.report.pictures.canvas import Numbers


def layer_sparsity(sparsity: Mapping[str, float], ax: Axes | None = None) -> Axes:
    """Draw the fraction of removed weights of every layer as bars.

    Args:
        sparsity: fraction of removed weights by layer, each in [0, 1].
        ax: where to draw; a new figure by default.

    >>> from vardrop.app.report import layer_sparsity
    >>> len(layer_sparsity({"conv1": 0.6, "fc1": 0.99}).patches)
    2
    """
    places = range(len(sparsity))
    fractions = canvas.numbers("sparsity", list(sparsity.values()))
    ax = canvas.axes(ax, height=max(3.0, 0.8 + 0.3 * len(sparsity)))
    ax.barh(places, fractions, color=canvas.BLUE, height=0.7)
    for place, fraction in zip(places, fractions, strict=True):
        ax.text(1.02, place, f"{fraction:.1%}", va="center", fontsize=canvas.SMALL)
    ax.set_yticks(places, labels=[canvas.short(name) for name in sparsity], parse_math=False)
    ax.invert_yaxis()
    ax.set_xlim(0, 1)
    ax.xaxis.set_major_formatter(PercentFormatter(1))
    ax.tick_params(axis="y", length=0)
    return canvas.tidy(ax, x="weights removed")


def weight_maps(before: Numbers, after: Numbers | None = None, ax: Axes | None = None) -> Axes:
    """Draw the weights of a layer before and after pruning; red is positive, blue negative.

    A dense layer is drawn as its matrix, outputs down and inputs across, a convolution as its
    filters.

    Args:
        before: weights, shape (out, in, ...).
        after: the same layer after pruning, drawn next to it on the same scale.
        ax: where to draw; a new figure by default.

    >>> import torch
    >>> from vardrop.app.report import weight_maps
    >>> ax = weight_maps(torch.randn(6, 1, 5, 5), torch.zeros(6, 1, 5, 5))
    >>> [panel.get_title() for panel in ax.child_axes]
    ['before', 'after, 0.0% left']
    """
    weight = canvas.numbers("before", before)
    panels = {"before": weight}
    if after is not None:
        pruned = canvas.numbers("after", after)
        panels[f"after, {np.count_nonzero(pruned) / pruned.size:.1%} left"] = pruned
    ax = canvas.axes(ax)
    ax.set_axis_off()
    colours = colormaps["RdBu_r"].with_extremes(bad="#d8d8d8")  # between filters
    scale = float(np.quantile(np.abs(weight), 0.99)) or 1.0
    aspect: Literal["equal", "auto"] = "equal" if weight.ndim > 2 else "auto"
    for i, (title, values) in enumerate(panels.items()):
        panel = ax.inset_axes((i * 0.52, 0.0, 0.48, 0.9))
        panel.imshow(_to_matrix(values), cmap=colours, vmin=-scale, vmax=scale, aspect=aspect)
        panel.set_xticks([])
        panel.set_yticks([])
        panel.spines[:].set_color(canvas.GREY)
        panel.set_title(title, fontsize=canvas.TEXT)
    return ax


def _to_matrix(weight: NDArray[np.float64]) -> NDArray[np.float64]:
    """A weight of any shape as one matrix; filters of one channel as tiles with gaps."""
    if weight.ndim != 4:
        return weight.reshape(len(weight), -1) if weight.ndim > 1 else weight.reshape(1, -1)
    if weight.shape[1] > 1:
        out, into, height, width = weight.shape
        return weight.transpose(0, 2, 1, 3).reshape(out * height, into * width)
    across = math.ceil(math.sqrt(1.6 * len(weight)))
    edges = [(0, -len(weight) % across), (0, 1), (0, 1)]
    tiles = np.pad(weight[:, 0], edges, constant_values=np.nan)
    height, width = tiles.shape[1:]
    grid = tiles.reshape(-1, across, height, width).swapaxes(1, 2)
    return grid.reshape(-1, across * width)[:-1, :-1]


def fits_on_map(weight: Any, cells: int = 512) -> bool:
    """Whether single weights of a layer can be seen in `weight_maps`."""
    return max(weight.shape[0], math.prod(weight.shape[1:])) <= cells
