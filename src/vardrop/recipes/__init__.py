"""The named methods of the papers, each a value composed of public parts.

A recipe says what is noisy, against which prior, and how it is drawn: `Recipe` on the weights and
features of layers, `HeadRecipe` on classes, `SwitchDropout` by the dropout that a net has. Combine
parts freely: `Recipe(AdditiveGaussian(), StudentT(3.0), flipout)`.

`METHODS` holds the functions that make them, by name: all that the files here name in `__all__`.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from vardrop._core.errors import VardropError
from vardrop.recipes import classes, features, recipe, weights
from vardrop.recipes.classes import *  # noqa: F403 - what a file names in __all__ is public
from vardrop.recipes.features import *  # noqa: F403
from vardrop.recipes.recipe import *  # noqa: F403
from vardrop.recipes.weights import *  # noqa: F403

_NAMES = sorted([*classes.__all__, *features.__all__, *weights.__all__])
METHODS: dict[str, Callable[..., recipe.BaseRecipe]] = {name: globals()[name] for name in _NAMES}


def register_method(name: str, make: Callable[..., recipe.BaseRecipe]) -> None:
    """Make a recipe of your own known by a name, as a method of the command line and of reports.

    Args:
        name: how it is asked for; no name that is taken.
        make: gives the recipe; its arguments, all with defaults, are the options of the method.

    >>> import vardrop as vd
    >>> vd.register_method("wide", lambda std=3.0: vd.bayes_by_backprop(prior=vd.Normal(std=std)))
    >>> vd.recipes.METHODS.pop("wide")().prior.std  # and it is taken out again
    3.0
    """
    if not isinstance(name, str) or not name or name in (*METHODS, *_WORDS):
        raise VardropError(f"Expected `name` to be a text that is not taken, but got {name!r}.")
    try:
        found = make()
    except TypeError as misfit:
        raise VardropError(
            f"Expected `make` to be a function that gives a recipe without arguments, but got: "
            f"{misfit}. Give them defaults."
        ) from misfit
    if not isinstance(found, recipe.BaseRecipe):
        raise VardropError(f"Expected `make` to give a recipe, but got {found!r}.")
    METHODS[name] = make


_WORDS = ("none", "auto")  # that mean something else where a method is named

if not TYPE_CHECKING:  # who would take a list that is no literal for an empty one
    __all__ = [*recipe.__all__, *_NAMES]  # noqa: PLE0604
