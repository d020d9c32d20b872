"""Digits of unseen writers, and the same digits corrupted in seven ways."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from vardrop._core.errors import import_optional
from vardrop.app.data import Images

KINDS = ("Gaussian noise", "salt and pepper", "blur", "shift", "rotation", "contrast", "occlusion")
STRENGTHS = (1, 2, 3, 4, 5)
_TRAINED, _TESTED = 1000, 599


def split(seed: int) -> tuple[Images, Images, Images]:
    """1000 training digits, 198 validation digits, and a contiguous third of the file for testing.

    The file is ordered by writer, so the test digits were written by other people.

    Args:
        seed: chooses the third and shuffles the rest.
    """
    digits = import_optional("sklearn.datasets").load_digits()
    x, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    order = torch.arange(len(y)).roll(-(_TESTED * seed + 137 * (seed // 3)))
    test, rest = order[:_TESTED], order[_TESTED:]
    rest = rest[torch.randperm(len(rest), generator=torch.Generator().manual_seed(seed))]
    parts = (rest[:_TRAINED], rest[_TRAINED:], test)
    train, validation, tested = (Images(x[part], y[part]) for part in parts)
    return train, validation, tested


def corrupt(kind: str, x: Tensor, strength: int) -> Tensor:
    """Corrupted digits. Equal arguments give equal digits, so all models see the same ones.

    Args:
        kind: one of `KINDS`.
        x: digits of shape (N, 64), with values from 0 to 1.
        strength: one of `STRENGTHS`.
    """
    generator, level = torch.Generator().manual_seed(strength), strength - 1
    if kind == "Gaussian noise":
        return (x + 0.1 * strength * torch.randn(x.shape, generator=generator)).clamp(0, 1)
    if kind == "salt and pepper":
        fraction, u = (0.05, 0.1, 0.15, 0.2, 0.3)[level], torch.rand(x.shape, generator=generator)
        return x.where(u >= fraction, (u < fraction / 2).float())
    if kind == "blur":
        return _blur(x, (0.4, 0.6, 0.8, 1.0, 1.3)[level])
    if kind == "contrast":
        return x.mean(1, keepdim=True).lerp(x, (0.8, 0.6, 0.45, 0.3, 0.2)[level])
    if kind == "occlusion":
        corner = torch.randint(0, 9 - strength, (len(x), 2, 1), generator=generator)
        offset = torch.arange(8) - corner
        inside = (offset >= 0) & (offset < strength)
        return x.masked_fill((inside[:, 0, :, None] & inside[:, 1, None]).flatten(1), 0.0)
    return _move(x, kind, strength, 2 * math.pi * torch.rand(len(x), generator=generator))


def _blur(x: Tensor, width: float) -> Tensor:
    kernel = torch.exp(-0.5 * (torch.arange(-3, 4) / width) ** 2)
    square = kernel[:, None] * kernel / kernel.sum() ** 2
    return F.conv2d(x.view(-1, 1, 8, 8), square[None, None], padding=3).flatten(1)


def _move(x: Tensor, kind: str, strength: int, direction: Tensor) -> Tensor:
    """Digits shifted by up to 1.5 pixels, or rotated by up to 50 degrees to either side."""
    matrix = torch.eye(2, 3).repeat(len(x), 1, 1)
    if kind == "shift":
        step = torch.stack([direction.cos(), direction.sin()], 1)
        matrix[:, :, 2] = 0.3 * strength * 2 / 7 * step
    else:
        angle = math.radians(10 * strength) * (direction - math.pi).sign()
        rows = [angle.cos(), -angle.sin(), angle.sin(), angle.cos()]
        matrix[:, :, :2] = torch.stack(rows, 1).view(-1, 2, 2)
    images = x.view(-1, 1, 8, 8)
    grid = F.affine_grid(matrix, list(images.shape), align_corners=True)
    return F.grid_sample(images, grid, align_corners=True).flatten(1)
