"""Methods with noise on classes: heads instead of the last linear layer."""

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


def dropmax(temperature: float = 0.1, inference: Literal["q", "p"] = "q") -> HeadRecipe:
    """DropMax: learns which classes to drop for each example.

    The authors train with Adam, with learning rates of 1e-3, 1e-4 and 1e-5 for a third of the
    epochs each, and a weight decay of 1e-4 on all parameters except the two branches of the head,
    as in `parameter_groups`.

    Args:
        temperature: of the relaxed masks.
        inference: "q" predicts with the posterior, "p" with draws from the prior.

    Returns:
        The recipe, for `convert`, `plan` and `fit`.

    >>> import torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Linear(5, 3), vd.dropmax())
    >>> net.retain_probability(torch.randn(4, 5)).shape
    torch.Size([4, 3])

    Lee et al. 2018, "DropMax: adaptive variational softmax", eq. 4 to 14.
    """
    return HeadRecipe(DropMaxRule(temperature, inference))


def softmax() -> HeadRecipe:
    """The plain softmax, as a head.

    >>> import torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Linear(5, 3), vd.softmax())
    >>> round(net(torch.zeros(1, 5)).exp().sum().item(), 4)  # log-probabilities
    1.0

    Bridle 1990, "Probabilistic interpretation of feedforward classification network outputs".
    """
    return HeadRecipe(SoftmaxRule())


def sampled_softmax(fraction: float = 0.4) -> HeadRecipe:
    """In training, a softmax over the target and a uniform sample of the other classes.

    Args:
        fraction: the fraction of classes in a sample.

    Returns:
        The recipe, for `convert`, `plan` and `fit`.

    >>> import vardrop as vd
    >>> vd.sampled_softmax(fraction=0.1).rule
    SampledSoftmaxRule(fraction=0.1)

    Jean et al. 2015, "On using very large target vocabulary for neural machine translation".
    """
    return HeadRecipe(SampledSoftmaxRule(fraction))


def class_dropout(drop_rate: float = 0.6) -> HeadRecipe:
    """In training, a softmax in which every class except the target is dropped at a fixed rate.

    Args:
        drop_rate: the probability that a class is dropped.

    Returns:
        The recipe, for `convert`, `plan` and `fit`.

    >>> import vardrop as vd
    >>> vd.class_dropout(0.5).rule
    ClassDropoutRule(drop_rate=0.5)

    Lee et al. 2018, "DropMax: adaptive variational softmax", sec. 5 (random DropMax).
    """
    return HeadRecipe(ClassDropoutRule(drop_rate))


def deterministic_attention() -> HeadRecipe:
    """Softmax weighted by sigmoid attention over the classes, without noise.

    >>> import torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Linear(5, 3), vd.deterministic_attention())
    >>> [name for name, _ in net.named_children()]
    ['retain']

    Lee et al. 2018, "DropMax: adaptive variational softmax", sec. 5.
    """
    return HeadRecipe(AttentionRule())


def sparsemax() -> HeadRecipe:
    """The projection of the logits onto the simplex.

    >>> import torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Linear(2, 2, bias=False), vd.sparsemax())
    >>> _ = net.weight.data.copy_(torch.eye(2))
    >>> net(torch.tensor([[2.0, 0.0]])).exp().tolist()
    [[1.0, 0.0]]

    Martins & Astudillo 2016, "From softmax to sparsemax", eq. 21.
    """
    return HeadRecipe(SparsemaxRule())
