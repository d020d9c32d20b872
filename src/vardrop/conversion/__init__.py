"""Conversion: plan what becomes noisy (and why not), apply it in place, take it back."""

from vardrop.conversion.apply import convert, revert
from vardrop.conversion.plan import Plan, plan
from vardrop.conversion.selection import Where
from vardrop.conversion.variance import Swap, to_variance

__all__ = ["Plan", "Swap", "Where", "convert", "plan", "revert", "to_variance"]
