"""Binary dropout: x * mask / (1 - drop_rate), with independent masks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from vardrop.gates.base import FeatureNoise
from vardrop.posteriors import Tensors, check_drop_rate


@dataclass(frozen=True)
class BinaryDropout(FeatureNoise):
    """Each element is dropped with probability `drop_rate` and kept ones are scaled up.

    multiplier = z / (1 - drop_rate), z ~ Bernoulli(1 - drop_rate); mean 1, variance
    drop_rate / (1 - drop_rate).

    >>> import torch
    >>> BinaryDropout(drop_rate=0.0).multiplier(torch.zeros(1, 2), -1, {})
    tensor([[1., 1.]])

    Srivastava et al. 2014, "Dropout", sec. 4; as variational inference Gal & Ghahramani 2016.
    """

    drop_rate: float = 0.5
    learned: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_drop_rate(self.drop_rate)

    def initial(self, units: int) -> dict[str, Tensor]:
        return {}

    def multiplier(self, x: Tensor, axis: int, tensors: Tensors) -> Tensor:
        kept = torch.rand_like(x) >= self.drop_rate
        return kept.to(x.dtype) / (1 - self.drop_rate)
