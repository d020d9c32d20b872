"""Stored float64 values of every layer under every recipe: a redesign must not move them.

`python -m tests.layers.test_goldens` writes the file anew; do so only where a value was wrong.
"""

import json
import math
from pathlib import Path

import pytest
import torch

import vardrop as vd
from tests.contract import GATE_RECIPES, LAYERS, WEIGHT_RECIPES
from tests.gates.test_contract import RECIPES as GATES

FILE = Path(__file__).with_name("goldens.json")
RECIPES = WEIGHT_RECIPES | GATE_RECIPES | GATES


def pairs():
    for layer in LAYERS:
        for recipe, value in RECIPES.items():
            if value.gate is None or not layer.startswith("embedding"):
                yield f"{layer}-{recipe}"


def projections(x):
    """Two numbers that move where any element of x does."""
    index = torch.arange(x.numel(), dtype=torch.float64)
    flat = x.detach().double().flatten()
    return [float(flat @ torch.cos(index + 1)), float(flat @ torch.sin(2 * index + 1))]


def values(pair):
    """Output, KL and gradients of one step with noise, and the state that a file would hold."""
    name, recipe = pair.split("-")
    make, inputs = LAYERS[name]
    shapes = torch.Generator().manual_seed(1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layer = vd.convert(make().double(), RECIPES[recipe]).train()
        x = [
            torch.randn(t.shape, generator=shapes, dtype=torch.float64)
            if t.is_floating_point()
            else torch.arange(t.numel()).view(t.shape) % 7
            for t in inputs
        ]
        output = layer(*x)
        kl = vd.kl(layer).double()
    (output.square().sum() + kl).backward()
    return {
        "output": projections(output),
        "kl": float(kl.detach()),
        "gradients": {
            k: projections(p.grad) for k, p in layer.named_parameters() if p.grad is not None
        },
        "state": {k: list(v.shape) for k, v in layer.state_dict().items()},
    }


def close(a, b):
    return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-10)


@pytest.mark.parametrize("pair", list(pairs()))
def test_values_are_those_stored(pair):
    expected, found = json.loads(FILE.read_text())[pair], values(pair)
    assert found["state"] == expected["state"]
    assert close(found["kl"], expected["kl"])
    assert all(map(close, found["output"], expected["output"]))
    assert found["gradients"].keys() == expected["gradients"].keys()
    for name, stored in expected["gradients"].items():
        assert all(map(close, found["gradients"][name], stored)), name


if __name__ == "__main__":
    rows = ",\n".join(f"{json.dumps(pair)}: {json.dumps(values(pair))}" for pair in pairs())
    FILE.write_text("{" + rows + "}\n")
