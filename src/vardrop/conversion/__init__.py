"""Conversion: plan what becomes noisy (and why not), apply it, take it back, keep it in a file."""

from vardrop.conversion.convert import convert as convert, revert as revert
from vardrop.conversion.plan import Plan as Plan, plan as plan
from vardrop.conversion.save_noisy import (
    contents as contents,
    is_description as is_description,
    load_noisy as load_noisy,
    noise_names as noise_names,
    restore as restore,
    save_noisy as save_noisy,
)
from vardrop.conversion.selection import Selection as Selection
from vardrop.conversion.to_variance import Swap as Swap, to_variance as to_variance
