"""Noise on classes: one head, and the rules of DropMax and of what it is compared with."""

from vardrop.heads.base import ClassRule, Head, HeadParts
from vardrop.heads.baselines import (
    AttentionRule,
    ClassDropoutRule,
    SampledSoftmaxRule,
    SoftmaxRule,
)
from vardrop.heads.dropmax import DropMaxRule
from vardrop.heads.former import (
    ClassDropout,
    DeterministicAttention,
    DropMax,
    SampledSoftmax,
    Softmax,
    Sparsemax,
)
from vardrop.heads.sparsemax import SparsemaxRule

__all__ = [
    "AttentionRule",
    "ClassDropout",
    "ClassDropoutRule",
    "ClassRule",
    "DeterministicAttention",
    "DropMax",
    "DropMaxRule",
    "Head",
    "HeadParts",
    "SampledSoftmax",
    "SampledSoftmaxRule",
    "Softmax",
    "SoftmaxRule",
    "Sparsemax",
    "SparsemaxRule",
]
