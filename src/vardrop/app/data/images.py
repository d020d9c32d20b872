"""Image sets: their files, found or fetched and checked by MD5, and MNIST's own format (IDX)."""

from __future__ import annotations

import gzip
import hashlib
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from vardrop._core.errors import VardropError, needed


def data_directory(directory: str | Path | None = None) -> Path | None:
    """The directory of the image sets: the argument, or VARDROP_DATA, or None."""
    chosen = directory or os.environ.get("VARDROP_DATA")
    return Path(chosen) if chosen else None


def find(
    name: str, file: str, md5: str, source: str | None, directory: str | Path | None = None
) -> bytes:
    """The content of one file of a set, checked by MD5: from the directory, the cache, the source.

    A set without a source has to be put in place by hand.
    """
    root = data_directory(directory)
    path = Path(name) / file if root is None else root / name / file
    if root is None or not path.is_file():
        path = _fetch(name, file, md5, source, path)
    raw = path.read_bytes()
    if (found := hashlib.md5(raw).hexdigest()) != md5:
        raise VardropError(f"Expected the MD5 of {path} to be {md5}, but got {found}.")
    return raw


def _fetch(name: str, file: str, md5: str, source: str | None, absent: Path) -> Path:
    """Download a file into pooch's cache; the file there, if it was fetched before."""
    problem = f"Expected the file {absent}, but it is not there"
    remedy = f"Put it there, or set VARDROP_DATA to the directory that holds {name}/{file}."
    if source is None:
        raise VardropError(f"{problem}. {remedy}")
    pooch = needed("pooch")
    pooch.get_logger().setLevel("WARNING")
    cache = pooch.os_cache("vardrop") / name
    try:
        return Path(pooch.retrieve(source + file, f"md5:{md5}", file, cache))
    except (OSError, ValueError) as failure:
        reason = " ".join(str(failure).split())[:200]
        text = f"{problem}, and fetching it from {source} failed: {reason}. {remedy}"
        raise VardropError(text) from failure


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
