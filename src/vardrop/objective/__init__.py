"""The objective: likelihoods, the ELBO, schedules of beta, parameter groups, a compiled step."""

from vardrop.likelihoods import Bernoulli as Bernoulli, Categorical as Categorical
from vardrop.likelihoods import Gaussian as Gaussian
from vardrop.likelihoods import HeteroscedasticGaussian as HeteroscedasticGaussian
from vardrop.objective.compile import compile as compile
from vardrop.objective.elbo import ELBO as ELBO, ELBOParts as ELBOParts
from vardrop.objective.schedules import constant as constant, cyclical as cyclical
from vardrop.objective.schedules import linear_warmup as linear_warmup
from vardrop.objective.schedules import parameter_groups as parameter_groups
