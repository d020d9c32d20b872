"""Files that are found in a directory or, failing that, fetched once into a cache and checked."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from vardrop.errors import VardropError


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
    try:
        raw = path.read_bytes()
    except OSError as failure:
        raise VardropError(f"Expected to read {path}, but got: {failure.strerror}.") from failure
    if (found := hashlib.md5(raw).hexdigest()) != md5:
        raise VardropError(
            f"Expected the MD5 of {path} to be {md5}, but got {found}. The file is damaged or of "
            "another version; fetch it again."
        )
    return raw


def _fetch(name: str, file: str, md5: str, source: str | None, absent: Path) -> Path:
    """Download a file into pooch's cache; the file there, if it was fetched before."""
    remedy = (
        "Put the original files there, or set VARDROP_DATA to the directory that holds "
        f"{absent.parent.name}/{file}."
    )
    if source is None:
        raise VardropError(f"Expected the file {absent}, but it is not there. {remedy}")
    try:
        import pooch
    except ImportError as missing:
        raise VardropError(
            f"Expected the file {absent}, but it is not there. {remedy} "
            "With `pip install 'vardrop[app]'`, which brings pooch, it is fetched."
        ) from missing
    pooch.get_logger().setLevel("WARNING")
    try:
        fetched = pooch.retrieve(
            url=source + file,
            known_hash=f"md5:{md5}",
            fname=file,
            path=pooch.os_cache("vardrop") / name,
        )
    except Exception as failure:
        reason = " ".join(str(failure).split())[:200]
        raise VardropError(
            f"Expected the file {absent}, but it is not there, and fetching it from "
            f"{source} failed: {reason}. {remedy}"
        ) from failure
    return Path(fetched)
