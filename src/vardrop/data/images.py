"""MNIST-like image sets from their original IDX files, checked by MD5."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from vardrop.data.download import find
from vardrop.errors import VardropError

_FILES = {
    "train": ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"),
    "test": ("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"),
}
# MD5 of the compressed files: train images, train labels, test images, test labels.
IMAGE_SETS: dict[str, dict[str, tuple[str, str]]] = {
    "mnist": {
        "train": ("f68b3c2dcbeaaa9fbdd348bbdeb94873", "d53e105ee54ea40749a09fcbcd1e9432"),
        "test": ("9fb629c4189551a2d022fa330f9573f3", "ec29112dd5afa0611ce80d1b7f02629c"),
    },
    "fashion-mnist": {
        "train": ("8d4fb7e6c68d591d4c3dfef9ec88bf0d", "25c81989df183df01b3e8a0aad5dffbe"),
        "test": ("bef4ecab320f06d8554ea6380940ec79", "bb300cfdad3c16e7a12a480ee83cd310"),
    },
    "notmnist": {
        "test": ("2c87c839a4ef9b238846600eec8c35b7", "7ea9118cbafd0f6e3ee2ad771d782a01"),
    },
}


class Images(NamedTuple):
    """Pixels in [0, 1], float32, (N, channels, height, width), and labels (N,)."""

    x: Tensor
    y: Tensor


def load_images(name: str, split: str = "train", directory: str | Path | None = None) -> Images:
    """Read one split of an image set.

    Args:
        name: "mnist", "fashion-mnist" or "notmnist" (test only).
        split: "train" or "test".
        directory: see `data_directory`; what is not there is fetched into a cache.
    """
    if name not in IMAGE_SETS or split not in IMAGE_SETS[name]:
        known = ", ".join(f"{n}/{s}" for n, splits in IMAGE_SETS.items() for s in splits)
        raise VardropError(f"Expected an image set among {known}, but got {name}/{split}.")
    pixels, labels = (
        gzip.decompress(find(name, file, md5, directory))
        for file, md5 in zip(_FILES[split], IMAGE_SETS[name][split], strict=True)
    )
    _, count, rows, columns = struct.unpack(">4I", pixels[:16])
    x = torch.frombuffer(bytearray(pixels[16:]), dtype=torch.uint8)
    y = torch.frombuffer(bytearray(labels[8:]), dtype=torch.uint8)
    return Images(x.view(count, 1, rows, columns).float().div_(255), y.long())
