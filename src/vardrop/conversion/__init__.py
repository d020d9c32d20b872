"""Conversion: plan which modules become noisy, convert a model, revert it, store it in a file."""

from vardrop.conversion.convert import convert as convert, revert as revert
from vardrop.conversion.plan import Plan as Plan, Selection as Selection, plan as plan
from vardrop.conversion.save_noisy import contents as contents, is_description as is_description
from vardrop.conversion.save_noisy import load_noisy as load_noisy, noise_names as noise_names
from vardrop.conversion.save_noisy import restore as restore, save_noisy as save_noisy
