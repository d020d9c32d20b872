import json
import math
import pickle
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

import vardrop as vd
from experiments.selective import MaskedNoise  # noqa: F401 - a field without a default
from tests.refusals import assert_refused
from vardrop.testing import HEADS, RECIPES


@pytest.mark.parametrize("name", RECIPES | HEADS)
def test_a_recipe_is_a_value(name):
    recipe = (RECIPES | HEADS)[name]
    assert hash(recipe) == hash(pickle.loads(pickle.dumps(recipe)))
    assert vd.from_json(vd.to_json(recipe)) == recipe
    assert type(recipe).__name__ in repr(recipe)


def test_type_names_are_distinct():
    assert_refused("distinct names", type, "ARD", (vd.priors.Prior,), {"__module__": "elsewhere"})


BAD = [
    (lambda: vd.gaussian_dropout(1.0), r"`drop_rate` to be in \[0, 1\), but got 1.0"),
    (lambda: vd.gaussian_dropout(0.0), "above 0 for Gaussian noise"),
    (lambda: vd.variational_dropout("A", per="weight"), "`per` to be 'input' or 'layer' for A"),
    (lambda: vd.variational_dropout("A", prior=vd.ARD()), "`prior` to be a LogUniform for A"),
    (lambda: vd.variational_dropout("B", drop_rate=0.9), "at most `max_alpha` = 1.0"),
    (lambda: vd.posteriors.Bernoulli(0.5, per="layer"), "`per` to be 'weight' or 'input'"),
    (lambda: vd.Normal(mean="pretrained", learned=True), "Give a fixed `std`"),
    (lambda: vd.ScaleMixture(pi=1.0), "`pi` to be .*above 0 and below 1"),
    (lambda: vd.MonteCarlo(vd.ARD()), "`prior` to have a density"),
    (lambda: vd.Recipe(), "`posterior`, `gate`.* to be given"),
    (lambda: vd.Recipe(prior=vd.ARD(), gate=vd.BinaryDropout()), "`posterior` where there is a prior"),
    (lambda: vd.Recipe(vd.AdditiveGaussian(), vd.ScaleMixture()), "registered KL for"),
    (lambda: vd.Recipe(gate=vd.BinaryDropout(), noisy_bias=True), "where `noisy_bias` is True"),
    (lambda: vd.Normal(mean=1e30), "`mean` to be a finite number.* too large for single precision"),
    (lambda: vd.GaussianDropout(alpha=2.0, max_alpha=1.0), "at most `max_alpha`"),
    (lambda: vd.GaussianDropout(prior=vd.LogUniform("cubic")), "at most 1 for the cubic"),
]  # fmt: skip


@pytest.mark.parametrize("call, match", BAD)
def test_bad_input(call, match):
    assert_refused(match, call)


def test_initial_alpha_of_the_authors():
    q = vd.variational_dropout("B", drop_rate=0.2).posterior
    tensors = q.initial(torch.zeros(2, 3), vd.posteriors.Axes((1,), (0,)))
    torch.testing.assert_close(tensors["log_alpha"].exp(), torch.full((2, 3), 0.25))


def test_student_and_mixture_densities_integrate_to_one():
    angle = torch.linspace(-math.pi / 2, math.pi / 2, 200_003, dtype=torch.float64)[1:-1]
    w, step = angle.tan(), angle.cos().square()
    for prior in (vd.Normal(0.5, 2.0), vd.ScaleMixture(0.3, 2.0, 0.1), vd.StudentT(3.0, 0.5)):
        total = torch.trapezoid(prior.log_prob(w, {}).exp() / step, angle)
        assert float(total) == pytest.approx(1.0, abs=1e-6)


def test_numbers_of_other_libraries_become_plain():
    q = vd.AdditiveGaussian(np.float32(-8))
    assert type(q.log_sigma2) is float
    assert json.loads(json.dumps(vd.to_json(q))) == vd.to_json(vd.AdditiveGaussian(-8.0))
    assert type(vd.MonteCarlo(samples=np.int64(2)).samples) is int
    # An integer would make a tensor of integers, which has no gradient.
    assert vd.Gate(vd.LogNormal(mu=0, log_sigma=-5), 2).mu.dtype == torch.float32
    assert repr(vd.BinaryDropout(length_scale=1)).endswith("length_scale=1.0)")


HOSTILE = [
    None, True, -1, 0, 1.5, 1e308, float("nan"), float("inf"), 10**400, "", "x", [], {}, [1, 2],
    {"type": "Recipe"}, {"type": "os.system", "version": 1}, {"type": "Posterior", "version": 1},
    {"type": [], "version": 1}, {"type": "ARD", "version": True}, {"type": "ARD", "version": 1},
    vd.to_json(vd.sparse_vd()), vd.to_json(vd.flipout), {1: 2},
]  # fmt: skip


def places(value, place=()):
    yield place
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*place, key))


def changed(value, place, new):
    if not place:
        return new
    return {**value, place[0]: changed(value[place[0]], place[1:], new)}


@pytest.mark.parametrize("name", RECIPES)
def test_hostile_descriptions_are_refused_or_valid(name):
    """Whatever is put anywhere: a VardropError, or a value that describes itself the same way."""
    data, accepted = vd.to_json(RECIPES[name]), 0
    for place in places(data):
        for new in HOSTILE:
            hostile = changed(data, place, new)
            try:
                found = vd.from_json(hostile)
            except vd.VardropError:
                continue
            accepted += 1
            # Numbers alone may differ from what was there, and then within their bounds.
            assert vd.to_json(found) == hostile
            if isinstance(found, vd.BaseRecipe):
                vd.convert(nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.Linear(2, 2)), found)
    assert accepted > 0


def test_deep_descriptions():
    data = {}
    for _ in range(100_000):
        data = {"type": "MonteCarlo", "version": 1, "prior": data, "samples": 1}
    assert_refused("too deep", vd.from_json, data)


@pytest.mark.parametrize("data, match", [
    ({"type": "Nonsense", "version": 1}, "`type` to be one of"),
    ({"type": "ARD", "version": 9}, "`version` of ARD to be 1, but got 9"),
    ({"type": "ARD", "version": 1, "x": 2}, r"fields of ARD to be among \[\], but got \['x'\]"),
    (None, "`data` to be a dictionary that vardrop.to_json made, but got None"),
    ("{}", "`data` to be a dictionary"),
    ({"type": "Posterior", "version": 1}, "`type` to be one of.*but got 'Posterior'"),
    ({"type": "ARD", "version": True}, "`version` of ARD to be 1, but got True"),
    ({"type": "MaskedNoise", "version": 1}, r"MaskedNoise to have all its fields, but \['base'\] are missing"),
    ({**vd.to_json(vd.AdditiveGaussian()), "log_sigma2": "x"}, "`log_sigma2` to be a fin"),
    ({**vd.to_json(vd.sparse_vd()), "version": 2}, "`version` of Recipe to be 1, but got 2"),
    ({"type": "BaseRecipe", "version": 1}, "`type` to be one of.*but got 'BaseRecipe'"),
    ({**vd.to_json(vd.sparse_vd()), "prior": vd.to_json(vd.sparse_vd())}, "`prior` to be a Prior or None, but got Recipe"),
])  # fmt: skip
def test_descriptions_that_are_not_whole_or_not_of_the_type(data, match):
    assert_refused(match, vd.from_json, data)


def test_a_class_with_checks_of_its_own_is_checked_in_a_description():
    @dataclass(frozen=True)
    class Careless(vd.priors.Prior):
        scale: float = 1.0

        def __post_init__(self) -> None:
            assert self.scale

    data = {**vd.to_json(Careless()), "scale": "wide"}
    assert_refused("`scale` to be a finite number, but got 'wide'", vd.from_json, data)
