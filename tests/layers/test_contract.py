"""Every check of the contract, on every layer under every recipe: each its own test."""

import pytest

from vardrop import recipes
from vardrop.testing import CHECKS, HEADS, LAYERS, RECIPES, RECURRENT, cases

ALL = RECIPES | RECURRENT
# Graph capture costs a second: one layer per family always, the whole table in the slow run.
TRACED = {"compile", "export"}
QUICK = {"linear", "conv2d", "embedding", "transposed2d", "self_attention"}
GATED_QUICK = {"linear", "conv2d", "self_attention", "lstm"}


def is_slow(check, layer, recipe):
    if ALL[recipe].gate is None:
        return check in TRACED and layer not in QUICK
    return check in TRACED or layer not in GATED_QUICK


def rows():
    for layer, recipe in cases():
        for check in CHECKS:
            marks = [pytest.mark.slow] if is_slow(check, layer, recipe) else []
            yield pytest.param(check, layer, recipe, id=f"{check}-{layer}-{recipe}", marks=marks)


@pytest.mark.parametrize("check, layer, recipe", list(rows()))
def test_contract(check, layer, recipe):
    case = LAYERS[layer]
    CHECKS[check](case.make, case.inputs(), ALL[recipe])


def test_every_recipe_is_in_the_table():
    named = {name.partition("-")[0] for name in ALL | HEADS} - {"own"}
    assert named == set(recipes.METHODS)
    kinds = {"BaseRecipe", "HeadRecipe", "Recipe", "SwitchDropout"}
    assert set(recipes.METHODS) == set(recipes.__all__) - kinds
