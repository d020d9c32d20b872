"""Noise on classes: DropMax and the heads it is compared with, under one interface."""

from vardrop.heads.base import ClassRule, Head, HeadParts
from vardrop.heads.baselines import (
    AttentionRule,
    ClassDropout,
    ClassDropoutRule,
    DeterministicAttention,
    SampledSoftmax,
    SampledSoftmaxRule,
    Softmax,
    SoftmaxRule,
)
from vardrop.heads.dropmax import DropMax, DropMaxRule
from vardrop.heads.sparsemax import Sparsemax, SparsemaxRule

# The rule and the head that follows it.
HEAD_TYPES: dict[type[ClassRule], type[Head]] = {
    head.rule_type: head
    for head in (Softmax, SampledSoftmax, ClassDropout, DeterministicAttention, DropMax, Sparsemax)
}

__all__ = [
    "HEAD_TYPES",
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
