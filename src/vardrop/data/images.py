"""MNIST-like image sets from their original IDX files, checked by MD5."""

from __future__ import annotations

import gzip
import hashlib
import os
import struct
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

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
    """Pixels in [0, 1], float32, (N, 1, 28, 28), and labels (N,)."""

    x: Tensor
    y: Tensor


def data_directory(directory: str | Path | None = None) -> Path:
    """The directory of the image sets: the argument, VARDROP_DATA, or ../shared/data."""
    chosen = directory or os.environ.get("VARDROP_DATA") or "../shared/data"
    return Path(chosen)


def _read(path: Path, md5: str) -> bytes:
    if not path.is_file():
        raise VardropError(
            f"Expected the file {path}, but it is not there. Put the original IDX files there, or "
            "set VARDROP_DATA to their directory."
        )
    raw = path.read_bytes()
    if (found := hashlib.md5(raw).hexdigest()) != md5:
        raise VardropError(
            f"Expected the MD5 of {path} to be {md5}, but got {found}. The file is damaged or of "
            "another version; fetch it again."
        )
    return gzip.decompress(raw)


def load_images(name: str, split: str = "train", directory: str | Path | None = None) -> Images:
    """Read one split of an image set.

    Args:
        name: "mnist", "fashion-mnist" or "notmnist" (test only).
        split: "train" or "test".
        directory: see `data_directory`.
    """
    if name not in IMAGE_SETS or split not in IMAGE_SETS[name]:
        known = ", ".join(f"{n}/{s}" for n, splits in IMAGE_SETS.items() for s in splits)
        raise VardropError(f"Expected an image set among {known}, but got {name}/{split}.")
    root = data_directory(directory) / name
    image_md5, label_md5 = IMAGE_SETS[name][split]
    pixels = _read(root / _FILES[split][0], image_md5)
    labels = _read(root / _FILES[split][1], label_md5)
    _, count, rows, columns = struct.unpack(">4I", pixels[:16])
    x = torch.frombuffer(bytearray(pixels[16:]), dtype=torch.uint8)
    y = torch.frombuffer(bytearray(labels[8:]), dtype=torch.uint8)
    return Images(x.view(count, 1, rows, columns).float().div_(255), y.long())
