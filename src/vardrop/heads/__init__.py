"""Noise on classes: one head, and the rules of DropMax and of what it is compared with."""

import warnings
from typing import Any

from vardrop.heads.base import (
    ClassRule as ClassRule,
    Head as Head,
    HeadParts as HeadParts,
)
from vardrop.heads.baselines import (
    AttentionRule as AttentionRule,
    ClassDropoutRule as ClassDropoutRule,
    SampledSoftmaxRule as SampledSoftmaxRule,
    SoftmaxRule as SoftmaxRule,
    SparsemaxRule as SparsemaxRule,
)
from vardrop.heads.dropmax import DropMaxRule as DropMaxRule


# Heads that were classes of their own, by their former names: each warns.
def _head(
    name: str, rule: type[ClassRule], sizes: tuple[int, int], bias: bool, options: dict[str, Any]
) -> Head:
    warnings.warn(
        f"`{name}(in_features, num_classes)` goes in the next version. Write "
        f"vardrop.Head(in_features, num_classes, vardrop.heads.{rule.__name__}()).",
        DeprecationWarning,
        stacklevel=3,
    )
    return Head(*sizes, rule(**options), bias)


def DropMax(in_features: int, num_classes: int, bias: bool = True, **options: Any) -> Head:
    """Deprecated: `Head` with a `DropMaxRule`."""
    return _head("DropMax", DropMaxRule, (in_features, num_classes), bias, options)


def Softmax(in_features: int, num_classes: int, bias: bool = True) -> Head:
    """Deprecated: `Head` with a `SoftmaxRule`."""
    return _head("Softmax", SoftmaxRule, (in_features, num_classes), bias, {})


def SampledSoftmax(in_features: int, num_classes: int, bias: bool = True, **options: Any) -> Head:
    """Deprecated: `Head` with a `SampledSoftmaxRule`."""
    if "share" in options:
        options["fraction"] = options.pop("share")
    return _head("SampledSoftmax", SampledSoftmaxRule, (in_features, num_classes), bias, options)


def ClassDropout(in_features: int, num_classes: int, bias: bool = True, **options: Any) -> Head:
    """Deprecated: `Head` with a `ClassDropoutRule`."""
    return _head("ClassDropout", ClassDropoutRule, (in_features, num_classes), bias, options)


def DeterministicAttention(in_features: int, num_classes: int, bias: bool = True) -> Head:
    """Deprecated: `Head` with an `AttentionRule`."""
    return _head("DeterministicAttention", AttentionRule, (in_features, num_classes), bias, {})


def Sparsemax(in_features: int, num_classes: int, bias: bool = True) -> Head:
    """Deprecated: `Head` with a `SparsemaxRule`."""
    return _head("Sparsemax", SparsemaxRule, (in_features, num_classes), bias, {})
