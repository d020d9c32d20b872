"""vardrop: noise that is learned. Dropout as variational inference for PyTorch.

net  = vardrop.convert(net, vardrop.sparse_vd())
elbo = vardrop.ELBO(net, vardrop.Categorical(), num_data=60_000)
elbo(x, y).loss.backward()
"""

import importlib
import re
from pathlib import Path
from typing import Any

from vardrop import recipes

__version__ = "0.2.0"

_WITH_EXTRAS = (
    "vardrop.app.runs",
    "vardrop.app.data",
    "vardrop.compression",
    "vardrop.export",
    "vardrop.tuning",
)  # loaded when they are asked for

# The public names by the modules that they come from. They are written once, in __init__.pyi, where
# type checkers read them too; the recipes name theirs.
_STUB = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
_FOUND = re.findall(r"^from (\S+) import (\w+) as", _STUB, re.MULTILINE)
_RECIPES = dict.fromkeys(recipes.__all__, "vardrop.recipes")
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
    if _home not in _WITH_EXTRAS:
        globals()[_name] = __getattr__(_name)
