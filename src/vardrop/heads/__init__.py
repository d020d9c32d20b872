"""Noise on classes: one head, and the rules of DropMax and of what it is compared with."""

from vardrop.heads.base import ClassRule as ClassRule, Head as Head, HeadParts as HeadParts
from vardrop.heads.baselines import AttentionRule as AttentionRule
from vardrop.heads.baselines import ClassDropoutRule as ClassDropoutRule
from vardrop.heads.baselines import SampledSoftmaxRule as SampledSoftmaxRule
from vardrop.heads.baselines import SoftmaxRule as SoftmaxRule, SparsemaxRule as SparsemaxRule
from vardrop.heads.dropmax import DropMaxRule as DropMaxRule
