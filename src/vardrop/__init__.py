"""vardrop: noise that is learned. Dropout as variational inference for PyTorch.

net  = vardrop.convert(net, vardrop.sparse_vd())
elbo = vardrop.ELBO(net, vardrop.Categorical(), num_data=60_000)
elbo(x, y).loss.backward()
"""

from vardrop import estimators, functional, gates, layers, metrics, posteriors, priors
from vardrop.conversion import Plan, convert, plan, revert
from vardrop.divergence import kl_divergence, register_kl
from vardrop.errors import UnregisteredKLError, VardropError
from vardrop.estimators import (
    flipout,
    local_reparameterization,
    per_example,
    weight_sample,
)
from vardrop.gates import BinaryDropout, Gate, GaussianDropout
from vardrop.layers import (
    Bilinear,
    Conv1d,
    Conv2d,
    Conv3d,
    ConvTranspose1d,
    ConvTranspose2d,
    ConvTranspose3d,
    Embedding,
    Linear,
)
from vardrop.noisy import kl, log_alpha, sampling
from vardrop.objective import (
    ELBO,
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    constant,
    cyclical,
    linear_warmup,
    parameter_groups,
)
from vardrop.posteriors import AdditiveGaussian, MultiplicativeGaussian, ZeroMean
from vardrop.priors import ARD, LogUniform, MonteCarlo, Normal, ScaleMixture, StudentT
from vardrop.recipes import (
    Recipe,
    ard,
    bayes_by_backprop,
    binary_dropout,
    dropconnect,
    gaussian_dropout,
    sparse_vd,
    variance_layer,
    variational_dropout,
)
from vardrop.values import from_json, to_json

__version__ = "0.1.0"

__all__ = [
    "ARD",
    "ELBO",
    "AdditiveGaussian",
    "Bernoulli",
    "Bilinear",
    "BinaryDropout",
    "Categorical",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "Embedding",
    "Gate",
    "Gaussian",
    "GaussianDropout",
    "HeteroscedasticGaussian",
    "Linear",
    "LogUniform",
    "MonteCarlo",
    "MultiplicativeGaussian",
    "Normal",
    "Plan",
    "Recipe",
    "ScaleMixture",
    "StudentT",
    "UnregisteredKLError",
    "VardropError",
    "ZeroMean",
    "ard",
    "bayes_by_backprop",
    "binary_dropout",
    "constant",
    "convert",
    "cyclical",
    "dropconnect",
    "estimators",
    "flipout",
    "from_json",
    "functional",
    "gates",
    "gaussian_dropout",
    "kl",
    "kl_divergence",
    "layers",
    "linear_warmup",
    "local_reparameterization",
    "log_alpha",
    "metrics",
    "parameter_groups",
    "per_example",
    "plan",
    "posteriors",
    "priors",
    "register_kl",
    "revert",
    "sampling",
    "sparse_vd",
    "to_json",
    "variance_layer",
    "variational_dropout",
    "weight_sample",
]
