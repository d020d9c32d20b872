"""Pack a net into few bytes: no more precision than the posterior allows, entropy-coded.

A file is: magic and version, the header's length, the header (JSON, deflated), the coded integers,
the tensors that are kept as they are, and a BLAKE2 checksum of everything before it.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vardrop.compression.coding import (
    Decoder,
    bits,
    differences,
    encode,
    histogram,
    quantise,
    step_for,
)
from vardrop.compression.rebuild import densify, describe, load_tensors, rebuild, refusing
from vardrop.compression.scoring import Data, Metric, score
from vardrop.errors import VardropError

_MAGIC = b"VDP\x01"
_CHECK = 16
_LARGEST = 1 << 26  # bytes of a header


@dataclass(frozen=True)
class PackReport:
    """Bytes on disk, against float32 at full size; bits a kept weight; scores where asked for."""

    bytes: int
    dense_bytes: int
    bits_per_weight: dict[str, float]
    score: float | None = None
    decoded_score: float | None = None

    @property
    def ratio(self) -> float:
        """How many times smaller the file is than the dense float32 net."""
        return self.dense_bytes / self.bytes

    def __str__(self) -> str:
        lines = [f"{self.dense_bytes} -> {self.bytes} bytes, {self.ratio:.0f} times smaller"]
        lines += [f"  {name}: {b:.2f} bits a weight" for name, b in self.bits_per_weight.items()]
        if self.score is not None:
            lines.append(f"score {self.score:.4f}, decoded {self.decoded_score:.4f}")
        return "\n".join(lines)


def pack(
    net: nn.Module,
    path: str | PathLike[str],
    tolerance: float = 1.0,
    validation: Data | None = None,
    metric: Metric | None = None,
    deviations: Mapping[str, Tensor] | None = None,
) -> PackReport:
    """Write a shrunken net with as many bits a weight as its posterior deviation allows.

    Weights (and biases) of a layer are rounded to multiples of

        step = tolerance (mean over its kept weights of 1 / sigma^2)^(-1/2)

    and coded with -log2(share of that value in its layer) bits each. Tensors without a posterior,
    such as those of BatchNorm, are kept as they are.

    Args:
        net: the result of `shrink`.
        path: the file; by custom it ends in .vdp.
        tolerance: the step in units of the posterior deviation.
        validation, metric: data and `metric(output, target)` to score the decoded net on.
        deviations: posterior deviations by parameter name; those that `shrink` left by default.

    >>> import tempfile, torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Linear(20, 2), vd.sparse_vd(log_sigma2=-4.0))
    >>> small = vd.compression.shrink(net, torch.zeros(1, 20))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     report = pack(small, folder + "/net.vdp")
    ...     same = unpack(folder + "/net.vdp", into=torch.nn.Linear(20, 2))
    >>> bool(((same.weight - small.weight).abs() < 0.07).all())
    True

    Louizos, Ullrich & Welling 2017, "Bayesian compression for deep learning", sec. 2.1 and 4.
    """
    if not tolerance > 0:
        raise VardropError(f"Expected `tolerance` to be above 0, but got {tolerance}.")
    dense, _ = densify(net)
    known = deviations if deviations is not None else getattr(net, "deviations", {})
    if not known:
        raise VardropError(
            "Expected `net` to bring posterior deviations, but got none. Pack the result of "
            "vardrop.shrink on a noisy net, or give `deviations`."
        )
    raw, per_weight = _to_bytes(dense, known, tolerance)
    Path(path).write_bytes(raw)
    full = getattr(net, "report", None)
    size = full.total("bytes")[0] if full else _float_bytes(dense)
    if validation is None or metric is None:
        return PackReport(len(raw), size, per_weight)
    decoded = _from_bytes(raw, str(path), dense)
    scores = (score(net, validation, metric), score(decoded, validation, metric))
    return PackReport(len(raw), size, per_weight, *scores)


def packed_bytes(net: nn.Module, tolerance: float = 1.0) -> int:
    """The size of the file that `pack` would write for the result of `shrink`."""
    known: Any = net.deviations
    return len(_to_bytes(net, known, tolerance)[0])


def _float_bytes(net: nn.Module) -> int:
    return sum(4 * p.numel() for p in net.parameters())


def _steps(net: nn.Module, deviations: Mapping[str, Tensor], tolerance: float) -> dict[str, float]:
    """The grid of every tensor that is rounded; a bias takes the grid of its weights."""
    tensors = net.state_dict()
    if unknown := sorted(set(deviations) - set(tensors)):
        raise VardropError(
            f"Expected `deviations` to name tensors of the net, but got {', '.join(unknown)}."
        )
    steps: dict[str, float] = {}
    for name, deviation in deviations.items():
        step = step_for(deviation, tensors[name], tolerance)
        bias = name.removesuffix("weight") + "bias"
        steps |= {key: step for key in (name, bias) if key in tensors}
    return steps


def _to_bytes(
    net: nn.Module, deviations: Mapping[str, Tensor], tolerance: float
) -> tuple[bytes, dict[str, float]]:
    steps = _steps(net, deviations, tolerance)
    codes: list[Any] = []
    parts, plain, per_weight = [], b"", {}
    for name, value in net.state_dict().items():
        tensor = value.detach().cpu()
        if name not in steps and tensor.is_floating_point():
            codes.append(None)
            plain += tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
            continue
        step = steps.get(name)
        integers = differences(tensor) if step is None else quantise(tensor, step)
        table = histogram(integers)
        codes.append([step, *table])
        parts.append((integers, table))
        if name in deviations:
            per_weight[name] = bits(table[1]) / max(int(tensor.count_nonzero()), 1)
    payload = encode(parts)
    header = zlib.compress(
        json.dumps([describe(net), codes, len(payload)], separators=(",", ":")).encode(), 9
    )
    body = _MAGIC + struct.pack("<I", len(header)) + header + payload + plain
    return body + hashlib.blake2b(body, digest_size=_CHECK).digest(), per_weight


def unpack(path: str | PathLike[str], into: nn.Module) -> nn.Module:
    """Read a net that `pack` wrote, given a net of the user's own class.

    Args:
        path: the file.
        into: a plain net of the class that was shrunken, at its full size; left as it is.

    Returns:
        A copy of `into` with the packed sizes and the rounded weights, in evaluation mode. A file
        that is damaged, foreign or of another version is an error.
    """
    if not Path(path).is_file():
        raise VardropError(f"Expected the file {path}, but it is not there.")
    return _from_bytes(Path(path).read_bytes(), str(path), into)


def _from_bytes(raw: bytes, path: str, into: nn.Module) -> nn.Module:
    if raw[: len(_MAGIC)] != _MAGIC:
        raise VardropError(
            f"Expected {path} to be written by vardrop.pack in format {_MAGIC[3]}, but got "
            f"{raw[:4]!r} at its start."
        )
    body, check = raw[:-_CHECK], raw[-_CHECK:]
    if hashlib.blake2b(body, digest_size=_CHECK).digest() != check:
        raise VardropError(
            f"Expected the checksum of {path} to match, but got another. The file is damaged."
        )
    with refusing(path):
        (length,) = struct.unpack_from("<I", body, len(_MAGIC))
        start = len(_MAGIC) + 4
        inflated = zlib.decompressobj().decompress(body[start : start + length], _LARGEST)
        plan, codes, coded = json.loads(inflated)
        net = rebuild(into, plan)
        content = body[start + length :]
        load_tensors(net, _decode(net, codes, content[:coded], content[coded:]))
    return net


def _decode(net: nn.Module, codes: list[Any], payload: bytes, plain: bytes) -> dict[str, Tensor]:
    decoder, tensors, offset = Decoder(payload), {}, 0
    empty = net.state_dict()
    if len(codes) != len(empty):
        raise VardropError(
            f"Expected the file to hold the {len(empty)} tensors of `into`, but got {len(codes)}. "
            "Give a net of the class that was packed."
        )
    for (name, like), code in zip(empty.items(), codes, strict=True):
        if code is None:
            size = like.numel() * like.element_size()
            content = torch.frombuffer(bytearray(plain[offset : offset + size]), dtype=like.dtype)
            offset += size
        else:
            step, values, counts = code
            if sum(counts) != like.numel():
                raise VardropError(
                    f"Expected {like.numel()} values for '{name}', but got {sum(counts)}. "
                    "Give a net of the class that was packed."
                )
            integers = decoder.read(values, counts)
            content = integers.cumsum(0) if step is None else integers.double() * step
        tensors[name] = content.to(like.dtype).view(like.shape)
    return tensors
