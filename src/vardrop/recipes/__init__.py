"""The named methods of the papers, each a value composed of public parts.

A recipe says what is noisy, against which prior, and how it is drawn: `Recipe` on the weights and
features of layers, `HeadRecipe` on classes, `SwitchDropout` by the dropout that a net has. Combine
parts freely: `Recipe(AdditiveGaussian(), StudentT(3.0), flipout)`.

`METHODS` holds the functions that make them, by name: all that the files here name in `__all__`.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from vardrop.recipes import classes, features, recipe, weights
from vardrop.recipes.classes import *  # noqa: F403 - what a file names in __all__ is public
from vardrop.recipes.features import *  # noqa: F403
from vardrop.recipes.recipe import *  # noqa: F403
from vardrop.recipes.weights import *  # noqa: F403

_NAMES = sorted([*classes.__all__, *features.__all__, *weights.__all__])
METHODS: dict[str, Callable[..., recipe.BaseRecipe]] = {name: globals()[name] for name in _NAMES}

if not TYPE_CHECKING:  # who would take a list that is no literal for an empty one
    __all__ = [*recipe.__all__, *_NAMES]  # noqa: PLE0604
