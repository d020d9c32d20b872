"""The contract, each check its own test; the product of all layers and recipes is slow."""

from collections import Counter

import pytest
import torch

import vardrop as vd
from tests.pairs import covering
from vardrop.testing import CHECKS, HEADS, LAYERS, RECIPES, RECURRENT, cases

ALL = RECIPES | RECURRENT
# Compilation takes two thirds of the time, so it runs on fewer pairs.
ROWS = [(c, *pair) for c in CHECKS for pair in covering(2 if c == "compile" else 4)]


@pytest.mark.parametrize("check, layer, recipe", ROWS)
def test_contract(check, layer, recipe):
    CHECKS[check](LAYERS[layer].make, LAYERS[layer].inputs(), ALL[recipe])


@pytest.mark.parametrize("layer, recipe", covering(1))
def test_contract_without_fast_paths(layer, recipe):
    with vd.reference():
        for check in ("noise", "gradients", "stored_noise", "autocast", "kl_is_a_sum"):
            test_contract(check, layer, recipe)


@pytest.mark.slow
@pytest.mark.parametrize("layer, recipe", list(cases()))
def test_the_contract_of_every_pair(layer, recipe):
    for check in CHECKS:
        torch.manual_seed(0)
        test_contract(check, layer, recipe)


def test_every_recipe_is_in_the_table():
    assert ({name.partition("-")[0] for name in ALL | HEADS} - {"own"}) == set(vd.recipes.METHODS)
    kinds = {"BaseRecipe", "HeadRecipe", "Recipe", "SwitchDropout"}
    assert set(vd.recipes.METHODS) == set(vd.recipes.__all__) - kinds


@pytest.mark.parametrize("count", [1, 4])
def test_the_covering_pairs_cover_both_tables(count):
    every, some = list(cases()), covering(count)
    assert set(some) <= set(every)
    for side in (0, 1):
        possible, chosen = (Counter(pair[side] for pair in pairs) for pairs in (every, some))
        assert all(chosen[name] >= min(count, possible[name]) for name in possible)
    assert len(some) <= count * (len(LAYERS) + len(ALL))
