"""The named methods of the papers. Each is a value composed of public parts.

`Recipe` puts noise on the weights and features of layers, `HeadRecipe` on classes, and
`SwitchDropout` uses the existing dropout of a model. Parts can be combined freely:
`Recipe(AdditiveGaussian(), StudentT(3.0), flipout)`.

`METHODS` holds the functions that make recipes, by name: every public function that is defined in
`weights.py`, `features.py` or `classes.py`.
"""

from collections.abc import Callable
from inspect import getmembers, isfunction
from typing import TYPE_CHECKING

from vardrop._core.errors import VardropError
from vardrop.recipes import classes, features, weights
from vardrop.recipes.classes import *  # noqa: F403
from vardrop.recipes.features import *  # noqa: F403
from vardrop.recipes.recipe import BaseRecipe as BaseRecipe, HeadRecipe as HeadRecipe
from vardrop.recipes.recipe import Recipe as Recipe, SwitchDropout as SwitchDropout
from vardrop.recipes.weights import *  # noqa: F403

_defined = {
    name: make
    for module in (classes, features, weights)
    for name, make in getmembers(module, isfunction)
    if make.__module__ == module.__name__ and not name.startswith("_")
}
METHODS: dict[str, Callable[..., BaseRecipe]] = dict(sorted(_defined.items()))


def register_recipe(name: str, make: Callable[..., BaseRecipe]) -> None:
    """Register a custom recipe under a name, for the command line and for reports.

    Args:
        name: a name that is not yet used.
        make: returns the recipe. Its arguments are the options of the method, and all of them have
            defaults.

    >>> import vardrop as vd
    >>> vd.register_recipe("wide", lambda std=3.0: vd.bayes_by_backprop(prior=vd.Normal(std=std)))
    >>> vd.recipes.METHODS.pop("wide")().prior.std  # pop removes it again
    3.0
    """
    # "none" and "auto" have another meaning on the command line.
    if not isinstance(name, str) or not name or name in (*METHODS, "none", "auto"):
        raise VardropError(f"Expected `name` to be a text that is not taken, but got {name!r}.")
    try:
        recipe = make()
    except TypeError as error:
        raise VardropError(
            f"Expected `make` to be a function that gives a recipe without arguments, but got: "
            f"{error}. Give them defaults."
        ) from error
    if not isinstance(recipe, BaseRecipe):
        raise VardropError(f"Expected `make` to give a recipe, but got {recipe!r}.")
    METHODS[name] = make


if not TYPE_CHECKING:  # mypy does not read a computed list
    __all__ = ["BaseRecipe", "HeadRecipe", "Recipe", "SwitchDropout", *sorted(METHODS)]  # noqa: PLE0604
