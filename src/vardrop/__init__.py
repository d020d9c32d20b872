"""vardrop: noise that is learned. Dropout as variational inference for PyTorch.

net  = vardrop.convert(net, vardrop.sparse_vd())
elbo = vardrop.ELBO(net, vardrop.Categorical(), num_data=60_000)
elbo(x, y).loss.backward()
"""

import importlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vardrop import recipes

__version__ = "0.2.0"

_WITH_EXTRAS = (
    "vardrop.app.runs",
    "vardrop.app.data",
    "vardrop.compression",
    "vardrop.export",
    "vardrop.tuning",
)  # loaded when they are asked for

# The public names, one per line, and the modules that they come from. Type checkers read them here,
# and so does the package: importing all of them would load every extra.
if TYPE_CHECKING:
    from vardrop import estimators as estimators
    from vardrop import functional as functional
    from vardrop import gates as gates
    from vardrop import heads as heads
    from vardrop import layers as layers
    from vardrop import metrics as metrics
    from vardrop import posteriors as posteriors
    from vardrop import priors as priors
    from vardrop.app.runs import Run as Run
    from vardrop.app.runs import compare_methods as compare_methods
    from vardrop.app.runs import compare_runs as compare_runs
    from vardrop.tuning.distil import distil as distil
    from vardrop.tuning.fine_tune import fine_tune as fine_tune
    from vardrop.tuning import Slimmed as Slimmed
    from vardrop.app.runs.fit import fit as fit
    from vardrop.app.runs import load_run as load_run
    from vardrop.app.runs import resume as resume
    from vardrop.tuning.slim import slim as slim
    from vardrop.compression import choose_threshold as choose_threshold
    from vardrop.export import export_onnx as export_onnx
    from vardrop.export import export_package as export_package
    from vardrop.export import export_program as export_program
    from vardrop.compression import load as load
    from vardrop.compression.pack import pack as pack
    from vardrop.tuning import reestimate_batchnorm as reestimate_batchnorm
    from vardrop.compression.save import save as save
    from vardrop.compression import Shrunk as Shrunk
    from vardrop.compression.shrink import shrink as shrink
    from vardrop.compression import sparsify as sparsify
    from vardrop.compression import unpack as unpack
    from vardrop.conversion import Plan as Plan
    from vardrop.conversion.convert import convert as convert
    from vardrop.conversion import load_noisy as load_noisy
    from vardrop.conversion.plan import plan as plan
    from vardrop.conversion import revert as revert
    from vardrop.conversion.save_noisy import save_noisy as save_noisy
    from vardrop.conversion.to_variance import to_variance as to_variance
    from vardrop.app.data import load_dataset as load_dataset
    from vardrop.app.data import register_dataset as register_dataset
    from vardrop.layers.alpha import alpha_summary as alpha_summary
    from vardrop.prediction.kappa import kappa as kappa
    from vardrop.layers.alpha import sparsity as sparsity
    from vardrop.divergence import kl_divergence as kl_divergence
    from vardrop.divergence import register_kl as register_kl
    from vardrop._core.errors import UnregisteredKLError as UnregisteredKLError
    from vardrop._core.errors import VardropError as VardropError
    from vardrop.estimators import flipout as flipout
    from vardrop.estimators import local_reparameterization as local_reparameterization
    from vardrop.estimators import per_example as per_example
    from vardrop.estimators import weight_sample as weight_sample
    from vardrop.gates import BetaBernoulli as BetaBernoulli
    from vardrop.gates import BinaryDropout as BinaryDropout
    from vardrop.gates import ConcreteDropout as ConcreteDropout
    from vardrop.gates import DependentBetaBernoulli as DependentBetaBernoulli
    from vardrop.gates import Gate as Gate
    from vardrop.gates import GaussianDropout as GaussianDropout
    from vardrop.gates import HardConcrete as HardConcrete
    from vardrop.gates import LogNormal as LogNormal
    from vardrop.gates import NormalJeffreys as NormalJeffreys
    from vardrop.gates import Standout as Standout
    from vardrop.heads import Head as Head
    from vardrop.heads import HeadParts as HeadParts
    from vardrop.layers import Bilinear as Bilinear
    from vardrop.layers import Conv1d as Conv1d
    from vardrop.layers import Conv2d as Conv2d
    from vardrop.layers import Conv3d as Conv3d
    from vardrop.layers import ConvTranspose1d as ConvTranspose1d
    from vardrop.layers import ConvTranspose2d as ConvTranspose2d
    from vardrop.layers import ConvTranspose3d as ConvTranspose3d
    from vardrop.layers import Embedding as Embedding
    from vardrop.layers import Linear as Linear
    from vardrop.layers import RNN as RNN
    from vardrop.layers import LSTM as LSTM
    from vardrop.layers import GRU as GRU
    from vardrop.layers import RNNCell as RNNCell
    from vardrop.layers import LSTMCell as LSTMCell
    from vardrop.layers import GRUCell as GRUCell
    from vardrop.layers import MultiheadAttention as MultiheadAttention
    from vardrop.layers import Variational as Variational
    from vardrop.layers import register_layer as register_layer
    from vardrop.likelihoods import Bernoulli as Bernoulli
    from vardrop.likelihoods import Categorical as Categorical
    from vardrop.likelihoods import Gaussian as Gaussian
    from vardrop.likelihoods import HeteroscedasticGaussian as HeteroscedasticGaussian
    from vardrop.likelihoods import Values as Values
    from vardrop.noisy import NoisyTensor as NoisyTensor
    from vardrop.noisy import Relevance as Relevance
    from vardrop.noisy import kl as kl
    from vardrop.noisy import log_alpha as log_alpha
    from vardrop.noisy import relevance as relevance
    from vardrop.noisy import sampling as sampling
    from vardrop.objective import ELBO as ELBO
    from vardrop.objective.compile import compile as compile
    from vardrop.objective import constant as constant
    from vardrop.objective import cyclical as cyclical
    from vardrop.objective import linear_warmup as linear_warmup
    from vardrop.objective import parameter_groups as parameter_groups
    from vardrop.posteriors import AdditiveGaussian as AdditiveGaussian
    from vardrop.posteriors import MultiplicativeGaussian as MultiplicativeGaussian
    from vardrop.posteriors import ZeroMean as ZeroMean
    from vardrop.prediction import Predictor as Predictor
    from vardrop.prediction import Prediction as Prediction
    from vardrop.prediction import apply_temperature as apply_temperature
    from vardrop.prediction import calibrate as calibrate
    from vardrop.prediction import conformal as conformal
    from vardrop.prediction import draw as draw
    from vardrop.prediction import draws as draws
    from vardrop.prediction import fit_temperature as fit_temperature
    from vardrop.prediction import freeze as freeze
    from vardrop.prediction import predict as predict
    from vardrop.prediction import predict_batches as predict_batches
    from vardrop.priors import ARD as ARD
    from vardrop.priors import LogUniform as LogUniform
    from vardrop.priors import MonteCarlo as MonteCarlo
    from vardrop.priors import Normal as Normal
    from vardrop.priors import ScaleMixture as ScaleMixture
    from vardrop.priors import StudentT as StudentT
    from vardrop.recipes import *
    from vardrop.recipes import register_method as register_method
    from vardrop._core.values import from_json as from_json
    from vardrop._core.values import to_json as to_json

_SOURCE = Path(__file__).read_text(encoding="utf-8")
_FOUND = re.findall(r"^    from (\S+) import (\w+) as", _SOURCE, re.MULTILINE)
_RECIPES = dict.fromkeys(recipes.__all__, "vardrop.recipes")  # type: ignore[attr-defined]
_HOMES = {name: module for module, name in _FOUND} | _RECIPES
__all__ = sorted(_HOMES)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'vardrop' has no attribute {name!r}")
    if _HOMES[name] == "vardrop":  # a module itself
        return importlib.import_module(f"vardrop.{name}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


for _name, _home in _HOMES.items():
    if not _home.startswith(_WITH_EXTRAS):
        globals()[_name] = __getattr__(_name)
