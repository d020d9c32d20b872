"""The named methods of the papers, each a value composed of public parts.

A recipe says what is noisy (`posterior` on weights, `gate` on features, `head` on classes), against
which prior, and how it is drawn. Combine parts freely:
`Recipe(AdditiveGaussian(), StudentT(3.0), flipout)`.
"""

from vardrop.recipes.classes import (
    class_dropout,
    deterministic_attention,
    dropmax,
    sampled_softmax,
    softmax,
    sparsemax,
)
from vardrop.recipes.features import (
    bayesian_compression,
    beta_bernoulli,
    binary_dropout,
    concrete_dropout,
    dependent_beta_bernoulli,
    l0,
    mc_dropout,
    standout,
    structured_pruning,
)
from vardrop.recipes.recipe import Recipe
from vardrop.recipes.weights import (
    ard,
    bayes_by_backprop,
    dropconnect,
    gaussian_dropout,
    sparse_vd,
    variance_layer,
    variational_dropout,
)

__all__ = [
    "Recipe",
    "ard",
    "bayes_by_backprop",
    "bayesian_compression",
    "beta_bernoulli",
    "binary_dropout",
    "class_dropout",
    "concrete_dropout",
    "dependent_beta_bernoulli",
    "deterministic_attention",
    "dropconnect",
    "dropmax",
    "gaussian_dropout",
    "l0",
    "mc_dropout",
    "sampled_softmax",
    "softmax",
    "sparse_vd",
    "sparsemax",
    "standout",
    "structured_pruning",
    "variance_layer",
    "variational_dropout",
]
