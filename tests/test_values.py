import pickle

import pytest
import torch

import vardrop as vd
from vardrop.posteriors import Axes
from vardrop.testing import HEADS, RECIPES


@pytest.mark.parametrize("name", RECIPES | HEADS)
def test_a_recipe_is_a_value(name):
    recipe = (RECIPES | HEADS)[name]
    assert hash(recipe) == hash(pickle.loads(pickle.dumps(recipe)))
    assert vd.from_json(vd.to_json(recipe)) == recipe
    assert type(recipe).__name__ in repr(recipe)


@pytest.mark.parametrize(
    "data, match",
    [
        ({"type": "Nonsense", "version": 1}, "`type` to be one of"),
        ({"type": "ARD", "version": 9}, "`version` of ARD to be 1, but got 9"),
        ({"type": "ARD", "version": 1, "x": 2}, r"fields of ARD to be among \[\], but got \['x'\]"),
    ],
)
def test_bad_descriptions(data, match):
    with pytest.raises(vd.VardropError, match=match):
        vd.from_json(data)


def test_type_names_are_distinct():
    with pytest.raises(vd.VardropError, match="distinct names"):
        type("ARD", (vd.priors.Prior,), {"__module__": "elsewhere"})


BAD = [
    (lambda: vd.gaussian_dropout(1.0), r"`drop_rate` to lie in \[0, 1\), but got 1.0"),
    (lambda: vd.gaussian_dropout(-0.1), r"`drop_rate` to lie in \[0, 1\)"),
    (lambda: vd.gaussian_dropout(0.0), "above 0 for Gaussian noise"),
    (lambda: vd.gaussian_dropout(kind="C"), "`kind` to be 'A' or 'B', but got 'C'"),
    (lambda: vd.variational_dropout(kind="C"), "`kind` to be 'A', 'B' or 'A2'"),
    (lambda: vd.variational_dropout("A", per="weight"), "`per` to be 'input' or 'layer' for A"),
    (lambda: vd.variational_dropout("A", prior=vd.ARD()), "`prior` to be a LogUniform for A"),
    (lambda: vd.variational_dropout("B", per="row"), "`per` to be 'weight', 'input'"),
    (lambda: vd.variational_dropout("B", drop_rate=0.9), "at most `max_alpha` = 1.0"),
    (lambda: vd.MultiplicativeGaussian(alpha=0.0), "`alpha` to be positive"),
    (lambda: vd.variance_layer("cauchy"), "`noise` to be 'gaussian', 'sign' or 'uniform'"),
    (lambda: vd.dropconnect(1.5), r"`drop_rate` to lie in \[0, 1\)"),
    (lambda: vd.binary_dropout(-1), r"`drop_rate` to lie in \[0, 1\)"),
    (lambda: vd.posteriors.Bernoulli(0.5, per="layer"), "`per` to be 'weight' or 'input'"),
    (lambda: vd.LogUniform("quartic"), "`form` to be 'exact'"),
    (lambda: vd.Normal(std=-1.0), "`std` to be positive"),
    (lambda: vd.Normal(mean="zero"), "`mean` to be a number or 'pretrained'"),
    (lambda: vd.Normal(mean="pretrained", learned=True), "Give a fixed `std`"),
    (lambda: vd.ScaleMixture(pi=1.0), r"`pi` to lie in \(0, 1\)"),
    (lambda: vd.StudentT(df=0), "`df` to be positive"),
    (lambda: vd.StudentT(form="x"), "`form` to be 'exact' or 'bound'"),
    (lambda: vd.MonteCarlo(vd.ARD()), "`prior` to have a density"),
    (lambda: vd.MonteCarlo(vd.Normal(), samples=0), "`samples` to be at least 1"),
    (lambda: vd.Recipe(), "`posterior`, `gate`.* to be given"),
    (lambda: vd.Recipe(prior=vd.ARD(), gate=vd.BinaryDropout()), "`posterior` where there is a prior"),
    (lambda: vd.Recipe(vd.AdditiveGaussian(), vd.ScaleMixture()), "registered KL for"),
    (lambda: vd.GaussianDropout(alpha=2.0, max_alpha=1.0), "at most `max_alpha`"),
    (lambda: vd.GaussianDropout(per="row"), "`per` to be 'unit' or 'layer'"),
    (lambda: vd.GaussianDropout(prior=vd.LogUniform("cubic")), "at most 1 for the cubic"),
]  # fmt: skip


@pytest.mark.parametrize("call, match", BAD)
def test_bad_input(call, match):
    with pytest.raises(vd.VardropError, match=match):
        call()


def test_initial_alpha_of_the_authors():
    q = vd.variational_dropout("B", drop_rate=0.2).posterior
    tensors = q.initial(torch.zeros(2, 3), Axes((1,), (0,)))
    torch.testing.assert_close(tensors["log_alpha"].exp(), torch.full((2, 3), 0.25))


def test_student_and_mixture_densities_integrate_to_one():
    w = torch.linspace(-4000, 4000, 8_000_001, dtype=torch.float64)
    for prior in (vd.Normal(0.5, 2.0), vd.ScaleMixture(0.3, 2.0, 0.1), vd.StudentT(3.0, 0.5)):
        total = torch.trapezoid(prior.log_prob(w, {}).exp(), w)
        assert float(total) == pytest.approx(1.0, abs=1e-6)
