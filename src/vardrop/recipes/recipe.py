"""The kinds of recipe: a method as a value composed of public parts."""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass

from vardrop._core.errors import VardropError
from vardrop._core.values import Value
from vardrop.estimators import Estimator, check_method, flipout, local_reparameterization
from vardrop.gates import FeatureNoise
from vardrop.heads import ClassRule
from vardrop.posteriors import Posterior
from vardrop.priors import Prior


@dataclass(frozen=True)
class BaseRecipe(Value, ABC):
    """A method as a value of any kind, for `convert`, `plan` and `fit`.

    `Recipe` puts noise on the weights and features of layers, `HeadRecipe` on classes, and
    `SwitchDropout` uses the existing dropout of a model.
    """


@dataclass(frozen=True)
class Recipe(BaseRecipe):
    """Noise on weights and features: posterior and prior of the weights, estimator, gate.

    Args:
        posterior: of the weights. None leaves them without noise.
        prior: of the weights. None is for a method without a KL.
        estimator: how the noise of the weights is drawn. None lets `convert` choose by the model:
            `flipout` if it has convolutions, attention or embeddings, which use a weight at several
            positions of an example, and otherwise `local_reparameterization`.
        gate: noise on the inputs or outputs of each layer.
        noisy_bias: whether the biases have the posterior and the prior too.

    >>> import vardrop as vd
    >>> vd.sparse_vd() == vd.Recipe(vd.AdditiveGaussian(), vd.LogUniform())
    True
    """

    posterior: Posterior | None = None
    prior: Prior | None = None
    estimator: Estimator | None = local_reparameterization
    gate: FeatureNoise | None = None
    noisy_bias: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.posterior is None and self.gate is None:
            raise VardropError(
                "Expected `posterior`, `gate`, or both, to be given, but got none. "
                "A recipe without noise changes nothing."
            )
        if self.noisy_bias and self.posterior is None:
            raise VardropError(
                "Expected `posterior` where `noisy_bias` is True, but got None. "
                "Give a posterior, which is what biases are drawn from."
            )
        candidates = (flipout, local_reparameterization)
        for estimator in candidates if self.estimator is None else (self.estimator,):
            check_method(self.posterior, self.prior, estimator)


@dataclass(frozen=True)
class HeadRecipe(BaseRecipe):
    """Noise on classes: a `Head` with this rule instead of the last linear layer.

    Args:
        rule: how the head turns logits into probabilities.

    >>> import vardrop as vd
    >>> vd.dropmax() == vd.HeadRecipe(vd.heads.DropMaxRule())
    True
    """

    rule: ClassRule


@dataclass(frozen=True)
class SwitchDropout(BaseRecipe):
    """The existing dropout of a model, with its rates, as switchable noise.

    Args:
        gate: noise before the layers of a model without dropout. None leaves such a model
            unchanged.

    >>> import vardrop as vd
    >>> vd.mc_dropout(0.1) == vd.SwitchDropout(vd.BinaryDropout(0.1))
    True
    """

    gate: FeatureNoise | None = None
