import pytest

from tests.contract import GATE_RECIPES, LAYERS, WEIGHT_RECIPES
from vardrop.testing import CHECKS

RECIPES = WEIGHT_RECIPES | GATE_RECIPES
# Graph capture costs a second a pair: one layer a family always, the whole table in the slow run.
TRACED = {"compile", "export"}
QUICK = {"linear", "conv2d", "embedding", "transposed2d"}


def rows(slow):
    for layer in LAYERS:
        for check in CHECKS:
            if slow == (check in TRACED and layer not in QUICK):
                yield pytest.param(check, layer, id=f"{check}-{layer}")


def run(check, layer):
    make, inputs = LAYERS[layer]
    for name, recipe in RECIPES.items():
        if recipe.gate is not None and layer.startswith("embedding"):
            continue
        try:
            CHECKS[check](make, inputs, recipe)
        except Exception as error:
            raise AssertionError(f"{check} fails for {layer} under {name}") from error


@pytest.mark.parametrize("check, layer", list(rows(slow=False)))
def test_contract(check, layer):
    run(check, layer)


@pytest.mark.slow
@pytest.mark.parametrize("check, layer", list(rows(slow=True)))
def test_contract_traced(check, layer):
    run(check, layer)
