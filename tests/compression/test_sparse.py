import copy
from functools import partial

import pytest
import torch
from torch import nn

from vardrop.compression import SparseLinear, sparsify
from vardrop.compression.probes import time_interleaved


def sparse_layer(inputs=600, outputs=400, share=0.01, bias=True):
    layer = nn.Linear(inputs, outputs, bias=bias)
    layer.weight.data[torch.rand(outputs, inputs) > share] = 0
    return layer


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(7, 30), (2, 5, 30), (30,)])
def test_sparse_layer_equals_the_dense_one(shape, bias):
    layer = sparse_layer(30, 20, 0.2, bias)
    sparse, x = SparseLinear(layer), torch.randn(shape)
    assert torch.allclose(sparse(x), layer(x), atol=1e-6)
    assert torch.equal(sparse.dense().weight, layer.weight)
    assert torch.allclose(copy.deepcopy(sparse).double()(x.double()).float(), layer(x), atol=1e-6)


def test_csr_is_taken_where_it_wins_and_only_there():
    # 1 % of 400 x 600 against a dense layer too small to gain
    net = nn.Sequential(sparse_layer(), nn.ReLU(), nn.Linear(400, 4))
    fast = sparsify(net, torch.randn(256, 600))
    assert isinstance(fast[0], SparseLinear)
    assert type(fast[2]) is nn.Linear
    x = torch.randn(9, 600)
    assert torch.allclose(fast(x), net(x), atol=1e-5)
    assert type(net[0]) is nn.Linear
    assert type(sparsify(nn.Sequential(nn.Linear(64, 64)), torch.randn(8, 64))[0]) is nn.Linear


def test_never_slower_than_dense():
    net = nn.Sequential(sparse_layer(400, 300, 0.03), nn.ReLU(), sparse_layer(300, 100, 0.2))
    for batch in (1, 32, 256):
        x = torch.randn(batch, 400)
        chosen = sparsify(net, x)
        with torch.no_grad():
            times = time_interleaved({"chosen": partial(chosen, x), "dense": partial(net, x)})
        assert times["chosen"] <= 1.02 * times["dense"] + 1e-6


def test_bare_layer():
    assert isinstance(sparsify(sparse_layer(), torch.randn(256, 600)), SparseLinear)
