"""Conversion: plan what becomes noisy (and why not), apply it, take it back, keep it in a file."""

from vardrop.conversion.apply import convert, revert
from vardrop.conversion.plan import Plan, plan
from vardrop.conversion.saving import load_noisy, save_noisy
from vardrop.conversion.selection import Where
from vardrop.conversion.variance import Swap, to_variance

__all__ = [
    "Plan",
    "Swap",
    "Where",
    "convert",
    "load_noisy",
    "plan",
    "revert",
    "save_noisy",
    "to_variance",
]
