"""The functions that descriptions may name."""

from __future__ import annotations

from experiments import (
    beta_bernoulli,
    dropmax,
    gal,
    kingma,
    louizos,
    molchanov,
    neklyudov,
    ood,
    tolerance,
)
from experiments.runner import Function

FUNCTIONS: dict[str, Function] = {
    function.__name__: function
    for function in (
        kingma.kl_approximations,
        kingma.gradient_variances,
        kingma.epoch_seconds,
        kingma.width_errors,
        molchanov.sparse_mnist,
        molchanov.random_labels,
        beta_bernoulli.sparse_units,
        dropmax.class_heads,
        neklyudov.variance_lenet5,
        neklyudov.parameterisation,
        neklyudov.selective_propagation,
        neklyudov.attacks,
        neklyudov.exploration,
        neklyudov.variance_toys,
        ood.out_of_domain,
        tolerance.noise_tolerance,
        gal.identity,
        gal.toy,
        louizos.packed_bytes,
    )
}
