"""Noise on classes: one head, and the rules of DropMax and of what it is compared with."""

from vardrop.heads.base import ClassRule as ClassRule, Head as Head, HeadParts as HeadParts
from vardrop.heads.rules import AttentionRule as AttentionRule, DropMaxRule as DropMaxRule
from vardrop.heads.rules import ClassDropoutRule as ClassDropoutRule
from vardrop.heads.rules import SampledSoftmaxRule as SampledSoftmaxRule
from vardrop.heads.rules import SoftmaxRule as SoftmaxRule, SparsemaxRule as SparsemaxRule
