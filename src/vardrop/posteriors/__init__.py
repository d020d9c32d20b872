"""Posteriors q(w) over weights: frozen values with pure functions; the layer owns the tensors.

Every posterior answers the same questions about a weight tensor and its noise tensors:

    initial(weight, axes)       the noise tensors that a layer must own
    variance(weight, tensors)   Var w, elementwise
    draw(weight, axes, batch)   standard noise
    deviation(weight, noise, tensors)   w - E w for that noise
    log_alpha(weight, tensors)  log of Var w / (E w)^2
    gaussian, noise_per         what estimators may take for granted
    entropy(weight, tensors)    of each weight, for a Monte-Carlo KL

`weight` is always the posterior mean.
"""

from vardrop.posteriors.base import (
    Axes,
    Noise,
    Posterior,
    Sharing,
    Tensors,
    check_drop_rate,
    check_log_variance,
)
from vardrop.posteriors.bernoulli import Bernoulli
from vardrop.posteriors.gaussian import AdditiveGaussian, MultiplicativeGaussian
from vardrop.posteriors.zero_mean import ZeroMean

__all__ = [
    "AdditiveGaussian",
    "Axes",
    "Bernoulli",
    "MultiplicativeGaussian",
    "Noise",
    "Posterior",
    "Sharing",
    "Tensors",
    "ZeroMean",
    "check_drop_rate",
    "check_log_variance",
]
