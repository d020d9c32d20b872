"""Torch layers with noisy weights. Each subclasses the torch layer it replaces."""

from torch import nn

from vardrop.layers.base import Ties, Variational
from vardrop.layers.conv import (
    Conv1d,
    Conv2d,
    Conv3d,
    ConvTranspose1d,
    ConvTranspose2d,
    ConvTranspose3d,
)
from vardrop.layers.dense import Bilinear, Embedding, Linear

# The torch layer, by exact type, and the noisy layer that takes its place.
NOISY_TYPES: dict[type[nn.Module], type[Variational]] = {
    nn.Linear: Linear,
    nn.Bilinear: Bilinear,
    nn.Embedding: Embedding,
    nn.Conv1d: Conv1d,
    nn.Conv2d: Conv2d,
    nn.Conv3d: Conv3d,
    nn.ConvTranspose1d: ConvTranspose1d,
    nn.ConvTranspose2d: ConvTranspose2d,
    nn.ConvTranspose3d: ConvTranspose3d,
}

__all__ = [
    "NOISY_TYPES",
    "Bilinear",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "Embedding",
    "Linear",
    "Ties",
    "Variational",
]
