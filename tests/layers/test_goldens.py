"""Stored float64 values of every layer under every recipe: a redesign must not move them.

Compared on every commit for the covering pairs, in the slow run for all.

`python -m tests.layers.test_goldens` adds what is missing, of a new layer or recipe; take out a line
first where its value was wrong.
"""

import json
import math
from functools import cache
from pathlib import Path

import pytest
import torch

import vardrop as vd
from tests.pairs import PAIRS
from vardrop.testing import LAYERS, RECIPES, RECURRENT, cases

FILE = Path(__file__).with_name("goldens.json")


def projections(x):
    """Two numbers that move where any element of x does."""
    index, flat = torch.arange(x.numel(), dtype=torch.float64), x.detach().double().flatten()
    return [float(flat @ torch.cos(index + 1)), float(flat @ torch.sin(2 * index + 1))]


def values(layer, recipe):
    """Output, KL and gradients of one step with noise, and the state that a file would hold."""
    (make, shapes, indices, same), own = LAYERS[layer], torch.Generator().manual_seed(1)
    random = lambda shape: torch.randn(shape, generator=own, dtype=torch.float64)
    index = lambda shape: torch.arange(math.prod(shape)).view(shape) % indices
    drawn = random if indices is None else index
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = vd.convert(make().double(), (RECIPES | RECURRENT)[recipe]).train()
        x = [drawn(shapes[0])] * len(shapes) if same else [drawn(shape) for shape in shapes]
        found = net(*x)
        output = found if isinstance(found, torch.Tensor) else found[0]
        kl = vd.kl(net).double()
    (output.square().sum() + kl).backward()
    grads = {k: projections(p.grad) for k, p in net.named_parameters() if p.grad is not None}
    shapes = {k: list(v.shape) for k, v in net.state_dict().items()}
    found = {"output": projections(output), "kl": float(kl.detach())}
    return {**found, "gradients": grads, "state": shapes}


def close(a, b):
    return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-10)


@cache
def goldens():
    return json.loads(FILE.read_text())


@pytest.mark.parametrize("layer, recipe", PAIRS)
def test_values_are_those_stored(layer, recipe):
    expected, found = goldens()[f"{layer} {recipe}"], values(layer, recipe)
    assert found["state"] == expected["state"]
    assert close(found["kl"], expected["kl"])
    assert all(map(close, found["output"], expected["output"]))
    assert found["gradients"].keys() == expected["gradients"].keys()
    for name, stored in expected["gradients"].items():
        assert all(map(close, found["gradients"][name], stored)), name


def test_every_pair_is_stored():
    assert set(goldens()) == {" ".join(pair) for pair in cases()}


if __name__ == "__main__":
    stored, pairs = goldens(), [" ".join(pair) for pair in cases()]
    found = {pair: stored.get(pair) or values(*pair.split(" ")) for pair in pairs}
    rows = ",\n".join(f"{json.dumps(pair)}: {json.dumps(v)}" for pair, v in found.items())
    FILE.write_text("{" + rows + "}\n")
