"""The recipe: a method as a value composed of public parts."""

from __future__ import annotations

from dataclasses import dataclass

from vardrop.errors import VardropError
from vardrop.estimators import Estimator, local_reparameterization
from vardrop.gates import FeatureNoise
from vardrop.heads import ClassRule
from vardrop.layers.base import check_method
from vardrop.posteriors import Posterior
from vardrop.priors import Prior
from vardrop.values import Value


@dataclass(frozen=True)
class Recipe(Value):
    """A method as a value: posterior and prior of the weights, estimator, gate, head.

    `existing` switches the dropout modules that the net has, with their own rates, and gates
    layers only where it has none. `head` replaces the last linear layer, and stands alone.

    >>> import vardrop as vd
    >>> vd.sparse_vd() == vd.Recipe(vd.AdditiveGaussian(), vd.LogUniform())
    True
    """

    posterior: Posterior | None = None
    prior: Prior | None = None
    estimator: Estimator = local_reparameterization
    gate: FeatureNoise | None = None
    noisy_bias: bool = False
    existing: bool = False
    head: ClassRule | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        noise = self.posterior or self.gate or self.existing
        if not noise and self.head is None:
            raise VardropError(
                "Expected `posterior`, `gate`, `existing` or `head` to be given, but got none. "
                "A recipe without noise changes nothing."
            )
        if noise and self.head is not None:
            raise VardropError(
                "Expected `head` to stand alone, but got other noise beside it. Convert twice: "
                "the head first, then the other layers."
            )
        if self.existing and self.posterior is not None:
            raise VardropError(
                f"Expected `existing` to stand without a posterior, but got {self.posterior!r}. "
                "Convert twice: the dropout modules first, then the weights."
            )
        if self.noisy_bias and self.posterior is None:
            raise VardropError(
                "Expected `posterior` where `noisy_bias` is True, but got None. "
                "Give a posterior, which is what biases are drawn from."
            )
        check_method(self.posterior, self.prior, self.estimator)
