"""Random numbers of a call's own: repeatable, independent of other threads, the global left alone."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import vardrop as vd
from vardrop.functional import (
    GeneratorNoise,
    draw_from,
    normal_like,
    random_signs,
    standard_normal,
    uniform,
)
from vardrop.gates import DROPOUT_TYPES

DRAWS = {
    "uniform": lambda: uniform((50,), torch.zeros(())),
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


@pytest.mark.parametrize("plain", DROPOUT_TYPES, ids=lambda t: t.__name__)
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
        z = (units.double().mean() - 0.3) / (0.3 * 0.7 / units.numel()) ** 0.5
        assert abs(float(z)) < 5.6  # fails by chance less than once in 1e6 runs of all cases
