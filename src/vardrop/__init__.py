"""vardrop: noise that is learned. Dropout as variational inference for PyTorch.

net  = vardrop.convert(net, vardrop.sparse_vd())
elbo = vardrop.ELBO(net, vardrop.Categorical(), num_data=60_000)
elbo(x, y).loss.backward()
"""

import importlib
from typing import TYPE_CHECKING, Any

from vardrop import estimators, functional, gates, heads, layers, metrics, posteriors, priors
from vardrop import recipes
from vardrop.conversion import (
    Plan, convert, load_noisy, plan, revert, save_noisy, to_variance,
)  # fmt: skip
from vardrop.divergence import (
    kl_divergence, register_kl,
)  # fmt: skip
from vardrop.errors import (
    UnregisteredKLError, VardropError,
)  # fmt: skip
from vardrop.estimators import (
    flipout, local_reparameterization, per_example, weight_sample,
)  # fmt: skip
from vardrop.gates import (
    BetaBernoulli, BinaryDropout, ConcreteDropout, DependentBetaBernoulli, Gate, GaussianDropout,
    HardConcrete, LogNormal, NormalJeffreys, Standout,
)  # fmt: skip
from vardrop.heads import (
    ClassDropout, DeterministicAttention, DropMax, Head, HeadParts, SampledSoftmax, Softmax,
    Sparsemax,
)  # fmt: skip
from vardrop.layers import (
    Bilinear, Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d,
    Embedding, Linear,
)  # fmt: skip
from vardrop.likelihoods import (
    Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, Values,
)  # fmt: skip
from vardrop.noisy import (
    Relevance, kl, log_alpha, relevance, sampling,
)  # fmt: skip
from vardrop.objective import (
    ELBO, compile, constant, cyclical, linear_warmup, parameter_groups,
)  # fmt: skip
from vardrop.posteriors import (
    AdditiveGaussian, MultiplicativeGaussian, ZeroMean,
)  # fmt: skip
from vardrop.priors import (
    ARD, LogUniform, MonteCarlo, Normal, ScaleMixture, StudentT,
)  # fmt: skip
from vardrop.recipes import *  # noqa: F403 - its __all__ is public here too
from vardrop.values import (
    from_json, to_json,
)  # fmt: skip

if TYPE_CHECKING:
    from vardrop.application import (
        Run, fit, load_run,
    )  # fmt: skip
    from vardrop.compression import (
        choose_threshold, compare, export_onnx, export_program, fine_tune, load, pack,
        plan_shrink, reestimate_batchnorm, save, shrink, sparsify, unpack,
    )  # fmt: skip
    from vardrop.diagnostics import (  # type: ignore[no-redef]
        alpha_summary, gradient_variance, kappa, likelihood_covariance, noise_level,
        permutation_test, permute_variances, sparsity, transition,
    )  # fmt: skip
    from vardrop.prediction import (
        Prediction, apply_temperature, conformal, distil, draw, draws, fit_temperature, predict,
    )  # fmt: skip

__version__ = "0.1.0"

# Verbs that `import vardrop` does not load until they are asked for.
_LAZY = {
    "vardrop.application": (
        "Run", "fit", "load_run",
    ),
    "vardrop.compression": (
        "choose_threshold", "compare", "export_onnx", "export_program", "fine_tune", "load",
        "pack", "plan_shrink", "reestimate_batchnorm", "save", "shrink", "sparsify", "unpack",
    ),
    "vardrop.diagnostics": (
        "alpha_summary", "gradient_variance", "kappa", "likelihood_covariance", "noise_level",
        "permutation_test", "permute_variances", "sparsity", "transition",
    ),
    "vardrop.prediction": (
        "Prediction", "apply_temperature", "conformal", "distil", "draw", "draws",
        "fit_temperature", "predict",
    ),
}  # fmt: skip
_ROOM = {name: room for room, names in _LAZY.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "report":  # not in __all__: it needs matplotlib
        return importlib.import_module("vardrop.report")
    if name in _ROOM:
        return getattr(importlib.import_module(_ROOM[name]), name)
    raise AttributeError(f"module 'vardrop' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "ARD", "AdditiveGaussian", "Bernoulli", "BetaBernoulli", "Bilinear", "BinaryDropout",
    "Categorical", "ClassDropout", "ConcreteDropout", "Conv1d", "Conv2d", "Conv3d",
    "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d", "DependentBetaBernoulli",
    "DeterministicAttention", "DropMax", "ELBO", "Embedding", "Gate", "Gaussian", "GaussianDropout",
    "HardConcrete", "Head", "HeadParts", "HeteroscedasticGaussian", "Linear", "LogNormal",
    "LogUniform", "MonteCarlo", "MultiplicativeGaussian", "Normal", "NormalJeffreys", "Plan",
    "Prediction", "Relevance", "Run", "SampledSoftmax", "ScaleMixture", "Softmax", "Sparsemax",
    "Standout", "StudentT", "UnregisteredKLError", "Values", "VardropError", "ZeroMean",
    "alpha_summary", "apply_temperature", "choose_threshold", "compare", "compile", "conformal",
    "constant", "convert", "cyclical", "distil", "draw", "draws", "estimators",
    "export_onnx", "export_program",
    "fine_tune", "fit", "fit_temperature", "flipout", "from_json", "functional", "gates",
    "gradient_variance", "heads", "kappa", "kl", "kl_divergence", "layers", "likelihood_covariance",
    "linear_warmup", "load", "load_noisy", "load_run", "local_reparameterization", "log_alpha",
    "metrics", "noise_level", "pack", "parameter_groups", "per_example", "permutation_test",
    "permute_variances", "plan", "plan_shrink", "posteriors", "predict", "priors",
    "reestimate_batchnorm", "register_kl", "relevance", "revert", "sampling", "save", "save_noisy",
    "shrink", "sparsify", "sparsity", "to_json", "to_variance", "transition", "unpack",
    "weight_sample",
]  # fmt: skip
__all__ += recipes.__all__
