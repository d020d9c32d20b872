"""Axes of pictures without global state of matplotlib, and PNG files."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from vardrop._core.errors import VardropError

Numbers = Tensor | NDArray[Any] | Sequence[float]
# The colours of Okabe and Ito, which colour-blind readers can distinguish.
BLUE, RED, GREEN, GREY = "#0072b2", "#d55e00", "#009e73", "#8a8a8a"
OTHERS = (RED, GREEN, "#cc79a7", "#e69f00", "#56b4e9")
SMALL, TEXT = 8.0, 9.0
_LINE = 54  # letters in one line of a legend


def axes(ax: Axes | None, width: float = 4.4, height: float = 3.0) -> Axes:
    """`ax`, or new Axes on a figure that is not registered with pyplot."""
    if ax is not None:
        return ax
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure.add_subplot()


def tidy(ax: Axes, x: str = "", y: str = "", title: str = "") -> Axes:
    """Label Axes in small type, without a frame at the top and at the right."""
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(labelsize=SMALL)
    # Names come from the user, so a dollar sign in them is not a formula.
    ax.set_xlabel(x, fontsize=TEXT, parse_math=False)
    ax.set_ylabel(y, fontsize=TEXT, parse_math=False)
    ax.set_title(title, fontsize=TEXT, parse_math=False, loc="left")
    return ax


def legend_above(ax: Axes) -> None:
    """Put a legend between Axes and their title."""
    names = ax.get_legend_handles_labels()[1]
    columns = max(1, min(len(names), _LINE // max(map(len, names))))
    place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0.0, 1.0), "borderpad": 0.2}
    legend = ax.legend(frameon=False, fontsize=SMALL, ncols=columns, borderaxespad=0.1, **place)
    for text in legend.get_texts():
        text.set_parse_math(False)
    rows = math.ceil(len(names) / columns)
    ax.set_title(ax.get_title(loc="left"), loc="left", fontsize=TEXT, pad=6 + 1.5 * SMALL * rows)


def numbers(name: str, series: Numbers, flat: bool = False) -> NDArray[np.float64]:
    """Tensors, arrays and lists as float64. With `flat` the shape (N, 1) becomes (N,)."""
    array = torch.as_tensor(series).detach().to("cpu", torch.float64).numpy()
    if flat and array.shape[1:] == (1,):
        array = array[:, 0]
    if array.size == 0 or (flat and array.ndim != 1):
        wanted = "one number per example" if flat else "at least one number"
        raise VardropError(f"Expected `{name}` to hold {wanted}, but got shape {array.shape}.")
    return array


def short(name: str, length: int = 22) -> str:
    """The end of a long name. Ends distinguish layers."""
    return name if len(name) <= length else "…" + name[1 - length :]


def png(ax: Axes, dpi: int = 200, metadata: dict[str, str] | None = None) -> bytes:
    """The figure of an Axes as a PNG file, with `metadata` in it."""
    buffer = io.BytesIO()
    figure = cast(Figure, ax.get_figure(root=True))
    figure.savefig(buffer, format="png", dpi=dpi, metadata=metadata)
    return buffer.getvalue()
