"""Scikit-learn's 1797 digits, 8 x 8, as `Images`: 1400 to train, 397 to test."""

import torch
from sklearn.datasets import load_digits

from vardrop.app.data import Images


def digits() -> tuple[Images, Images]:
    raw = load_digits()
    order = torch.randperm(len(raw.target), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(raw.data, dtype=torch.float32)[order].view(-1, 1, 8, 8) / 16
    y = torch.tensor(raw.target)[order]
    return Images(x[:1400], y[:1400]), Images(x[1400:], y[1400:])
