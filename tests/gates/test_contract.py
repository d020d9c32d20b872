"""Gates inside layers: their mean folds into the weights, also where units differ."""

import pytest
import torch

import vardrop as vd
from vardrop.testing import LAYERS, RECIPES

FOLDED = [n for n, r in RECIPES.items() if r.gate is not None and not r.gate.input_dependent]


@pytest.mark.parametrize("recipe", FOLDED)
@pytest.mark.parametrize("layer", ["linear", "bilinear", "conv1d", "conv2d_depthwise", "conv2d_reflect", "transposed1d", "transposed2d"])  # fmt: skip
def test_revert_folds_the_mean_of_the_gate(layer: str, recipe: str) -> None:
    case = LAYERS[layer]
    net, inputs = vd.convert(case.make(), RECIPES[recipe]).eval(), case.inputs()
    with torch.no_grad():
        for tensor in net.gate.parameters():  # units that differ
            tensor.add_(0.3 * torch.randn_like(tensor))
        expected, plain = net(*inputs), vd.revert(net)
        assert type(plain) is type(case.make())
        torch.testing.assert_close(plain(*inputs), expected, rtol=1e-4, atol=1e-5)
