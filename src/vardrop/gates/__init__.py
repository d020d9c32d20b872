"""Noise on features: multiplicative gates on units and channels."""

from vardrop.gates.base import FeatureNoise as FeatureNoise, Gate as Gate, Side as Side
from vardrop.gates.base import per_unit as per_unit
from vardrop.gates.beta_bernoulli import BetaBernoulli as BetaBernoulli
from vardrop.gates.beta_bernoulli import DependentBetaBernoulli as DependentBetaBernoulli
from vardrop.gates.binary import BinaryDropout as BinaryDropout, Standout as Standout
from vardrop.gates.concrete import ConcreteDropout as ConcreteDropout, HardConcrete as HardConcrete
from vardrop.gates.find_dropout import controls_only_dropout as controls_only_dropout
from vardrop.gates.find_dropout import find_functional_dropout as find_functional_dropout
from vardrop.gates.find_dropout import find_unswitched_dropout as find_unswitched_dropout
from vardrop.gates.functional_dropout import drop_rate as drop_rate, is_switchable as is_switchable
from vardrop.gates.functional_dropout import functional_dropout_rates as functional_dropout_rates
from vardrop.gates.functional_dropout import (
    register_functional_dropout as register_functional_dropout,
)
from vardrop.gates.gaussian import GaussianDropout as GaussianDropout
from vardrop.gates.gaussian import NormalJeffreys as NormalJeffreys
from vardrop.gates.log_normal import LogNormal as LogNormal
from vardrop.gates.switchable_dropout import DROPOUT_TYPES as DROPOUT_TYPES
from vardrop.gates.switchable_dropout import AlphaDropout as AlphaDropout, Dropout as Dropout
from vardrop.gates.switchable_dropout import Dropout1d as Dropout1d, Dropout2d as Dropout2d
from vardrop.gates.switchable_dropout import FeatureAlphaDropout as FeatureAlphaDropout
from vardrop.gates.switchable_dropout import SwitchableDropout as SwitchableDropout
from vardrop.gates.switchable_dropout import Dropout3d as Dropout3d, SwitchedMode as SwitchedMode
from vardrop.gates.switchable_dropout import switched_class as switched_class
