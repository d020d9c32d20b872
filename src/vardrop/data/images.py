"""Image sets: what they hold, and the reader of MNIST's own format (IDX), checked by MD5."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from vardrop.data.download import find

_FILES = {
    "train": ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"),
    "test": ("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"),
}


class Images(NamedTuple):
    """Pixels in [0, 1], float32, (N, channels, height, width), and labels (N,)."""

    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class ImageSet:
    """How the splits of an image set are read, and the MD5 of their files where it is known.

    A set with the split "train" can be trained on; any other is for tests out of distribution.
    """

    read: Callable[[str, str | Path | None], Images]  # (split, directory)
    splits: tuple[str, ...] = ("train", "test")
    md5: Mapping[str, tuple[str, str]] = field(default_factory=dict)


def idx_set(name: str, source: str | None, **md5: tuple[str, str]) -> ImageSet:
    """A set in the IDX format.

    Args:
        name: of its folder.
        source: the address of its files; None where they have to be put in place by hand.
        md5: of the compressed images and labels, by split.
    """

    def read(split: str, directory: str | Path | None) -> Images:
        pixels, labels = (
            gzip.decompress(find(name, file, known, source, directory))
            for file, known in zip(_FILES[split], md5[split], strict=True)
        )
        _, count, rows, columns = struct.unpack(">4I", pixels[:16])
        x = torch.frombuffer(bytearray(pixels[16:]), dtype=torch.uint8)
        y = torch.frombuffer(bytearray(labels[8:]), dtype=torch.uint8)
        return Images(x.view(count, 1, rows, columns).float().div_(255), y.long())

    return ImageSet(read, tuple(md5), md5)
