"""Noise on features: multiplicative gates on units and channels."""

from vardrop.gates.base import FeatureNoise, Gate
from vardrop.gates.binary import BinaryDropout
from vardrop.gates.gaussian import GaussianDropout

__all__ = ["BinaryDropout", "FeatureNoise", "Gate", "GaussianDropout"]
