"""Noise on features: multiplicative gates on units and channels."""

from vardrop.gates.base import (
    FeatureNoise as FeatureNoise,
    Gate as Gate,
    Side as Side,
)
from vardrop.gates.beta_bernoulli import BetaBernoulli as BetaBernoulli
from vardrop.gates.binary import BinaryDropout as BinaryDropout, Standout as Standout
from vardrop.gates.concrete import ConcreteDropout as ConcreteDropout
from vardrop.gates.dependent import DependentBetaBernoulli as DependentBetaBernoulli
from vardrop.gates.gaussian import GaussianDropout as GaussianDropout
from vardrop.gates.hard_concrete import HardConcrete as HardConcrete
from vardrop.gates.log_normal import LogNormal as LogNormal
from vardrop.gates.normal_jeffreys import NormalJeffreys as NormalJeffreys
from vardrop.gates.functional_dropout import (
    SwitchedMode as SwitchedMode,
    drop_rate as drop_rate,
    handed_on as handed_on,
    own_functions as own_functions,
    own_rates as own_rates,
    rates_beside_mode as rates_beside_mode,
    switchable as switchable,
    switched as switched,
)
from vardrop.gates.switchable_dropout import (
    DROPOUT_TYPES as DROPOUT_TYPES,
    AlphaDropout as AlphaDropout,
    Dropout as Dropout,
    Dropout1d as Dropout1d,
    Dropout2d as Dropout2d,
    Dropout3d as Dropout3d,
    FeatureAlphaDropout as FeatureAlphaDropout,
    SwitchableDropout as SwitchableDropout,
)
