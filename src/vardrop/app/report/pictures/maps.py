"""Pictures made of pixels: weights before and after pruning, and the clearest and hardest cases."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from numpy.typing import NDArray

from vardrop._core.errors import VardropError
from vardrop.app.report.pictures.canvas import GREY, RED, TEXT, Numbers, axes, numbers

# More cells than this on a side would not be seen apart.
_CELLS = 240
_ACROSS = 6  # images
_ROOM = 0.4  # of the height of an image, for two lines of text
_INK = "#7d7d7d"  # to be read on white and on black


def weight_maps(before: Numbers, after: Numbers | None = None, ax: Axes | None = None) -> Axes:
    """Draw the weights of a layer, and what pruning left of them; red is positive, blue negative.

    A dense layer is drawn as its matrix, outputs down and inputs across; a convolution as its
    filters. In a large layer each cell shows the weight of the largest magnitude in its block.

    Args:
        before: weights, shape (out, in, ...).
        after: the same layer after pruning; drawn beside it on the same scale.
        ax: where to draw; a new figure without it.

    >>> from vardrop.app.report import weight_maps
    >>> ax = weight_maps(torch.randn(6, 1, 5, 5), torch.zeros(6, 1, 5, 5))
    >>> [panel.get_title() for panel in ax.child_axes]
    ['before', 'after, 0.0 % left']
    """
    first = _matrix(numbers("before", before))
    panels = {"before": first}
    if after is not None:
        second = numbers("after", after)
        panels[f"after, {100 * np.count_nonzero(second) / second.size:.1f} % left"] = _matrix(
            second
        )
    ax = axes(ax)
    ax.set_axis_off()
    colours = colormaps["RdBu_r"].with_extremes(bad="#d8d8d8")  # between filters
    scale = float(np.nanquantile(np.abs(first), 0.99)) or 1.0
    wide = first.shape[1] > 1.5 * first.shape[0]
    aspect: Literal["equal", "auto"] = "equal" if np.ndim(before) > 2 else "auto"
    for i, (title, cells) in enumerate(panels.items()):
        panel = ax.inset_axes(_place(i, len(panels), wide))
        look: dict[str, Any] = {"cmap": colours, "interpolation": "nearest"}
        panel.imshow(cells, vmin=-scale, vmax=scale, aspect=aspect, **look)
        _frame(panel, title)
    return ax


def _place(i: int, count: int, stacked: bool) -> tuple[float, float, float, float]:
    """Where the i-th of some panels goes: below each other or side by side."""
    size = 1 / count
    if stacked:
        return (0.0, 1 - (i + 1) * size, 1.0, size * (1 if count == 1 else 0.84))
    return (i * size * 1.02, 0.0, size * (1 if count == 1 else 0.96), 1.0)


def _frame(panel: Axes, title: str) -> None:
    panel.set_xticks([])
    panel.set_yticks([])
    panel.spines[:].set_color(GREY)
    panel.set_title(title, fontsize=TEXT)


def _matrix(weight: NDArray[np.float64]) -> NDArray[np.float64]:
    """A weight of any shape as one matrix of cells."""
    if weight.ndim < 2:
        return weight.reshape(1, -1)
    if weight.ndim == 4 and weight.shape[1] == 1:
        return _tiles(weight[:, 0], np.nan)
    if weight.ndim == 4:
        out, into, height, width = weight.shape
        return _largest(weight.transpose(0, 2, 1, 3).reshape(out * height, into * width))
    return _largest(weight.reshape(len(weight), -1))


def _largest(cells: NDArray[np.float64]) -> NDArray[np.float64]:
    """Blocks of a large matrix, each as its entry of the largest magnitude."""
    rows, columns = (math.ceil(n / _CELLS) for n in cells.shape)
    padded = np.pad(cells, [(0, -n % k) for n, k in zip(cells.shape, (rows, columns), strict=True)])
    down, across = padded.shape[0] // rows, padded.shape[1] // columns
    blocks = padded.reshape(down, rows, across, columns).transpose(0, 2, 1, 3)
    flat = blocks.reshape(down, across, -1)
    return np.take_along_axis(flat, np.abs(flat).argmax(-1)[..., None], -1)[..., 0]


def _tiles(
    images: NDArray[np.float64], gap: float, columns: int | None = None
) -> NDArray[np.float64]:
    """Images (N, H, W, ...) laid out in rows with lines of the value `gap` between them."""
    across = columns or math.ceil(math.sqrt(1.6 * len(images)))
    spare = -len(images) % across
    edges = [(0, spare), (0, 1), (0, 1)] + [(0, 0)] * (images.ndim - 3)
    padded = np.pad(images, edges, constant_values=gap)
    padded[len(images) :] = gap
    rows, height, width = len(padded) // across, *padded.shape[1:3]
    grid = padded.reshape(rows, across, *padded.shape[1:]).swapaxes(1, 2)
    return grid.reshape(rows * height, across * width, *images.shape[3:])[:-1, :-1]


def certain_examples(
    most: Numbers | None = None,
    least: Numbers | None = None,
    ax: Axes | None = None,
    texts: Sequence[Sequence[str]] = ((), ()),
) -> Axes:
    """Draw the cases of which the model is most certain, and those of which it is least certain.

    Args:
        most: images, shape (N, H, W), (N, 1, H, W) or (N, 3, H, W), of any range of values.
        least: likewise.
        ax: where to draw; a new figure without it.
        texts: what to write below the images of `most` and of `least`, one text each.

    >>> from vardrop.app.report import certain_examples
    >>> ax = certain_examples(torch.rand(8, 1, 8, 8), torch.rand(8, 1, 8, 8))
    >>> [panel.get_title(loc="left") for panel in ax.child_axes]
    ['most certain', 'least certain']
    """
    given = {"most certain": (most, texts[0]), "least certain": (least, texts[1])}
    panels = {title: (_images(title, v), t) for title, (v, t) in given.items() if v is not None}
    if not panels:
        raise VardropError(
            "Expected `most` or `least` to be images, but got neither. Leave the picture out."
        )
    ax = axes(ax, height=5.2 if any(map(any, texts)) else 3.0)
    ax.set_axis_off()
    for i, (title, (images, told)) in enumerate(panels.items()):
        panel = ax.inset_axes(_place(i, len(panels), stacked=True))
        panel.patch.set_visible(False)
        cells = _tiles(_labelled(images) if told else images, np.nan, columns=_ACROSS)
        panel.imshow(cells, cmap="gray", vmin=0, vmax=1, aspect="equal", interpolation="nearest")
        _write(panel, images.shape[1:3], told)
        panel.set_axis_off()
        panel.set_title(title, fontsize=TEXT, loc="left", color=_INK)
    return ax


def _labelled(images: NDArray[np.float64]) -> NDArray[np.float64]:
    """Images with room for a line of text below each."""
    room = math.ceil(_ROOM * images.shape[1])
    edges = [(0, 0), (0, room), (0, 0)] + [(0, 0)] * (images.ndim - 3)
    return np.pad(images, edges, constant_values=np.nan)


def _write(panel: Axes, size: tuple[int, int], told: Sequence[str]) -> None:
    height, width = size[0] + math.ceil(_ROOM * size[0]) + 1, size[1] + 1
    for i, text in enumerate(told):
        down, across = divmod(i, _ACROSS)
        place = (across * width + size[1] / 2 - 0.5, down * height + 1.06 * size[0] - 0.5)
        style: dict[str, Any] = {"fontsize": 6.5, "linespacing": 1.0, "ha": "center", "va": "top"}
        colour = RED if "\nas " in text else _INK
        panel.text(*place, text, color=colour, parse_math=False, **style)


def _images(name: str, images: Numbers) -> NDArray[np.float64]:
    """Images as (N, H, W) or (N, H, W, 3) with values from 0 to 1."""
    found = numbers(name, torch.as_tensor(images))
    if found.ndim == 4 and found.shape[1] == 1:
        found = found[:, 0]
    if found.ndim == 4 and found.shape[1] == 3:
        found = found.transpose(0, 2, 3, 1)
    elif found.ndim != 3:
        raise VardropError(
            f"Expected the images of `{name}` to have shape (N, H, W), (N, 1, H, W) or "
            f"(N, 3, H, W), but got {found.shape}. Reshape them first."
        )
    low, high = min(0.0, float(found.min())), max(1.0, float(found.max()))
    return (found - low) / (high - low)
