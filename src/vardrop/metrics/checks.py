"""Checks on the inputs of the metrics, each with a message that says how to repair the input."""

import torch
from torch import Tensor

from vardrop._core.checks import check_tensor
from vardrop._core.errors import VardropError


def check_values(name: str, values: Tensor) -> Tensor:
    """Return `values` contiguous and in at least single precision, once known to be usable."""
    check_tensor(name, values)
    if not values.is_floating_point():
        raise VardropError(
            f"Expected `{name}` to hold floating-point numbers, but got dtype {values.dtype}. "
            f"Convert it with `{name}.float()`."
        )
    if values.numel() == 0:
        raise VardropError(
            f"Expected `{name}` to hold at least one value, but got shape {tuple(values.shape)}. "
            "Check that the data loader or the mask before this call keeps some rows."
        )
    if values.isnan().any():
        raise VardropError(
            f"Expected `{name}` to hold no NaN, but got {int(values.isnan().sum())} NaN values. "
            "Find where the model produces them, or drop those rows."
        )
    # Half precision would round the sums; searching in strided memory makes torch warn.
    return values.to(torch.promote_types(values.dtype, torch.float32)).contiguous()


def check_finite(name: str, values: Tensor) -> Tensor:
    """Return `values` as `check_values` does, once known to hold no infinity either."""
    checked = check_values(name, values)
    if checked.isinf().any():
        raise VardropError(
            f"Expected `{name}` to be finite, but got {int(checked.isinf().sum())} infinities. "
            "Find where the model overflows, or drop those rows."
        )
    return checked


def check_vector(name: str, values: Tensor) -> Tensor:
    """Return `values` as `check_values` does, once known to have one dimension."""
    check_tensor(name, values)
    if values.ndim != 1:
        raise VardropError(
            f"Expected `{name}` to have shape (N,), but got shape {tuple(values.shape)}. "
            f"Flatten it with `{name}.flatten()`."
        )
    return check_values(name, values)


def check_shape(name: str, values: Tensor, expected: torch.Size, reference: str) -> None:
    """Raise unless `values` has the `expected` shape, which comes from the `reference` argument."""
    check_tensor(name, values)
    if values.shape != expected:
        raise VardropError(
            f"Expected `{name}` to have shape {tuple(expected)} to match `{reference}`, "
            f"but got shape {tuple(values.shape)}. Reshape or expand one of the two."
        )


def averaged(values: Tensor, weight: Tensor | None) -> Tensor:
    """The mean of values; with weights of their shape, each counts so many times."""
    if weight is None:
        return values.mean()
    checked = check_finite("weight", weight)
    check_shape("weight", checked, values.shape, "y")
    if checked.min() < 0 or checked.max() == 0:
        raise VardropError(
            "Expected `weight` to be at least 0 and not all 0, but got "
            f"{checked.min().item():.6g} to {checked.max().item():.6g}. It says for how many rows "
            "each stands."
        )
    return (values * checked).sum() / checked.sum()


def check_class_scores(name: str, scores: Tensor) -> Tensor:
    """Return an (N, K) table of class scores as `check_values` does."""
    check_tensor(name, scores)
    if scores.ndim != 2:
        raise VardropError(
            f"Expected `{name}` to have shape (N, K), but got shape {tuple(scores.shape)}. Flatten "
            "extra batch dimensions, average over draws, and give a binary model two columns."
        )
    return check_values(name, scores)


def check_sums(name: str, sums: Tensor, dtype: torch.dtype) -> None:
    """Raise unless the class probabilities of every row add up to one."""
    # Rounding a row to `dtype` moves its sum by up to half an eps, so the slack grows with eps.
    slack = max(1e-4, 4 * torch.finfo(dtype).eps)
    worst = sums[(sums - 1).abs().argmax()].item()
    if abs(worst - 1) > slack:
        raise VardropError(
            f"Expected `{name}` to hold probabilities that sum to one in each row, "
            f"but got a row with sum {worst:.6g}. Apply a softmax over the last dimension."
        )


def check_labels(y: Tensor, rows: int, classes: int) -> None:
    """Raise unless `y` holds one class index below `classes` for each of the `rows`."""
    check_tensor("y", y)
    if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise VardropError(
            f"Expected `y` to hold integer class indices, but got dtype {y.dtype}. "
            "Convert it with `y.long()`."
        )
    if y.shape != (rows,):
        raise VardropError(
            f"Expected `y` to have shape ({rows},), one label per row of the predictions, "
            f"but got shape {tuple(y.shape)}. Pass class indices, not one-hot vectors."
        )
    low, high = int(y.min()), int(y.max())
    if low < 0 or high >= classes:
        raise VardropError(
            f"Expected `y` to hold labels from 0 to {classes - 1}, but got labels from {low} to "
            f"{high}. Drop the rows with an ignore label, or renumber the classes from zero."
        )


def check_classification(probs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return `probs` in at least single precision and `y` as int64, once both are usable."""
    checked = check_class_scores("probs", probs)
    if checked.min() < 0:
        raise VardropError(
            f"Expected `probs` to be non-negative, but got {checked.min().item():.6g}. "
            "Apply a softmax over the last dimension if these are logits."
        )
    check_sums("probs", checked.sum(dim=1), probs.dtype)
    check_labels(y, *checked.shape)
    return checked, y.long()
