"""Every function that a description may name, on a few small images: figures, seeds, generators."""

import math

import pytest
import torch
from sklearn.datasets import load_digits

from experiments import (
    beta_bernoulli,
    dropmax,
    kingma,
    molchanov,
    neklyudov,
    ood,
    sparse_lenets,
    tolerance,
)
from experiments.registry import FUNCTIONS
from vardrop.data import Images

TINY = {
    "kl_approximations": {},
    "gradient_variances": {
        "epochs": 1, "width": 8, "batch": 20, "batches": 4, "example_batches": 4, "examples": 80,
    },
    "epoch_seconds": {"width": 8, "batch": 20, "rows": 40},
    "width_errors": {"width": 8, "epochs": 2, "examples": 60},
    "sparse_mnist": {"epochs": 2, "decay_from": 1, "warmup": [], "pretrain": 1, "examples": 60},
    "random_labels": {"epochs": 1, "dropout_epochs": 1, "examples": 60, "width": 8},
    "sparse_units": {"dense_epochs": 1, "epochs": 1, "dependent_epochs": 1, "examples": 60},
    "class_heads": {"per_class": 3, "epochs": 1},
    "variance_lenet5": {"epochs": 1, "samples": 2, "examples": 60},
    "parameterisation": {
        "prior": "ard", "samples": 2, "examples": 60, "epochs": 2, "bottleneck": 8, "width": 8,
    },
    "selective_propagation": {"epochs": 1, "samples": 2, "examples": 60, "shares": [0.0, 0.5, 1.0]},
    "attacks": {"epochs": 1, "samples": 2, "examples": 60, "epsilons": [0.0, 0.1]},
    "exploration": {"episodes": 4, "window": 2},
    "variance_toys": {"steps": 3},
    "out_of_domain": {"epochs": 1, "samples": 2, "examples": 60},
    "noise_tolerance": {"epochs": 1, "alphas": [1.0], "examples": 60, "samples": 2},
    "identity": {},
    "toy": {"epochs": 3, "draws": 4},
    "packed_bytes": {"knots": [[0, 1.0], [2, 0.0]], "warmup": [0, 1], "validation": 40},
}  # fmt: skip


def few_images(name: str, split: str = "train") -> Images:
    raw = load_digits()
    x = torch.tensor(raw.images[:120], dtype=torch.float32)[:, None] / 16
    return Images(torch.nn.functional.interpolate(x, (28, 28)), torch.tensor(raw.target[:120]))


@pytest.fixture
def images(monkeypatch):
    rooms = (kingma, molchanov, beta_bernoulli, dropmax, neklyudov, ood, sparse_lenets, tolerance)
    for room in rooms:
        monkeypatch.setattr(room, "load_images", few_images)


def test_the_table_is_complete():
    assert set(TINY) == set(FUNCTIONS)


@pytest.mark.parametrize("name", TINY)
def test_measures_finite_figures_and_leaves_the_generator(name, images):
    if name == "exploration":
        pytest.importorskip("gymnasium", reason="needs the extra `rl`")
    before = torch.get_rng_state()
    found = FUNCTIONS[name](seed=1, **TINY[name])
    assert torch.equal(torch.get_rng_state(), before)
    assert found["figures"]
    assert all(type(v) is float and math.isfinite(v) for v in found["figures"].values())
    assert all(isinstance(record, dict) for record in found.get("curve", []))


def test_a_seed_decides_the_figures(images):
    arguments = TINY["sparse_units"] | {"dependent_epochs": 0}
    first, again, other = (FUNCTIONS["sparse_units"](seed=s, **arguments) for s in (1, 1, 2))
    assert first == again
    assert first["curve"] != other["curve"]
