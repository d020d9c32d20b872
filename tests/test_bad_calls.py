"""Wrong calls of the public names: each is refused with the argument, the value and the remedy."""

from __future__ import annotations

import math
from inspect import signature
from typing import Any

import pytest
import torch
from torch import nn

import vardrop as vd
from tests.refusals import assert_refused

NAN, INF = math.nan, math.inf

# What an argument must refuse, in every value and method that has it.
FIELDS: dict[str, list[Any]] = {
    "a": [0, "x"], "alpha": [-1, 0, NAN, INF, "x", None], "b": [-1, 0], "base": [None, "x"],
    "df": [0, -1, NAN, "x"], "drop_rate": [-0.1, 1.5, NAN, "a"], "estimator": ["flipout", 0],
    "form": ["x", 3], "fraction": [0, 2, -1], "granularity": ["pixel"], "high": [-30, NAN, INF],
    "inference": ["z"], "joint": ["yes", 1], "kind": ["Z"], "kl_scale": [-1, NAN, "x"],
    "learned": [None, 1, "yes"], "length_scale": [-1, NAN, "x"], "log_sigma": [NAN, INF],
    "log_sigma2": [NAN, INF, "a", None, 1e308, -1e6, True, torch.zeros(2)], "low": [5, NAN, -INF],
    "max_alpha": [-1, 0, NAN, "x"], "mean": [NAN, "zzz", None], "mu": [NAN, INF, "x"],
    "noise": ["x"], "penalty": [-1, NAN], "per": ["bogus", "", []], "pi": [-1, 2, NAN, "x"],
    "prior": ["x", 3], "prior_std": [0, NAN], "samples": [0, -1, 1.5, "a", True],
    "scale": [NAN, "a"], "shift": [INF, "a"], "std": [0, -1, NAN, "x"], "std1": [0, -1],
    "std2": ["x"], "temperature": [0, -1, NAN, "x"], "threshold": [NAN, "x"],
    "train_clip": [-1, NAN, "x"],
}  # fmt: skip
KINDS = (vd.posteriors.Posterior, vd.priors.Prior, vd.gates.FeatureNoise)
PUBLIC = {name: getattr(vd, name) for name in vd.__all__}
VALUES = [n for n, v in PUBLIC.items() if isinstance(v, type) and issubclass(v, KINDS)]
TAKEN = [(n, a) for n in [*VALUES, *vd.recipes.METHODS] for a in signature(PUBLIC[n]).parameters]
ONE_ALONE = [
    ("BetaBernoulli", "threshold", [-1, 1, 2]), ("BinaryDropout", "drop_rate", [1]),
    ("BinaryDropout", "length_scale", [0]), ("ConcreteDropout", "drop_rate", [0, 1]),
    ("ConcreteDropout", "granularity", ["example"]), ("GaussianDropout", "prior", [vd.ARD()]),
    ("HardConcrete", "drop_rate", [0, 1]), ("HardConcrete", "low", [0.1, 1]),
    ("HardConcrete", "high", [0.5]), ("MultiplicativeGaussian", "per", [None]),
    ("StudentT", "scale", [0, -3]), ("mc_dropout", "length_scale", [0.1]),
    ("Recipe", "posterior", ["x", vd.LogUniform(), True]), ("Recipe", "gate", [3, True, "x"]),
    ("HeadRecipe", "rule", ["x", True, None, vd.BinaryDropout()]),
    ("SwitchDropout", "gate", ["x", True]),
]  # fmt: skip


def test_every_argument_has_values_to_refuse():
    assert {argument for _, argument in TAKEN} - {"share"} == set(FIELDS)


@pytest.mark.parametrize(
    "name, argument, values", [*((n, a, FIELDS.get(a, [])) for n, a in TAKEN), *ONE_ALONE],
    ids=lambda part: str(part)[:20],
)  # fmt: skip
def test_values_refuse_bad_fields(name, argument, values):
    for value in values:
        assert_refused(rf"Expected .*`{argument}`.* but got ", PUBLIC[name], **{argument: value})


X, Y = torch.randn(8, 4), torch.arange(8) % 3
M, RULE = vd.metrics, vd.heads.DropMaxRule()
PROBS, LABELS = torch.tensor([[0.9, 0.1], [0.4, 0.6]]), torch.tensor([0, 1])


def mlp():
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


def empty():
    layer = nn.Linear(1, 3)
    layer.weight = nn.Parameter(torch.zeros(3, 0))
    return layer


def noisy():
    return vd.convert(mlp(), vd.sparse_vd())


def objective(**more):
    return vd.ELBO(**{"net": noisy(), "likelihood": vd.Categorical(), "num_data": 10, **more})


def binary():
    return objective(net=vd.convert(nn.Linear(4, 1), vd.ard()), likelihood=vd.Bernoulli())


def additive(**more):
    return vd.Recipe(vd.AdditiveGaussian(), **more)


CALLS: dict[str, tuple[Any, str]] = {
    "prior alone": (lambda: vd.Recipe(prior=vd.Normal()), "`posterior`, `gate`, .* to be given"),
    "posterior as prior": (lambda: additive(prior=vd.AdditiveGaussian()), "`prior` to be a Prior"),
    "noisy_bias": (lambda: additive(noisy_bias="yes"), "`noisy_bias` to be True or False"),
    "estimator of a gate": (lambda: vd.Recipe(gate=vd.BetaBernoulli(), estimator="x"), "`estimator` to be a"),
    "layer posterior": (lambda: vd.Linear(4, 3, posterior="x"), "`posterior` to be a Posterior"),
    "layer prior": (lambda: vd.Conv2d(1, 2, 3, posterior=vd.Normal()), "`posterior` to be a Posterior or None"),
    "layer gate": (lambda: vd.Linear(4, 3, gate=True), "`gate` to be a FeatureNoise"),
    "layer estimator": (lambda: vd.Linear(4, 3, posterior=vd.AdditiveGaussian(), estimator="x"), "`estimator` to be an Estimator"),
    "gate noise": (lambda: vd.Gate("x", 3), "`noise` to be a FeatureNoise"),
    "dependent gate alone": (lambda: vd.Gate(vd.DependentBetaBernoulli(), 3), "a trained Beta-Bernoulli gate"),
    "rate per example": (lambda: vd.GaussianDropout(granularity="example"), "Expected `per` to be 'layer'"),
    "gate of 0 units": (lambda: vd.Gate(vd.BetaBernoulli(), 0), "`units` to be an integer of at"),
    "gate side": (lambda: vd.Gate(vd.BetaBernoulli(), 3, side="q"), "`side` to be one of"),
    "gate width": (lambda: vd.Gate(vd.BetaBernoulli(), 3)(torch.zeros(2, 5)), r"axis -1 of the input to have 3 units, but got shape \(2, 5\)"),
    "gate axis": (lambda: vd.Gate(vd.BetaBernoulli(), 3, axis=9)(torch.zeros(2, 3)), r"axis 9 of the input to have 3 units, but got shape \(2, 3\)"),
    "head without a rule": (lambda: vd.Head(4, 3, None), "`rule` to be a rule such as .*, but got None"),
    "head samples": (lambda: vd.Head(4, 3, RULE)(torch.zeros(1, 4), samples=1.5), "`samples` to be an integer"),
    "head of one class": (lambda: vd.Head(4, 1, RULE), "at least 2 classes, but got 1"),
    "head features": (lambda: vd.Head(4, 3, RULE)(torch.zeros(2, 9)), "last axis of the features"),
    "constant -1": (lambda: vd.constant(-1), "`beta` to be .* at least 0, but got -1"),
    "warm-up start": (lambda: vd.linear_warmup(-1, 5), "`start` to be .* at least 0, but got -1"),
    "warm-up end": (lambda: vd.linear_warmup(0, NAN), "`end` to be a finite number, but got nan"),
    "warm-up order": (lambda: vd.linear_warmup(5, 2), "0 <= `start` < `end`, but got 5 and 2"),
    "cyclical period": (lambda: vd.cyclical(NAN), "`period` to be a finite number and above 0"),
    "cyclical rise": (lambda: vd.cyclical(5, 2), "`rise` to be .* at most 1, but got 2"),
    "convert no net": (lambda: vd.convert(None, vd.ard()), "`net` to be a torch.nn.Module"),
    "convert recipe not called": (lambda: vd.convert(mlp(), vd.ard), "to be a Recipe.*Call it"),
    "convert no recipe": (lambda: vd.convert(mlp(), "sparse_vd"), "`recipe` to be a Recipe"),
    "convert where": (lambda: vd.convert(mlp(), vd.ard(), include=5), "`include` to be a name pattern"),
    "convert exclude": (lambda: vd.convert(mlp(), vd.ard(), exclude=5), "`exclude` to be a name pa"),
    "convert where list": (lambda: vd.convert(mlp(), vd.ard(), include=["0", None]), "`include` to be .* but got None"),
    "convert without weights": (lambda: vd.convert(empty(), vd.ard()), r"'\(net\)' .Linear.: it has no weights"),
    "convert nowhere": (lambda: vd.convert(mlp(), vd.ard(), include=[]), "not selected by `include`"),
    "convert all left out": (lambda: vd.convert(mlp(), vd.ard(), exclude="*"), "3 more|left out by `exclude`"),
    **{f"{verb.__name__} no net": (lambda verb=verb: verb(None), "`net` to be a torch.nn.Module, but got None")
       for verb in (vd.revert, vd.kl, vd.relevance, vd.log_alpha, vd.sparsity, vd.alpha_summary)},
    "sampling no net": (lambda: vd.sampling(None).__enter__(), "`net` to be a torch.nn.Module"),
    "sampling on": (lambda: vd.sampling(noisy(), "x").__enter__(), "`on` to be True or False"),
    "register_kl": (lambda: vd.register_kl(3, 4), "`q_type` to be a subclass of Posterior"),
    "register_kl prior": (lambda: vd.register_kl(vd.ZeroMean, vd.ZeroMean), "`p_type` to be a subclass of Prior"),
    "kl_divergence": (lambda: vd.kl_divergence("a", vd.ARD(), X, None, {}, {}), "`q` to be a Posterior"),
    "ELBO no net": (lambda: objective(net=None), "`net` to be a torch.nn.Module"),
    "ELBO plain net": (lambda: objective(net=mlp()), "`net` to have noisy modules"),
    "ELBO likelihood": (lambda: objective(likelihood=None), "`likelihood` to be callable"),
    "ELBO class": (lambda: objective(likelihood=vd.Categorical), "`likelihood` to be callable.* Make one"),
    "ELBO num_data": (lambda: objective(num_data=1.5), "`num_data` to be an integer of at least 1"),
    "ELBO beta": (lambda: objective(beta="x"), "`beta` to be a finite number and at least 0"),
    "ELBO samples": (lambda: objective(samples=1.5), "`samples` to be an integer of at least 1"),
    "ELBO kl_value_every": (lambda: objective(kl_value_every=2.5), "`kl_value_every` to be an int"),
    "set_beta": (lambda: objective().set_beta(INF), "`beta` to be a finite number"),
    "float labels": (lambda: objective()(X, Y.float()), r"class indices of shape \(8,\), but got torch.float32"),
    "labels too large": (lambda: objective()(X, Y + 5), r"`y` to be in 0..2, but got 5..7"),
    "labels too small": (lambda: objective()(X, Y - 1), r"`y` to be in 0..2, but got -1..1"),
    "labels too few": (lambda: objective()(X, Y[:5]), r"class indices of shape \(8,\), but got .* \(5,"),
    "no labels": (lambda: objective()(X, None), "`y` to be a tensor, but got None"),
    "empty batch": (lambda: objective()(X[:0], Y[:0]), "a batch of at least one example"),
    **{f"binary {y}": (lambda y=y: binary()(X, torch.full((8, 1), y)), "`y` to be between 0 and 1") for y in (2.0, -3.0, NAN)},
    "binary shape": (lambda: binary()(X, torch.ones(8)), r"shape \(8, 1\) of the output"),
    "groups no net": (lambda: vd.parameter_groups(None), "`module` to be a torch.nn.Module"),
    "groups lr": (lambda: vd.parameter_groups(noisy(), lr=-1), "`lr` to be .* at least 0"),
    "groups noise_lr": (lambda: vd.parameter_groups(noisy(), noise_lr="x"), "`noise_lr` to be"),
    "groups decay": (lambda: vd.parameter_groups(noisy(), weight_decay=-1), "`weight_decay` to be .* at least 0"),
    "groups without parameters": (lambda: vd.parameter_groups(nn.ReLU()), "`module` to have parameters to train"),
    "compile no ELBO": (lambda: vd.compile(None, None), "`elbo` to be a vardrop.ELBO"),
    "compile optimizer": (lambda: vd.compile(objective(), "adam"), "`optimizer` to be an optimizer"),
    "alpha threshold": (lambda: vd.alpha_summary(noisy(), NAN), "`threshold` to be a finite number"),
    "sparsity threshold": (lambda: vd.sparsity(noisy(), "x"), "`threshold` to be a finite number"),

    "kappa loader": (lambda: vd.kappa(noisy(), [1, 2]), "`data` to give pairs .* but got 1"),
    "kappa no loader": (lambda: vd.kappa(noisy(), None), "`data` to be a pair .* or batches"),
    "kappa seed": (lambda: vd.kappa(noisy(), [(X, Y)], seed=0.5), "`seed` to be an integer"),
    "load_run path": (lambda: vd.load_run(None), "`path` to be the directory that fit wrote"),
    "width of nothing": (lambda: M.interval_width(torch.tensor([INF]), torch.tensor([INF])), "numbers inside"),
    "elbo of None": (lambda: objective()(None, Y), "`x` or `y` to fit this call, but got AttributeError"),
    "elbo of a shape": (lambda: objective()(X[:, :2], Y), "`x` or `y` to fit this call, but got RuntimeError"),
    "num_data below the batch": (lambda: objective(num_data=3)(X, Y), "`num_data`, .* got 3 and a batch of 8"),
    "one class": (lambda: objective(net=vd.convert(nn.Linear(4, 1), vd.ard()))(X, Y * 0), "at least two classes"),
    "predict one class": (lambda: vd.predict(vd.convert(nn.Linear(4, 1), vd.ard()), X), "at least two classes"),
    "weights of a custom loss": (lambda: objective(likelihood=lambda o, y: o.mean())(X, Y, torch.ones(8)), "one of vardrop's"),
    "too few weights": (lambda: objective()(X, Y, torch.ones(5)), "one number for each of 8 examples"),
    "large weights": (lambda: objective()(X, Y, torch.full((8,), 1e30)), "`weight` to be from 0 to 1e.09"),
    "predict None": (lambda: vd.predict(noisy(), None), "`x` to fit this call"),
    "predict an array": (lambda: vd.predict(noisy(), X.numpy()), "`x` to be a tensor, .* but got ndarray"),
    "predict seed": (lambda: vd.predict(noisy(), X, seed=2**70), "`seed` to be an integer"),
    "conformal None": (lambda: vd.conformal(None, Y), "`p` to be a prediction"),
    "fit_temperature None": (lambda: vd.fit_temperature(None, Y), "`p` to be a prediction"),
    "temperature of a text": (lambda: vd.apply_temperature("a", 2.0), "`probs` to be a tensor"),
    "temperature of logits": (lambda: vd.apply_temperature(X, 2.0), "`probs` to be non-negative"),
    "negative errors": (lambda: M.risk_coverage(X[:, 0], -X[:, 0].abs()), "`errors` to be non-negative"),
    "freeze with inputs": (lambda: vd.freeze(noisy(), X), r"`samples` .*call the result: freeze.net..x."),
    "shrink an ELBO": (lambda: vd.shrink(objective(), X), "`net` to be a model, but got ELBO. Pass its `net`"),
    "export an ELBO": (lambda: vd.export_program(objective(), X), "but got ELBO.* vardrop.freeze"),
    **{f"{verb.__name__} an ELBO": (lambda verb=verb: verb(objective(), "net"), "but got ELBO. Pass its `net`") for verb in (vd.save_noisy, vd.pack)},
    "to_json net": (lambda: vd.to_json(nn.Linear(2, 1)), "`value` to be a value such as .* but got a Linear"),
}  # fmt: skip


@pytest.mark.parametrize("call, match", CALLS.values(), ids=CALLS)
def test_calls(call, match):
    assert_refused(match, call)


def test_targets_that_torch_understands_are_taken():
    soft, some = torch.rand(8, 3).softmax(1), Y.clone()
    some[:4] = -100  # left out by torch's cross-entropy
    assert objective()(X, soft).loss.isfinite()
    assert objective()(X, some).loss.isfinite()
    assert binary()(X, torch.rand(8, 1)).loss.isfinite()
    assert binary()(X, torch.ones(8, 1, dtype=torch.long)).loss.isfinite()


def test_gradients_per_example_look_at_no_values():
    elbo = objective()
    weights = dict(elbo.named_parameters())

    def loss(weights, x, y):
        return torch.func.functional_call(elbo, weights, (x[None], y[None])).loss

    each = torch.vmap(torch.func.grad(loss), in_dims=(None, 0, 0), randomness="different")
    assert len(each(weights, X, Y)["net.0.weight"]) == len(X)
