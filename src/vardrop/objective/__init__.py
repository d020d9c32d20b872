"""The objective: likelihoods, the ELBO, schedules for beta, parameter groups, a compiled step."""

from vardrop.likelihoods import (
    Bernoulli as Bernoulli,
    Categorical as Categorical,
    Gaussian as Gaussian,
    HeteroscedasticGaussian as HeteroscedasticGaussian,
)
from vardrop.objective.compile import compile as compile
from vardrop.objective.elbo import (
    ELBO as ELBO,
    ELBOParts as ELBOParts,
)
from vardrop.objective.schedules import (
    constant as constant,
    cyclical as cyclical,
    linear_warmup as linear_warmup,
    parameter_groups as parameter_groups,
)
