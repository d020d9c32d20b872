"""The objective: likelihoods, the ELBO, schedules for beta, parameter groups, a compiled step."""

from vardrop.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
)
from vardrop.objective.compiled import compile
from vardrop.objective.elbo import ELBO, ELBOParts
from vardrop.objective.groups import parameter_groups
from vardrop.objective.schedules import constant, cyclical, linear_warmup

__all__ = [
    "ELBO",
    "Bernoulli",
    "Categorical",
    "ELBOParts",
    "Gaussian",
    "HeteroscedasticGaussian",
    "compile",
    "constant",
    "cyclical",
    "linear_warmup",
    "parameter_groups",
]
