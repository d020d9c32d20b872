"""vardrop: Bayesian neural networks and model compression for PyTorch, through learned dropout.

net  = vardrop.convert(net, vardrop.sparse_vd())
elbo = vardrop.ELBO(net, vardrop.Categorical(), num_data=60_000)
elbo(x, y).loss.backward()
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

from vardrop import estimators as estimators, functional as functional, gates as gates
from vardrop import heads as heads, layers as layers, metrics as metrics, posteriors as posteriors
from vardrop import priors as priors
from vardrop._core.errors import UnregisteredKLError as UnregisteredKLError
from vardrop._core.errors import VardropError as VardropError
from vardrop._core.values import from_json as from_json, to_json as to_json
from vardrop.conversion import Plan as Plan, load_noisy as load_noisy, revert as revert
from vardrop.conversion.convert import convert as convert
from vardrop.conversion.plan import plan as plan
from vardrop.conversion.save_noisy import save_noisy as save_noisy
from vardrop.divergence import kl_divergence as kl_divergence, register_kl as register_kl
from vardrop.estimators import flipout as flipout
from vardrop.estimators import local_reparameterization as local_reparameterization
from vardrop.estimators import per_example as per_example, weight_sample as weight_sample
from vardrop.functional.fast.switch import reference as reference
from vardrop.gates import BetaBernoulli as BetaBernoulli, BinaryDropout as BinaryDropout
from vardrop.gates import ConcreteDropout as ConcreteDropout
from vardrop.gates import DependentBetaBernoulli as DependentBetaBernoulli, Gate as Gate
from vardrop.gates import GaussianDropout as GaussianDropout, HardConcrete as HardConcrete
from vardrop.gates import LogNormal as LogNormal, NormalJeffreys as NormalJeffreys
from vardrop.gates import Standout as Standout
from vardrop.heads import Head as Head, HeadParts as HeadParts
from vardrop.layers import GRU as GRU, LSTM as LSTM, RNN as RNN, Bilinear as Bilinear
from vardrop.layers import Conv1d as Conv1d, Conv2d as Conv2d, Conv3d as Conv3d
from vardrop.layers import ConvTranspose1d as ConvTranspose1d, ConvTranspose2d as ConvTranspose2d
from vardrop.layers import ConvTranspose3d as ConvTranspose3d, Embedding as Embedding
from vardrop.layers import GRUCell as GRUCell, LSTMCell as LSTMCell, Linear as Linear
from vardrop.layers import MultiheadAttention as MultiheadAttention, RNNCell as RNNCell
from vardrop.layers import Variational as Variational, register_layer as register_layer
from vardrop.layers.alpha import alpha_summary as alpha_summary, sparsity as sparsity
from vardrop.likelihoods import Bernoulli as Bernoulli, Categorical as Categorical
from vardrop.likelihoods import Gaussian as Gaussian
from vardrop.likelihoods import HeteroscedasticGaussian as HeteroscedasticGaussian, Values as Values
from vardrop.noisy import NoisyTensor as NoisyTensor, Relevance as Relevance, kl as kl
from vardrop.noisy import log_alpha as log_alpha, relevance as relevance, sampling as sampling
from vardrop.objective import ELBO as ELBO, constant as constant
from vardrop.objective import cyclical as cyclical, linear_warmup as linear_warmup
from vardrop.objective import parameter_groups as parameter_groups
from vardrop.objective.compile import compile as compile
from vardrop.posteriors import AdditiveGaussian as AdditiveGaussian
from vardrop.posteriors import MultiplicativeGaussian as MultiplicativeGaussian
from vardrop.posteriors import ZeroMean as ZeroMean
from vardrop.prediction import Ensemble as Ensemble, FeatureDistance as FeatureDistance
from vardrop.prediction import Prediction as Prediction, Predictor as Predictor
from vardrop.prediction import apply_temperature as apply_temperature, calibrate as calibrate
from vardrop.prediction import draw as draw, draws as draws
from vardrop.prediction import fit_temperature as fit_temperature, freeze as freeze
from vardrop.prediction import predict_batches as predict_batches
from vardrop.prediction.conformal import conformal as conformal
from vardrop.prediction.kappa import kappa as kappa
from vardrop.prediction.predict import predict as predict
from vardrop.priors import ARD as ARD, LogUniform as LogUniform, MonteCarlo as MonteCarlo
from vardrop.priors import Normal as Normal, ScaleMixture as ScaleMixture, StudentT as StudentT
from vardrop.recipes import register_recipe as register_recipe
from vardrop.recipes import *

if TYPE_CHECKING:
    from vardrop.app.data import load_dataset as load_dataset, register_dataset as register_dataset
    from vardrop.app.report import compare_runs as compare_runs
    from vardrop.app.runs import Run as Run, compare_methods as compare_methods
    from vardrop.app.runs import load_run as load_run, resume as resume
    from vardrop.app.runs.fit import fit as fit
    from vardrop.compression import Shrunk as Shrunk, choose_threshold as choose_threshold
    from vardrop.compression import load as load, unpack as unpack
    from vardrop.compression.pack import pack as pack
    from vardrop.compression.save import save as save
    from vardrop.compression.shrink import shrink as shrink
    from vardrop.export import export_onnx as export_onnx, export_program as export_program
    from vardrop.tuning import Slimmed as Slimmed, reestimate_batchnorm as reestimate_batchnorm
    from vardrop.tuning.distil import distil as distil
    from vardrop.tuning.fine_tune import fine_tune as fine_tune
    from vardrop.tuning.slim import slim as slim

__version__ = "0.3.0"
_LAZY = {  # they need extras, so they are imported when they are used
    "vardrop.app.data": "load_dataset register_dataset",
    "vardrop.app.report": "compare_runs",
    "vardrop.app.runs": "Run compare_methods load_run resume",
    "vardrop.app.runs.fit": "fit",
    "vardrop.compression": "Shrunk choose_threshold load unpack",
    "vardrop.compression.pack": "pack",
    "vardrop.compression.save": "save",
    "vardrop.compression.shrink": "shrink",
    "vardrop.export": "export_onnx export_program",
    "vardrop.tuning": "Slimmed reestimate_batchnorm",
    "vardrop.tuning.distil": "distil",
    "vardrop.tuning.fine_tune": "fine_tune",
    "vardrop.tuning.slim": "slim",
}
_HOMES = {name: home for home, names in _LAZY.items() for name in names.split()}
_MODULES = {estimators, functional, gates, heads, layers, metrics, posteriors, priors}


_HELPERS = {"TYPE_CHECKING", "Any", "ModuleType"}
_NAMES = [n for n, v in globals().items() if not isinstance(v, ModuleType) or v in _MODULES]
__all__ = sorted({n for n in (*_NAMES, *_HOMES) if n[0] != "_"} - _HELPERS)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'vardrop' has no attribute {name!r}")
    return globals().setdefault(name, getattr(importlib.import_module(_HOMES[name]), name))


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
