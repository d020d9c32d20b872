"""Dense layers of other libraries, which are no `nn.Linear`."""

import pytest
import torch
from torch import nn

import vardrop as vd
from tests.nets import reload
from tests.zoo.sequences import GraphLinear
from vardrop.testing import check_layer


class ScaledLinear(GraphLinear):
    def forward(self, x):
        return super().forward(2 * x)


RECIPES = [vd.sparse_vd(), vd.bayesian_compression(), vd.concrete_dropout()]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_dense_layer_of_another_library_keeps_the_contract(recipe):
    check_layer(lambda: GraphLinear(4, 3, bias=True), (torch.randn(5, 4),), recipe)


def test_it_is_saved_and_reverted(tmp_path):
    layer, x = GraphLinear(4, 3), torch.randn(5, 4)
    before = layer(x)
    vd.convert(layer, vd.bayes_by_backprop()).eval()
    assert isinstance(layer, vd.layers.LinearLike)
    assert torch.equal(layer(x), before)
    assert torch.equal(reload(layer, GraphLinear(4, 3), tmp_path).eval()(x), before)
    assert type(vd.revert(layer)) is GraphLinear


def test_a_layer_that_computes_something_else_is_not_claimed():
    plan = vd.plan(nn.Sequential(ScaledLinear(4, 3), nn.Linear(3, 2)), vd.sparse_vd())
    assert ([s.name for s in plan.changes], [s.name for s in plan.skips]) == (["1"], ["0"])
