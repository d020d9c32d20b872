"""Noise on features: multiplicative gates on units and channels."""

from vardrop.gates.base import FeatureNoise, Gate, Side
from vardrop.gates.beta_bernoulli import BetaBernoulli
from vardrop.gates.binary import BinaryDropout
from vardrop.gates.concrete import ConcreteDropout
from vardrop.gates.dependent import DependentBetaBernoulli
from vardrop.gates.existing import (
    DROPOUT_TYPES,
    AlphaDropout,
    Dropout,
    Dropout1d,
    Dropout2d,
    Dropout3d,
    FeatureAlphaDropout,
    SwitchableDropout,
)
from vardrop.gates.gaussian import GaussianDropout
from vardrop.gates.hard_concrete import HardConcrete
from vardrop.gates.log_normal import LogNormal
from vardrop.gates.normal_jeffreys import NormalJeffreys
from vardrop.gates.standout import Standout

__all__ = [
    "DROPOUT_TYPES",
    "AlphaDropout",
    "BetaBernoulli",
    "BinaryDropout",
    "ConcreteDropout",
    "DependentBetaBernoulli",
    "Dropout",
    "Dropout1d",
    "Dropout2d",
    "Dropout3d",
    "FeatureAlphaDropout",
    "FeatureNoise",
    "Gate",
    "GaussianDropout",
    "HardConcrete",
    "LogNormal",
    "NormalJeffreys",
    "Side",
    "Standout",
    "SwitchableDropout",
]
