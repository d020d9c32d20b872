"""The functions that descriptions may name."""

from __future__ import annotations

from vardrop.experiments import gal, kingma, molchanov, tolerance
from vardrop.experiments.runner import Function

FUNCTIONS: dict[str, Function] = {
    function.__name__: function
    for function in (
        kingma.kl_approximations,
        kingma.gradient_variances,
        kingma.epoch_seconds,
        kingma.width_errors,
        molchanov.sparse_mnist,
        molchanov.random_labels,
        tolerance.noise_tolerance,
        gal.identity,
        gal.toy,
    )
}
