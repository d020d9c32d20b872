"""Methods with noise on classes: heads in the place of the last linear layer."""

from __future__ import annotations

from typing import Literal

from vardrop.heads import (
    AttentionRule,
    ClassDropoutRule,
    DropMaxRule,
    SampledSoftmaxRule,
    SoftmaxRule,
    SparsemaxRule,
)
from vardrop.recipes.recipe import HeadRecipe

__all__ = [
    "class_dropout",
    "deterministic_attention",
    "dropmax",
    "sampled_softmax",
    "softmax",
    "sparsemax",
]


def dropmax(temperature: float = 0.1, inference: Literal["q", "p"] = "q") -> HeadRecipe:
    """DropMax: learns which classes to drop for each example; `inference="p"` draws from the prior.

    The authors train with Adam, 1e-3, 1e-4 and 1e-5 by thirds, and a weight decay of 1e-4 on
    everything but the two branches of the head, as `parameter_groups` does.

    Lee et al. 2018, "DropMax: adaptive variational softmax", eq. 4 to 14.
    """
    return HeadRecipe(DropMaxRule(temperature, inference))


def softmax() -> HeadRecipe:
    """The plain softmax, as a head."""
    return HeadRecipe(SoftmaxRule())


def sampled_softmax(share: float = 0.4) -> HeadRecipe:
    """Softmax over the target and a uniform sample of the other classes, in training.

    Jean et al. 2015, "On using very large target vocabulary for neural machine translation".
    """
    return HeadRecipe(SampledSoftmaxRule(share))


def class_dropout(drop_rate: float = 0.6) -> HeadRecipe:
    """Softmax with every class but the target dropped at one fixed rate, in training.

    Lee et al. 2018, "DropMax: adaptive variational softmax", sec. 5 (random DropMax).
    """
    return HeadRecipe(ClassDropoutRule(drop_rate))


def deterministic_attention() -> HeadRecipe:
    """Softmax weighted by sigmoid attention over the classes, without noise.

    Lee et al. 2018, "DropMax: adaptive variational softmax", sec. 5.
    """
    return HeadRecipe(AttentionRule())


def sparsemax() -> HeadRecipe:
    """The projection of the logits onto the simplex.

    Martins & Astudillo 2016, "From softmax to sparsemax", eq. 21.
    """
    return HeadRecipe(SparsemaxRule())
