"""Conversion: plan what becomes noisy (and why not), apply it in place, take it back."""

from vardrop.conversion.apply import convert, revert
from vardrop.conversion.plan import Plan, Where, plan

__all__ = ["Plan", "Where", "convert", "plan", "revert"]
