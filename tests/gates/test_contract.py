"""The contract of the core, over every gate, on dense layers and convolutions."""

import pytest
import torch

import vardrop as vd
from tests.contract import LAYERS
from vardrop import recipes
from vardrop.testing import CHECKS

RECIPES = {
    "binary_channel": vd.Recipe(gate=vd.BinaryDropout(0.3, "channel", length_scale=0.1)),
    "binary_example": vd.Recipe(gate=vd.BinaryDropout(0.3, "example")),
    "gaussian_channel": vd.Recipe(gate=vd.GaussianDropout(0.5, granularity="channel")),
    "standout": recipes.standout(),
    "mc_dropout": recipes.mc_dropout(0.2, length_scale=0.1),
    "concrete_dropout": recipes.concrete_dropout(),
    "beta_bernoulli": recipes.beta_bernoulli(),
    "dependent_joint": recipes.dependent_beta_bernoulli(joint=True),
    "structured_pruning": recipes.structured_pruning(log_sigma=-1.0),
    "l0": recipes.l0(),
    "bayesian_compression": recipes.bayesian_compression(),
}
NOT_FOLDED = ("standout", "dependent_joint")


TRACED = ("compile", "export")


def run(check: str, layer: str) -> None:
    make, inputs = LAYERS[layer]
    for name, recipe in RECIPES.items():
        if check == "mean_mode" and name in NOT_FOLDED:
            continue  # revert refuses gates that depend on their input: test_conversion
        try:
            CHECKS[check](make, inputs, recipe)
        except Exception as error:
            raise AssertionError(f"{check} fails for {layer} under {name}") from error


@pytest.mark.parametrize("layer", ["linear", "conv2d"])
@pytest.mark.parametrize("check", [c for c in CHECKS if c not in TRACED])
def test_contract(check: str, layer: str) -> None:
    run(check, layer)


@pytest.mark.slow
@pytest.mark.parametrize("layer", ["linear", "conv2d"])
@pytest.mark.parametrize("check", TRACED)
def test_contract_traced(check: str, layer: str) -> None:
    run(check, layer)


@pytest.mark.slow
@pytest.mark.parametrize("layer", [name for name in LAYERS if not name.startswith("embedding")])
@pytest.mark.parametrize("check", [c for c in CHECKS if c not in TRACED])
def test_contract_everywhere(check: str, layer: str) -> None:
    run(check, layer)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_travels_as_json(recipe: str) -> None:
    assert vd.from_json(vd.to_json(RECIPES[recipe])) == RECIPES[recipe]


@pytest.mark.parametrize("recipe", [r for r in RECIPES if r not in NOT_FOLDED])
@pytest.mark.parametrize("layer", ["linear", "bilinear", "conv1d", "conv2d_depthwise", "conv2d_reflect", "transposed1d", "transposed2d"])  # fmt: skip
def test_revert_folds_the_mean_of_the_gate(layer: str, recipe: str) -> None:
    make, inputs = LAYERS[layer]
    net = vd.convert(make(), RECIPES[recipe]).eval()
    with torch.no_grad():
        for tensor in net.gate.parameters():  # units that differ
            tensor.add_(0.3 * torch.randn_like(tensor))
        expected = net(*inputs)
        plain = vd.revert(net)
        assert type(plain) is type(make())
        torch.testing.assert_close(plain(*inputs), expected, rtol=1e-4, atol=1e-5)
