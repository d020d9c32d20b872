"""The nets of the benchmarks in plain torch, the same for every environment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn


def mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Flatten()]
    for n, m in pairwise(widths):
        layers += [nn.Linear(n, m), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def lenet5() -> nn.Sequential:
    """LeNet-5-Caffe."""
    return nn.Sequential(
        nn.Conv2d(1, 20, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(800, 500), nn.ReLU(), nn.Linear(500, 10),
    )  # fmt: skip


class Block(nn.Module):
    """Two 3x3 convolutions with BatchNorm and a shortcut."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU(),
            nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out),
        )  # fmt: skip
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out)
            )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet18() -> nn.Sequential:
    """ResNet-18 for 32x32 images: 3x3 stem, no first pooling, 11.2 M weights."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    channels = 64
    for out, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [Block(channels, out, stride), Block(out, out, 1)]
        channels = out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


class EncoderLayer(nn.Module):
    """Pre-norm self-attention and feed-forward, each projection a layer that can be noisy."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.query_key_value(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.feed(self.norm2(x))


class Encoder(nn.Module):
    """A 4-layer transformer encoder over 64 positions of width 128, with a class from the mean."""

    def __init__(self, layers: int = 4, width: int = 128, heads: int = 4) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(EncoderLayer(width, heads) for _ in range(layers)))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).mean(1))


class TorchEncoder(nn.Module):
    """The same by `nn.TransformerEncoder`: attention is a layer of its own. No dropout."""

    def __init__(self, layers: int = 4, width: int = 128, heads: int = 4, feed: int = 512) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, heads, feed, dropout=0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, layers), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).mean(1))


class Recurrent(nn.Module):
    """An LSTM over 64 steps of width 128, with a class from its last state."""

    def __init__(self, width: int = 256, layers: int = 2) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(128, width, layers, batch_first=True), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


@dataclass(frozen=True)
class Case:
    """A net with its batch, and whether a quick run has it (a prediction: with loops as well).

    `by_hand` says whether every layer has a naive form beside ours.
    """

    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    quick: bool = True
    by_hand: bool = True

    def data(self) -> tuple[Tensor, Tensor]:
        return torch.rand(self.shape), torch.randint(10, self.shape[:1])

    def layouts(self) -> dict[str, torch.memory_format]:
        """What a candidate's name ends in, and the layout of its images."""
        if len(self.shape) < 4:
            return {"": torch.contiguous_format}
        return {"": torch.contiguous_format, ", channels-last": torch.channels_last}


TRAIN = [
    Case("MLP 784-300-100-10 b100", lambda: mlp(784, 300, 100, 10), (100, 784)),
    Case("MLP 784-1000-1000-10 b128", lambda: mlp(784, 1000, 1000, 10), (128, 784)),
    Case("LeNet-5-Caffe b128", lenet5, (128, 1, 28, 28)),
    Case("ResNet-18 CIFAR b64", resnet18, (64, 3, 32, 32), quick=False),
    Case("transformer encoder, 4 layers b32", Encoder, (32, 64, 128), quick=False),
    Case("nn.TransformerEncoder, 4 layers b32", TorchEncoder, (32, 64, 128), by_hand=False),
    Case("nn.LSTM 2 x 256, 64 steps b32", Recurrent, (32, 64, 128), by_hand=False),
]
PREDICT = [
    Case("MLP 784-300-100-10 b256", lambda: mlp(784, 300, 100, 10), (256, 1, 28, 28)),
    Case("MLP 784-300-100-10 b1", lambda: mlp(784, 300, 100, 10), (1, 1, 28, 28)),
    Case("LeNet-5 b256", lenet5, (256, 1, 28, 28), quick=False),
    Case("LeNet-5 b1", lenet5, (1, 1, 28, 28)),
]
