"""Wrong calls of the public names: each is refused with the argument, the value and the remedy."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import vardrop as vd

NAN, INF = math.nan, math.inf

# Name of a value or recipe, its argument, and what it must refuse there.
FIELDS: list[tuple[str, str, list[Any]]] = [
    ("AdditiveGaussian", "log_sigma2", [NAN, INF, "a", None, 1e308, -1e6, True, torch.zeros(2)]),
    ("MultiplicativeGaussian", "alpha", [-1, 0, NAN, INF, "x", None]),
    ("MultiplicativeGaussian", "per", ["bogus", None, []]),
    ("MultiplicativeGaussian", "max_alpha", [-1, 0, NAN, "x"]),
    ("MultiplicativeGaussian", "learned", [None, 1, "yes"]),
    ("Normal", "std", [0, -1, NAN, "x"]),
    ("Normal", "mean", [NAN, "zzz", None]),
    ("StudentT", "df", [0, -1, NAN, "x"]),
    ("StudentT", "scale", [0, -3]),
    ("StudentT", "form", ["x", None]),
    ("ScaleMixture", "pi", [-1, 2, NAN, "x"]),
    ("ScaleMixture", "std1", [0, -1]),
    ("ScaleMixture", "std2", ["x"]),
    ("LogUniform", "form", ["x", None, 3]),
    ("MonteCarlo", "samples", [0, -1, 1.5, "a", True]),
    ("MonteCarlo", "prior", [None, "x"]),
    ("ZeroMean", "noise", ["x", None]),
    ("BetaBernoulli", "alpha", [0, -1, NAN]),
    ("BetaBernoulli", "a", [0, "x"]),
    ("BetaBernoulli", "b", [-1]),
    ("BetaBernoulli", "temperature", [0, NAN]),
    ("BetaBernoulli", "threshold", [NAN, -1, 1, 2]),
    ("BinaryDropout", "drop_rate", [-0.1, 1, 1.5, NAN, "a", None]),
    ("BinaryDropout", "granularity", ["x"]),
    ("BinaryDropout", "length_scale", [-1, 0, "x"]),
    ("ConcreteDropout", "drop_rate", [0, 1, 2, "x"]),
    ("ConcreteDropout", "temperature", [0, -1]),
    ("ConcreteDropout", "length_scale", [-1, NAN, None]),
    ("ConcreteDropout", "granularity", ["z", "example"]),
    ("GaussianDropout", "alpha", [-1, 0, NAN]),
    ("GaussianDropout", "per", ["z"]),
    ("GaussianDropout", "max_alpha", [-1, 0, "x"]),
    ("GaussianDropout", "kl_scale", [-1, NAN, "x"]),
    ("GaussianDropout", "granularity", ["q"]),
    ("GaussianDropout", "prior", ["x", vd.ARD()]),
    ("HardConcrete", "penalty", [-1, NAN]),
    ("HardConcrete", "drop_rate", [0, 1]),
    ("HardConcrete", "temperature", [0]),
    ("HardConcrete", "low", [1, NAN, -INF]),
    ("HardConcrete", "high", [0.5, NAN, INF]),
    ("LogNormal", "mu", [NAN, INF, "x"]),
    ("LogNormal", "log_sigma", [NAN, INF]),
    ("LogNormal", "low", [5, -INF]),
    ("LogNormal", "high", [-30]),
    ("LogNormal", "threshold", [NAN]),
    ("NormalJeffreys", "log_sigma2", [NAN, 1e9]),
    ("NormalJeffreys", "threshold", [NAN, None]),
    ("Standout", "scale", [NAN, "a"]),
    ("Standout", "shift", [INF]),
    ("DependentBetaBernoulli", "base", [None, "x"]),
    ("DependentBetaBernoulli", "std", [0, -1]),
    ("DependentBetaBernoulli", "prior_std", [0, NAN]),
    ("DependentBetaBernoulli", "scale", [NAN]),
    ("DependentBetaBernoulli", "joint", ["yes"]),
    ("gaussian_dropout", "drop_rate", [-1, 1, 2, NAN, "x"]),
    ("gaussian_dropout", "kind", ["C"]),
    ("variational_dropout", "kind", ["Z"]),
    ("variational_dropout", "per", ["bogus", ""]),
    ("variational_dropout", "drop_rate", [1.0, -1]),
    ("variational_dropout", "max_alpha", [-1]),
    ("variational_dropout", "prior", [0]),
    ("sparse_vd", "log_sigma2", [NAN, "x"]),
    ("sparse_vd", "form", ["cubicx"]),
    ("ard", "log_sigma2", [NAN]),
    ("bayes_by_backprop", "prior", ["x", 3, 0]),
    ("bayes_by_backprop", "log_sigma2", [INF]),
    ("bayes_by_backprop", "estimator", [None, "flipout"]),
    ("variance_layer", "noise", ["x"]),
    ("variance_layer", "estimator", ["x", 0]),
    ("mc_dropout", "drop_rate", [2, -1, "x"]),
    ("mc_dropout", "length_scale", [-1, 0.1]),
    ("concrete_dropout", "drop_rate", [1.5]),
    ("concrete_dropout", "length_scale", [NAN]),
    ("beta_bernoulli", "a", [0]),
    ("beta_bernoulli", "alpha", [-1]),
    ("l0", "penalty", [-1]),
    ("l0", "drop_rate", [1]),
    ("dropmax", "temperature", [0, NAN, "x"]),
    ("dropmax", "inference", ["z"]),
    ("sampled_softmax", "share", [0, 2, -1]),
    ("class_dropout", "drop_rate", [1, -1]),
    ("dropconnect", "drop_rate", [1, -0.5]),
    ("dropconnect", "estimator", [None]),
    ("binary_dropout", "drop_rate", [1.0]),
    ("structured_pruning", "log_sigma", [NAN]),
    ("bayesian_compression", "log_sigma2", [NAN]),
    ("standout", "scale", [NAN]),
    ("Recipe", "posterior", ["x", vd.LogUniform(), True]),
    ("Recipe", "gate", [3, True, "x"]),
    ("Recipe", "head", ["x", True]),
]  # fmt: skip


@pytest.mark.parametrize(
    "name, argument, value",
    [(name, argument, value) for name, argument, values in FIELDS for value in values],
    ids=lambda part: str(part)[:20],
)
def test_values_refuse_bad_fields(name, argument, value):
    with pytest.raises(vd.VardropError, match=rf"Expected .*`{argument}`.* but got "):
        getattr(vd, name)(**{argument: value})


def additive(**more):
    return vd.Recipe(vd.AdditiveGaussian(), **more)


CALLS: dict[str, tuple[Any, str]] = {
    "prior alone": (lambda: vd.Recipe(prior=vd.Normal()), "`posterior`, `gate`, .* to be given"),
    "posterior as prior": (lambda: additive(prior=vd.AdditiveGaussian()), "`prior` to be a Prior"),
    "noisy_bias": (lambda: additive(noisy_bias="yes"), "`noisy_bias` to be True or False"),
    "estimator of a gate": (
        lambda: vd.Recipe(gate=vd.BetaBernoulli(), estimator=None), "`estimator` to be a",
    ),
    "layer posterior": (lambda: vd.Linear(4, 3, posterior="x"), "`posterior` to be a Posterior"),
    "layer prior": (
        lambda: vd.Conv2d(1, 2, 3, posterior=vd.Normal()), "`posterior` to be a Posterior or None",
    ),
    "layer gate": (lambda: vd.Linear(4, 3, gate=True), "`gate` to be a FeatureNoise"),
    "layer estimator": (
        lambda: vd.Linear(4, 3, posterior=vd.AdditiveGaussian(), estimator="x"),
        "`estimator` to be an Estimator",
    ),
    "gate noise": (lambda: vd.Gate("x", 3), "`noise` to be a FeatureNoise"),
    "gate of 0 units": (lambda: vd.Gate(vd.BetaBernoulli(), 0), "`units` to be an integer of at"),
    "gate units": (lambda: vd.Gate(vd.BetaBernoulli(), 1.5), "`units` to be an integer"),
    "gate side": (lambda: vd.Gate(vd.BetaBernoulli(), 3, side="q"), "`side` to be one of"),
    "gate width": (
        lambda: vd.Gate(vd.BetaBernoulli(), 3)(torch.zeros(2, 5)),
        r"axis -1 of the input to have 3 units, but got shape \(2, 5\)",
    ),
    "gate axis": (
        lambda: vd.Gate(vd.BetaBernoulli(), 3, axis=9)(torch.zeros(2, 3)),
        r"axis 9 of the input to have 3 units, but got shape \(2, 3\)",
    ),
    "head without a rule": (lambda: vd.Head(4, 3), "a head with a rule, but got Head"),
    "head samples": (
        lambda: vd.Softmax(4, 3)(torch.zeros(1, 4), samples=1.5), "`samples` to be an integer",
    ),
    "head of one class": (lambda: vd.DropMax(4, 1), "at least 2 classes, but got 1"),
    "head features": (lambda: vd.DropMax(4, 3)(torch.zeros(2, 9)), "last axis of the features"),
    "head labels": (
        lambda: vd.DropMax(4, 3).loss(torch.zeros(2, 4), torch.tensor([0, 9])), "`y` to lie in 0..2",
    ),
    "to_json number": (lambda: vd.to_json(3), "`value` to be a value such as"),
    "to_json net": (lambda: vd.to_json(nn.Linear(2, 1)), "`value` to be .* but got a Linear"),
}  # fmt: skip


@pytest.mark.parametrize("call, match", CALLS.values(), ids=CALLS)
def test_calls(call, match):
    with pytest.raises(vd.VardropError, match=match):
        call()
