"""Corruptions of digits in the manner of MNIST-C (Mu & Gilmer 2019), written anew for batches.

Each takes images (N, 1, H, W) in [0, 1], a strength from 1 to 5 and a generator. Strengths are
those of the paper's code where it has some. Where it has one kind only, ours grows: the width of
the stripes (3 is the paper's) and the number of dotted or zigzag lines (1 is the paper's). Glass
takes each pixel from a random neighbour where the paper swaps pixels in turn, motion is a one-sided
normal kernel along a line, fog is a sum of octaves of smooth noise. Canny edges are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Generator, Tensor
from torch.nn import functional

Corruption = Callable[[Tensor, int, Generator], Tensor]


def _uniform(low: float, high: float, shape: tuple[int, ...], generator: Generator) -> Tensor:
    return low + (high - low) * torch.rand(shape, generator=generator)


def _signs(shape: tuple[int, ...], generator: Generator) -> Tensor:
    return 2.0 * torch.randint(2, shape, generator=generator) - 1


def _blurred(x: Tensor, sigma: float) -> Tensor:
    """Convolved with a normal density, edges repeated."""
    reach = max(1, round(4 * sigma))
    line = torch.exp(-0.5 * (torch.arange(-reach, reach + 1) / sigma) ** 2)
    line = (line / line.sum()).view(1, 1, 1, -1)
    wide = functional.pad(x, (reach, reach, 0, 0), mode="replicate")
    wide = functional.conv2d(wide, line)
    return functional.conv2d(
        functional.pad(wide, (0, 0, reach, reach), mode="replicate"), line.transpose(2, 3)
    )


def _warped(x: Tensor, matrix: Tensor) -> Tensor:
    """Where each pixel p of the result is found: A p + t in pixels around the centre, (N, 2, 3)."""
    height, width = x.shape[2:]
    size = torch.tensor([(width - 1) / 2, (height - 1) / 2])
    theta = matrix.clone()
    theta[:, :, :2] = matrix[:, :, :2] * size / size[:, None]
    theta[:, :, 2] = matrix[:, :, 2] / size
    grid = functional.affine_grid(theta, list(x.shape), align_corners=True)
    return functional.grid_sample(x, grid, align_corners=True)


def _affine(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    zero = torch.zeros_like(a)
    return torch.stack([torch.stack([a, b, zero], 1), torch.stack([c, d, zero], 1)], 1)


def shot_noise(x: Tensor, strength: int, generator: Generator) -> Tensor:
    """Counts of photons."""
    count = (60, 25, 12, 5, 3)[strength - 1]
    return (torch.poisson(x * count, generator=generator) / count).clamp(0, 1)


def impulse_noise(x: Tensor, strength: int, generator: Generator) -> Tensor:
    """Pixels that are black or white by chance."""
    amount = (0.03, 0.06, 0.09, 0.17, 0.27)[strength - 1]
    chance = torch.rand(x.shape, generator=generator)
    return x.where(chance >= amount, (chance < amount / 2).to(x))


def glass_blur(x: Tensor, strength: int, generator: Generator) -> Tensor:
    """Blurred, pixels taken from neighbours, blurred again."""
    sigma, reach, times = ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2))[
        strength - 1
    ]
    x = _blurred(x, sigma)
    height, width = x.shape[2:]
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    for _ in range(times):
        shape = (2, len(x), height, width)
        moved = torch.randint(-reach, reach + 1, shape, generator=generator)
        moved = moved * torch.randint(2, shape[1:], generator=generator)
        down, across = (rows + moved[0]).clamp(0, height - 1), (columns + moved[1])
        where = down * width + across.clamp(0, width - 1)
        x = x.flatten(2).gather(2, where.flatten(1)[:, None]).view_as(x)
    return _blurred(x, sigma).clamp(0, 1)


def motion_blur(x: Tensor, strength: int, generator: Generator) -> Tensor:
    """Averaged along a line of a random angle of at most 45 degrees."""
    reach, sigma = ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15))[strength - 1]
    angle = _uniform(-math.pi / 4, math.pi / 4, (len(x),), generator)
    weight = torch.exp(-0.5 * (torch.arange(reach + 1) / sigma) ** 2)
    weight = weight / weight.sum()
    matrix = _affine(*(torch.full_like(angle, v) for v in (1.0, 0.0, 0.0, 1.0)))
    total = torch.zeros_like(x)
    for far, share in enumerate(weight.tolist()):
        matrix[:, 0, 2], matrix[:, 1, 2] = far * angle.cos(), far * angle.sin()
        total += share * _warped(x, matrix)
    return total


def shear(x: Tensor, strength: int, generator: Generator) -> Tensor:
    """Sheared to either side."""
    angle = 0.2 * strength * _signs((len(x),), generator)
    return _warped(x, _affine(torch.ones_like(angle), -angle.sin(), angle * 0, angle.cos()))


def scale(x: Tensor, strength: int, generator: Generator) -> Tensor:
    """Smaller, down to half the size."""
    factor = torch.full((len(x),), 1 / (1 - 0.1 * strength))
    return _warped(x, _affine(factor, 0 * factor, 0 * factor, factor))


def rotated(x: Tensor, angle: Tensor) -> Tensor:
    """Turned by angles in radians, (N,)."""
    return _warped(x, _affine(angle.cos(), -angle.sin(), angle.sin(), angle.cos()))


def rotate(x: Tensor, strength: int, generator: Generator) -> Tensor:
    """Turned to either side, by up to one radian."""
    return rotated(x, 0.2 * strength * _signs((len(x),), generator))


def brightness(x: Tensor, strength: int, generator: Generator) -> Tensor:
    """All pixels lighter."""
    return (x + 0.1 * strength).clamp(0, 1)


def translate(x: Tensor, strength: int, generator: Generator) -> Tensor:
    """Moved along both axes."""
    matrix = torch.zeros(len(x), 2, 3)
    matrix[:, 0, 0] = matrix[:, 1, 1] = 1
    matrix[:, :, 2] = strength * _signs((len(x), 2), generator)
    return _warped(x, matrix)


def stripe(x: Tensor, strength: int, generator: Generator) -> Tensor:
    """Inverted on the left and on the right."""
    width = (3, 5, 7, 9, 11)[strength - 1]
    sides = torch.zeros(x.shape[3], dtype=torch.bool)
    sides[:width] = sides[-width:] = True
    return torch.where(sides, 1 - x, x)


def fog(x: Tensor, strength: int, generator: Generator) -> Tensor:
    """Behind smooth noise of many scales."""
    amount, decay = ((1.5, 2.0), (2.0, 2.0), (2.5, 1.7), (2.5, 1.5), (3.0, 1.4))[strength - 1]
    total = torch.zeros_like(x)
    for octave in range(5):
        noise = torch.rand((len(x), 1, 2**octave + 1, 2**octave + 1), generator=generator)
        size = list(x.shape[2:])
        smooth = functional.interpolate(noise, size, mode="bilinear", align_corners=True)
        total += smooth / decay**octave
    low, high = total.amin((2, 3), keepdim=True), total.amax((2, 3), keepdim=True)
    brightest = x.amax((2, 3), keepdim=True)
    return (x + amount * (total - low) / (high - low)) * brightest / (brightest + amount)


def spatter(x: Tensor, strength: int, generator: Generator) -> Tensor:
    """Drops of mud."""
    middle, spread, sigma, least, soft = (
        (0.65, 0.3, 4, 0.69, 0.6),
        (0.65, 0.3, 3, 0.68, 0.6),
        (0.65, 0.3, 2, 0.68, 0.5),
        (0.65, 0.3, 1, 0.65, 1.5),
        (0.67, 0.4, 1, 0.65, 1.5),
    )[strength - 1]
    liquid = _blurred(middle + spread * torch.randn(x.shape, generator=generator), sigma)
    mask = _blurred((liquid > least).to(x), soft)
    mask = mask.where(mask >= 0.8, 0.0)
    return (x * (1 - mask) + 63 / 255 * mask).clamp(0, 1)


def _ink(x: Tensor, rows: Tensor) -> Tensor:
    """Drawn over: ink around one row of each column, (N, W), none where it is NaN."""
    height = torch.arange(x.shape[2], dtype=x.dtype)[:, None]
    far = (height - rows[:, None]).abs().nan_to_num(nan=math.inf).clamp(max=2.3 - 1e-6)
    return (x + (torch.log(1 - far / 2.3) + 1).clamp(0, 1)[:, None]).clamp(0, 1)


def dotted_line(x: Tensor, strength: int, generator: Generator) -> Tensor:
    """As many dotted lines from side to side."""
    width = x.shape[3]
    along = torch.linspace(0, 1, width)
    drawn = torch.arange(width) // 2 % 2 == 1
    for _ in range(strength):
        ends = _uniform(0, x.shape[2] - 1, (2, len(x), 1), generator)
        x = _ink(x, (ends[0] + (ends[1] - ends[0]) * along).where(drawn, math.nan))
    return x


def zigzag(x: Tensor, strength: int, generator: Generator) -> Tensor:
    """As many zigzag lines, with teeth two pixels high."""
    columns = torch.arange(x.shape[3], dtype=x.dtype)
    teeth = 2 * (2 / math.pi) * torch.asin(torch.sin(math.pi / 4 * columns))
    inside = (columns >= 2) & (columns <= x.shape[3] - 3)
    for _ in range(strength):
        start = _uniform(0, x.shape[2] - 1, (len(x), 1), generator)
        fall = _uniform(-5, 5, (len(x), 1), generator) * columns / x.shape[3]
        x = _ink(x, (start + fall + teeth).where(inside, math.nan))
    return x


CORRUPTIONS: dict[str, Corruption] = {
    function.__name__.replace("_", " "): function
    for function in (
        *(shot_noise, impulse_noise, glass_blur, motion_blur, shear, scale, rotate),
        *(brightness, translate, stripe, fog, spatter, dotted_line, zigzag),
    )
}


def corrupted(name: str, x: Tensor, strength: int, seed: int) -> Tensor:
    """Images of one kind and strength; the seed decides what is random.

    >>> corrupted("stripe", torch.zeros(1, 1, 28, 28), 3, seed=0).mean()
    tensor(0.5000)
    """
    return CORRUPTIONS[name](x, strength, torch.Generator().manual_seed(seed))
