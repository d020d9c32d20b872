"""The toy problems run, leave the global generator alone, and show what they should."""

import torch

from experiments.neklyudov_uses import gaussians


def test_four_gaussians_sit_at_their_centres() -> None:
    x, y = gaussians(20_000, torch.Generator().manual_seed(0))
    centres = torch.stack([x[y == k].mean(0) for k in range(4)])
    # Eight means with a standard error of 0.007, 5.7 of them.
    assert (centres - torch.tensor([[3.0, 3], [3, 10], [10, 3], [10, 10]])).abs().max() < 0.04
