"""The toy problems run, leave the global generator alone, and show what they should."""

import pytest
import torch

from experiments.neklyudov_uses import four_gaussians, gaussians, regression_band


def test_four_gaussians_sit_at_their_centres() -> None:
    x, y = gaussians(20_000, torch.Generator().manual_seed(0))
    centres = torch.stack([x[y == k].mean(0) for k in range(4)])
    # Eight means with a standard error of 0.007, 5.7 of them.
    assert (centres - torch.tensor([[3.0, 3], [3, 10], [10, 3], [10, 10]])).abs().max() < 0.04


@pytest.mark.parametrize("run", [lambda: four_gaussians(2, 3), lambda: regression_band(2, 3)])
def test_runs_and_leaves_the_generator(run) -> None:
    before = torch.get_rng_state()
    run()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.slow
def test_two_variance_units_tell_four_classes() -> None:
    found = four_gaussians()
    assert found.deterministic == 0.25  # no means: one answer for all
    assert found.ensemble > 0.98


@pytest.mark.slow
def test_band_is_wider_where_there_is_no_data() -> None:
    band = regression_band()
    inside = band.x.abs() <= 1
    width = band.high - band.low
    assert (band.mean - torch.sin(3 * band.x))[inside].square().mean().sqrt() < 0.15
    assert width[~inside].mean() > 1.3 * width[inside].mean()
