"""Random numbers of a call's own: repeatable, independent of other threads, the global left alone."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from scipy.stats import poisson
from torch import nn

import vardrop as vd
from tests.nets import Parts
from tests.replay import replay
from tests.z_scores import FAMILY_WISE, assert_mean, assert_variance
from vardrop.functional import GeneratorNoise, draw_from, normal_like, random_signs, standard_normal
from vardrop.functional.fast.normal_table import MIN_COUNT

DRAWS = {
    "uniform": lambda: vd.functional.uniform((50,), torch.zeros(())),
    "normal": lambda: standard_normal((50,), torch.zeros(())),
    "looked up": lambda: standard_normal((300_000,), torch.zeros(())),
    "like": lambda: normal_like(torch.zeros(5, 7)),
    "signs": lambda: random_signs((50,), torch.zeros(())),
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_seed_repeats_and_leaves_the_global_generator(name):
    before = torch.get_rng_state()
    with draw_from(GeneratorNoise(3)):
        first, second = DRAWS[name](), DRAWS[name]()
    with draw_from(GeneratorNoise(3)):
        again = DRAWS[name]()
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    assert torch.equal(before, torch.get_rng_state())


def test_an_inner_seed_gives_the_outer_one_back():
    with draw_from(GeneratorNoise(1)):
        whole = torch.stack([DRAWS["uniform"](), DRAWS["uniform"]()])
    with draw_from(GeneratorNoise(1)):
        first = DRAWS["uniform"]()
        with draw_from(GeneratorNoise(2)):
            DRAWS["uniform"]()
        assert torch.equal(whole, torch.stack([first, DRAWS["uniform"]()]))


def test_threads_draw_from_their_own_seeds():
    def drawn(seed):
        with draw_from(GeneratorNoise(seed)):
            return torch.stack([DRAWS["normal"]() for _ in range(50)])

    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(drawn, range(8)))
    assert all(torch.equal(drawn(seed), found[seed]) for seed in range(8))


SHAPES = {nn.Dropout1d: (40, 25, 7), nn.Dropout3d: (40, 25, 2, 2, 2)}


def test_an_operator_without_a_generator_does_not_wait_for_itself():
    fused = lambda net, x: net.inner(torch.native_dropout(x, 0.5, True)[0])
    net = vd.convert(Parts(fused, inner=nn.Linear(4, 3)), vd.bayes_by_backprop())
    x, answers = torch.randn(5, 4), []
    predict = lambda: answers.append(vd.predict(net, x, samples=4, seed=0))
    thread = threading.Thread(target=predict, daemon=True)
    thread.start()
    thread.join(60)
    assert len(answers) == 1


@pytest.mark.parametrize("plain", vd.gates.DROPOUT_TYPES, ids=lambda t: t.__name__)
def test_switchable_dropout_has_one_distribution_whoever_draws(plain):
    net = vd.convert(nn.Sequential(plain(0.3)), vd.mc_dropout())
    x = torch.ones(SHAPES.get(plain, (40, 25, 3, 3)))
    with draw_from(GeneratorNoise(0)):
        own = net(x)
    torches = net(x)
    assert torch.allclose(own.unique(), torches.unique(), atol=1e-6)  # a dropped and a kept value
    per_element = plain in (nn.Dropout, nn.AlphaDropout)
    for y in (own, torches):
        dropped = y < own.mean()
        units = dropped if per_element else dropped.flatten(2)[..., 0]
        assert per_element or bool((dropped.flatten(2) == units.unsqueeze(-1)).all())
        assert_mean(units.double().flatten(), 0.3)


# Normal numbers that are looked up: their distribution, and where others take their place.


_LIKE = torch.zeros(())


@pytest.mark.parametrize("size", [MIN_COUNT - 1, MIN_COUNT, 1 << 20])
def test_tails_do_not_depend_on_how_many_are_drawn(size):
    total, rounds = 1 << 23, max(1, (1 << 23) // size)
    with draw_from(GeneratorNoise(size)):
        draws = torch.cat([standard_normal((size,), _LIKE) for _ in range(rounds)])
    total = len(draws)
    cuts = (2.0, 3.0, 3.49, 3.6, 4.0, 4.5, 5.0)
    for side in (1, -1):
        for cut in cuts:
            share = 0.5 * math.erfc(cut / math.sqrt(2))
            found = int((side * draws > cut).sum())
            # Poisson: few numbers lie beyond 5.
            low, high = poisson.interval(1 - FAMILY_WISE / (8 * len(cuts)), total * share)
            assert low <= found <= high, (side, cut, found, total * share)
    assert_mean(draws.double().mul(2.5).exp(), math.exp(2.5**2 / 2))


def test_tails_lie_anywhere():
    with draw_from(GeneratorNoise(0)):
        draws = torch.stack([standard_normal((MIN_COUNT,), _LIKE) for _ in range(125)])
    rows, places = (draws.abs() > 3.5).nonzero().unbind(1)
    uniform = (places.double() + 0.5) / MIN_COUNT
    assert_mean(uniform, 0.5)
    assert_mean((uniform - 0.5).square(), 1 / 12)
    counts = torch.bincount(rows, minlength=125).double()
    assert_variance(counts, float(counts.mean()))  # a Poisson number in every call
    neighbours = draws[:, 1:][draws[:, :-1].abs() > 3.5]
    assert_mean(neighbours, 0.0)
    assert_mean(neighbours.square(), 1.0)


def test_numbers_are_independent_normal():
    x = standard_normal((100_000, 5), _LIKE)
    for power, moment in enumerate((0.0, 1.0, 0.0, 3.0), 1):
        assert_mean(x.pow(power), moment)
    for lag in (1, 2, 3, 4):  # four come from one random integer
        assert_mean(x[:, 0] * x[:, lag], 0.0)
    assert_mean(x[1:, 0].square() * x[:-1, -1].square(), 1.0)


@pytest.mark.parametrize("shape", [(262145,), (256, 1025), (3, 87383), ()])
def test_any_shape_and_double_precision_which_is_not_looked_up(shape):
    assert standard_normal(shape, _LIKE).shape == shape
    x = standard_normal(shape, _LIKE.double())
    assert (x.dtype, len(x.flatten().unique())) == (torch.float64, x.numel())


def test_draws_under_vmap_differ():
    draw = lambda _: standard_normal((300_000,), _LIKE)
    first, second = torch.vmap(draw, randomness="different")(torch.arange(2))
    assert first.shape == (300_000,)
    assert not torch.equal(first, second)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # inside torch.compile
def test_compiled_numbers_are_the_same():
    def twice():
        return standard_normal((300_000,), _LIKE), standard_normal((300_000,), _LIKE)

    compiled = torch.compile(twice, fullgraph=True)
    torch.testing.assert_close(replay(compiled), replay(twice), rtol=0, atol=0)
