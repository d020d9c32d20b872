"""Corruptions of images: ranges, strengths, and what each does to a picture that is known."""

import math

import pytest
import torch

from experiments.corruptions import CORRUPTIONS, corrupted, rotated


def picture(count: int = 3) -> torch.Tensor:
    """A bright bar left of the middle, on black."""
    x = torch.zeros(count, 1, 28, 28)
    x[:, :, 8:20, 10:13] = 0.9
    return x


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_images_stay_images_and_a_seed_decides(kind):
    x, before = picture(), torch.get_rng_state()
    found = [corrupted(kind, x, strength, seed=4) for strength in range(1, 6)]
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(x, picture())
    for image in found:
        assert image.shape == x.shape
        assert image.isfinite().all()
        assert image.min() >= 0
        assert image.max() <= 1 + 1e-6
    assert torch.equal(found[2], corrupted(kind, x, 3, seed=4))
    far = [float((image - x).square().mean()) for image in found]
    assert 0 < far[0] < far[4]


def test_geometry_is_that_of_pixels():
    x, right = picture(), torch.zeros(3, 1, 28, 28)
    right[:, :, 15:18, 8:20] = 0.9  # the bar, turned by a quarter
    turned = rotated(x, torch.full((3,), math.pi / 2))
    assert min(float((turned - t).abs().max()) for t in (right, right.flip(2))) < 1e-4
    moved = corrupted("translate", x, 2, seed=0)
    shifts = [x.roll((a, b), (2, 3)) for a in (-2, 2) for b in (-2, 2)]
    for image in moved:
        assert min(float((image - s[0]).abs().max()) for s in shifts) < 1e-4
    assert float(corrupted("scale", x, 5, seed=0).sum() / x.sum()) == pytest.approx(0.25, rel=0.05)
    assert float(corrupted("motion blur", x, 1, 0).sum() / x.sum()) == pytest.approx(1, rel=0.01)


def test_noise_has_the_amount_that_its_strength_says():
    grey = torch.full((50, 1, 28, 28), 0.5)
    count = grey.numel()
    flipped = (corrupted("impulse noise", grey, 4, seed=1) != 0.5).double().mean()
    assert abs(float(flipped) - 0.17) < 6 * math.sqrt(0.17 * 0.83 / count)
    shot = corrupted("shot noise", grey, 1, seed=1)
    assert abs(float(shot.var()) - 0.5 / 60) < 6 * 0.5 / 60 * math.sqrt(3 / count)
