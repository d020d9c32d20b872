"""Normal numbers that are looked up: their distribution, and where others take their place."""

import pytest
import torch

from tests.statistics import assert_mean
from vardrop.functional import standard_normal
from vardrop.functional.drawing import _NORMALS

_LIKE = torch.zeros(())


def test_the_values_are_those_of_a_normal_distribution():
    values = _NORMALS.double()
    assert values.mean().abs() < 1e-9
    assert (values.square().mean() - 1).abs() < 1e-6
    assert (values.pow(4).mean() - 3).abs() < 2.5e-4
    below = torch.special.ndtr(values)
    rank = torch.arange(len(values)) / len(values)
    assert (below > rank - 1e-6).all()
    assert (below < rank + 1 / len(values) + 1e-6).all()


def test_numbers_are_independent_normal():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        x = standard_normal((100_000, 5), _LIKE)
    for power, moment in enumerate((0.0, 1.0, 0.0, 3.0), 1):
        assert_mean(x.pow(power), moment)
    for lag in (1, 2, 3, 4):  # four come from one random integer
        assert_mean(x[:, 0] * x[:, lag], 0.0)
    assert_mean(x[1:, 0].square() * x[:-1, -1].square(), 1.0)


@pytest.mark.parametrize("shape", [(4097,), (64, 65), (3, 1366), ()])
def test_any_shape(shape):
    assert standard_normal(shape, _LIKE).shape == shape


def test_the_generator_decides():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        first = standard_normal((5000,), _LIKE)
        second = standard_normal((5000,), _LIKE)
        torch.manual_seed(3)
        assert torch.equal(standard_normal((5000,), _LIKE), first)
    assert not torch.equal(first, second)


def test_double_precision_is_not_looked_up():
    x = standard_normal((5000,), _LIKE.double())
    assert x.dtype == torch.float64
    assert len(x.unique()) == len(x)


def test_draws_under_vmap_differ():
    x = torch.vmap(lambda _: standard_normal((5000,), _LIKE), randomness="different")(
        torch.arange(2)
    )
    assert x.shape == (2, 5000)
    assert not torch.equal(x[0], x[1])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # inside torch.compile
def test_compiled_numbers_are_the_same():
    def twice():
        return standard_normal((5000,), _LIKE), standard_normal((5000,), _LIKE)

    compiled = torch.compile(twice, fullgraph=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        expected = twice()
        torch.manual_seed(0)
        first, second = compiled()
    assert torch.equal(first, expected[0])
    assert torch.equal(second, expected[1])
