"""Grouping of values into bins, shared by the calibration scores and the Brier decomposition."""

from typing import Literal, get_args

import torch
from torch import Tensor

from vardrop.checks import check_integer
from vardrop.errors import VardropError

Scheme = Literal["width", "mass"]


def bin_index(values: Tensor, bins: int, scheme: Scheme = "width") -> Tensor:
    """Return the bin of each of the `values`: bins of equal width in [0, 1], or of equal mass.

    Bins are closed on the right, as in Guo et al. (2017). Equal values always share a bin, so the
    result does not depend on the order of the rows; with many ties some bins stay empty.
    """
    check_integer("bins", bins)
    if scheme not in get_args(Scheme):
        raise VardropError(
            f"Expected `scheme` to be one of {get_args(Scheme)}, but got {scheme!r}. "
            'Pass "width" for bins of equal width or "mass" for bins of equal count.'
        )
    cuts = torch.arange(1, bins, device=values.device)
    if scheme == "width":
        # Dividing integers gives the float nearest to each edge, so that 0.2 meets the edge 3 / 15.
        edges = cuts.to(values.dtype) / bins
    else:
        last_of_bin = (cuts * values.numel() + bins - 1) // bins - 1
        edges = values.flatten().sort().values[last_of_bin]
    return torch.bucketize(values, edges)


def bin_sum(values: Tensor, index: Tensor, bins: int) -> Tensor:
    """Return the sum of the `values` in each bin, shape (bins,)."""
    return values.new_zeros(bins).index_add(0, index, values)


def bin_mean(values: Tensor, index: Tensor, bins: int) -> Tensor:
    """Return the mean of the `values` in each bin, shape (bins,); NaN where a bin is empty."""
    return bin_sum(values, index, bins) / index.bincount(minlength=bins)
