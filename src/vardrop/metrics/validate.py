"""Checks on the inputs of the metrics. Each error message contains a remedy."""

import math

import torch
from torch import Tensor

from vardrop._core.checks import check_shape, check_tensor
from vardrop._core.errors import VardropError

_SHAPES = {1: "(N,)", 2: "(N, K)"}
_REMEDIES = {
    1: "Flatten it with `.flatten()`.",
    2: "Flatten extra batch dimensions, average over draws, and give a binary model two columns.",
}


def check_values(
    name: str, values: Tensor, ndim: int | None = None, finite: bool = False
) -> Tensor:
    """Return usable numbers, contiguous and in at least single precision.

    Args:
        name: of the argument, for the error.
        values: the argument.
        ndim: the number of dimensions, 1 or 2, or None if any shape is fine.
        finite: whether infinities are an error too. NaN always is.

    Returns:
        The values. Half precision would round sums, and searching strided memory makes torch warn.
    """
    check_tensor(name, values)
    if values.is_meta or values.layout != torch.strided:
        kind = f"{values.layout} on {values.device}"
        raise VardropError(f"Expected `{name}` to be a dense tensor with values, but got {kind}.")
    if ndim is not None and values.ndim != ndim:
        raise VardropError(
            f"Expected `{name}` to have shape {_SHAPES[ndim]}, but got shape "
            f"{tuple(values.shape)}. {_REMEDIES[ndim]}"
        )
    if not values.is_floating_point():
        raise VardropError(
            f"Expected `{name}` to hold floating-point numbers, but got dtype {values.dtype}. "
            f"Convert it with `{name}.float()`."
        )
    if values.numel() == 0:
        raise VardropError(
            f"Expected `{name}` to hold at least one value, but got shape {tuple(values.shape)}. "
            "Check that the data loader or the mask before this call keeps some examples."
        )
    bad = ~values.isfinite() if finite else values.isnan()
    if bad.any():
        wanted, kind = ("be finite", "NaN or infinite") if finite else ("hold no NaN", "NaN")
        raise VardropError(
            f"Expected `{name}` to {wanted}, but got {int(bad.sum())} {kind} values. "
            "Find where the model produces them, or drop those examples."
        )
    return values.to(torch.promote_types(values.dtype, torch.float32)).contiguous()


def check_weight(weight: Tensor, values: Tensor) -> Tensor:
    """Return weights of examples in the type of the values, one weight per value."""
    weight = check_values("weight", weight, finite=True)
    check_shape("weight", weight, values.shape, "y")
    low, high = weight.min().item(), weight.max().item()
    if low < 0 or high == 0:
        raise VardropError(
            f"Expected `weight` to be at least 0 and not all 0, but got {low:.6g} to {high:.6g}. "
            "A weight is the number of examples that one example counts for."
        )
    return weight


def weighted_mean(values: Tensor, weight: Tensor | None) -> Tensor:
    """The mean of values, weighted if there are weights."""
    if weight is None:
        return values.mean()
    weight = check_weight(weight, values)
    return (values * weight).sum() / weight.sum()


def check_classification(
    probs: Tensor, y: Tensor, logarithms: bool = False
) -> tuple[Tensor, Tensor]:
    """Return class probabilities in at least single precision and labels as int64.

    Args:
        probs: probabilities or their logarithms, shape (N, K).
        y: class indices, shape (N,).
        logarithms: whether `probs` are logarithms.
    """
    scores = check_probabilities("log_probs" if logarithms else "probs", probs, 2, logarithms)
    examples, classes = scores.shape
    check_tensor("y", y)
    if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise VardropError(
            f"Expected `y` to hold integer class indices, but got dtype {y.dtype}. "
            "Convert it with `y.long()`."
        )
    if y.shape != (examples,):
        raise VardropError(
            f"Expected `y` to have shape ({examples},), one label per row of the predictions, "
            f"but got shape {tuple(y.shape)}. Pass class indices, not one-hot vectors."
        )
    low, high = int(y.min()), int(y.max())
    if low < 0 or high >= classes:
        raise VardropError(
            f"Expected `y` to hold labels from 0 to {classes - 1}, but got labels from {low} to "
            f"{high}. Drop the examples with an ignore label, or renumber the classes from zero."
        )
    return scores, y.long()


def check_probabilities(
    name: str, probs: Tensor, ndim: int | None = None, logarithms: bool = False
) -> Tensor:
    """Return class probabilities, with classes on axis 1, in at least single precision.

    Args:
        name: of the argument, for the error.
        probs: probabilities or their logarithms, shape (N, K, ...).
        ndim: the number of dimensions, or None for any above 1.
        logarithms: whether `probs` are logarithms.
    """
    scores = check_values(name, probs, ndim)
    if scores.ndim < 2:
        raise VardropError(f"Expected `{name}` of shape (N, K), but got {tuple(scores.shape)}.")
    if not logarithms and scores.min() < 0:
        raise VardropError(
            f"Expected `{name}` to be non-negative, but got {scores.min().item():.6g}. "
            "Apply a softmax over the last dimension if these are logits."
        )
    sums = (scores.exp() if logarithms else scores).sum(dim=1).flatten()
    worst = sums[(sums - 1).abs().argmax()].item()
    # Rounding a row to its dtype moves its sum by up to half an eps.
    if not math.isclose(worst, 1, rel_tol=0, abs_tol=max(1e-4, 4 * torch.finfo(probs.dtype).eps)):
        raise VardropError(
            f"Expected `{name}` to hold probabilities that sum to one in each row, "
            f"but got a row with sum {worst:.6g}. Apply a softmax over the last dimension."
        )
    return scores
