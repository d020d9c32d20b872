"""Posteriors q(w) over weights: frozen values with pure functions. The layer owns the tensors.

Every posterior has the same functions of a weight tensor and its noise tensors:

    initial(weight, axes)       the noise tensors that a layer must own
    variance(weight, tensors)   Var w, elementwise
    draw(weight, axes, batch)   standard noise
    perturbation(weight, noise, tensors)   w - E w for that noise
    log_alpha(weight, tensors)  log of Var w / (E w)^2
    gaussian, noise_per         what estimators may assume
    entropy(weight, tensors)    of each weight, for a Monte-Carlo KL

`weight` is always the posterior mean.
"""

from vardrop.posteriors.base import Axes as Axes, Noise as Noise, Posterior as Posterior
from vardrop.posteriors.base import Sharing as Sharing, Tensors as Tensors
from vardrop.posteriors.base import check_drop_rate as check_drop_rate
from vardrop.posteriors.base import check_log_variance as check_log_variance
from vardrop.posteriors.distributions import *  # noqa: F403 - what it names in __all__ is public
