"""Pack a net into few bytes: weights rounded as the posterior allows, then entropy-coded.

A file is: magic and version, the header's length, the header (JSON, deflated), what is coded, the
tensors that are kept as they are, and a BLAKE2 checksum of everything before it.

The integers of a tensor are coded by constriction's range coder under their own histogram, which
is in the header: -log2(count / total) bits each, so zeros and coarse values are nearly free.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from vardrop._core.checks import check_net, check_number
from vardrop._core.errors import VardropError, import_optional
from vardrop._core.files import write_atomically
from vardrop.compression.mask import grid_steps
from vardrop.compression.probes import Data, Metric, check_plain, score
from vardrop.compression.save import (
    PACKED,
    as_path,
    layer_sizes,
    load_tensors,
    report_malformed_file,
    resize_to,
    to_dense,
)
from vardrop.compression.shrink import Shrunk

_MARK = PACKED + b"\x01"
_CHECK = 16  # bytes of the checksum
_EXACT = 2**53  # integers up to here survive in a double


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
        lines += [f"  {name}: {b:.2f} bits per weight" for name, b in self.bits_per_weight.items()]
        if self.score is not None:
            lines.append(f"score {self.score:.4f}, decoded {self.decoded_score:.4f}")
        return "\n".join(lines)


def pack(
    model: Shrunk | nn.Module,
    path: str | PathLike[str],
    tolerance: float = 1.0,
    validation: Data | None = None,
    metric: Metric | None = None,
    *,
    standard_deviations: Mapping[str, Tensor] | None = None,
) -> PackReport:
    """Write a small net with as many bits per weight as its posterior allows.

    The weights of a layer are rounded to multiples of

        step = tolerance (mean over its kept weights of 1 / sigma^2)^(-1/2)

    and coded with -log2(fraction of that value in its layer) bits each. Tensors without a
    posterior, such as biases and those of BatchNorm, are kept as they are. The file is decoded and
    compared before it is written, and it is there whole or not at all.

    Args:
        model: the result of `shrink`, whose plan has the standard deviations and the size of the
            net before; or a plain net, for which sigma is 1/32 of the root mean square of a layer's
            weights.
        path: the file; conventionally it ends in .vdp.
        tolerance: the step in posterior standard deviations.
        validation, metric: data and `metric(output, target)` to score the decoded net on.
        standard_deviations: of the posterior by parameter name, instead of those of the plan.

    >>> import tempfile, torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Linear(20, 2), vd.sparse_vd(log_sigma2=-4.0))
    >>> small = vd.shrink(net, torch.zeros(1, 20))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     report = pack(small, folder + "/net.vdp")
    ...     same = unpack(folder + "/net.vdp", into=torch.nn.Linear(20, 2))
    >>> bool(((same.weight - small.net.weight).abs() < 0.07).all())
    True

    Louizos, Ullrich & Welling 2017, "Bayesian compression for deep learning", sec. 2.1 and 4.
    """
    check_number("tolerance", tolerance, above=0)
    if (validation is None) != (metric is None):
        raise VardropError("Expected `validation` and `metric` together, but got only one of them.")
    net, plan = model if isinstance(model, Shrunk) else (model, None)
    target = as_path(path)
    check_plain(net)
    dense, _ = to_dense(net)
    if standard_deviations is None:
        standard_deviations = plan.standard_deviations if plan else {}
    steps = grid_steps(dense, standard_deviations, tolerance)
    raw, per_weight = _to_bytes(dense, steps)
    decoded = _from_bytes(raw, str(path), dense)
    _compare(dense, decoded, steps)
    size = plan.total("bytes")[0] if plan else sum(4 * p.numel() for p in dense.parameters())
    scores: tuple[float, ...] = ()
    if validation is not None and metric is not None:
        scores = (score(net, validation, metric), score(decoded, validation, metric))
    write_atomically(target, raw)
    return PackReport(len(raw), size, per_weight, *scores)


def count_packed_bytes(shrunk: Shrunk) -> int:
    """The size of the file that `pack` would write."""
    return len(
        _to_bytes(shrunk.net, grid_steps(shrunk.net, shrunk.plan.standard_deviations, 1.0))[0]
    )


def _compare(net: nn.Module, decoded: nn.Module, steps: dict[str, float]) -> None:
    """Refuse a file whose tensors are not those of the net within half a step."""
    tensors = decoded.state_dict()
    for name, value in net.state_dict().items():
        tensor, back = value.detach().cpu(), tensors[name].cpu()
        if name in steps:
            off = (tensor.double() - back.double()).abs()
            # Half a step, and what the tensor's own precision rounds away.
            allowed = 0.5 * steps[name] + torch.finfo(tensor.dtype).eps * tensor.double().abs()
            same = bool((off <= 1.001 * allowed).all())
        else:
            same = tensor.dtype == back.dtype and torch.equal(_raw(tensor), _raw(back))
        if not same:
            raise VardropError(
                f"Expected '{name}' to be the same after decoding, but got other numbers. "
                "Nothing was written."
            )


def _raw(tensor: Tensor) -> Tensor:
    """The bytes of a tensor: NaN equals itself there."""
    return tensor.contiguous().flatten().view(torch.uint8)


def _to_bytes(net: nn.Module, steps: dict[str, float]) -> tuple[bytes, dict[str, float]]:
    import_optional("numpy", "compress")
    codes: list[Any] = []
    parts, plain, per_weight = [], [], {}
    for name, value in net.state_dict().items():
        tensor, step = value.detach().cpu(), steps.get(name)
        if step is None and (tensor.is_floating_point() or tensor.is_complex()):
            codes.append(None)
            plain.append(_raw(tensor).numpy().tobytes())
            continue
        integers = _differences(tensor.long()) if step is None else _quantise(name, tensor, step)
        values, counts = integers.flatten().unique(return_counts=True)
        table = [_differences(values).tolist(), counts.tolist()]
        codes.append([step, *table])
        parts.append((integers, table))
        if step is not None:
            count = counts.double()
            bits = abs(float((count * (count / count.sum()).log2()).sum()))
            per_weight[name] = bits / max(int(tensor.count_nonzero()), 1)
    payload = _encode(parts)
    header = [layer_sizes(net), codes, len(payload)]
    packed = zlib.compress(json.dumps(header, separators=(",", ":")).encode(), 9)
    body = _MARK + struct.pack("<I", len(packed)) + packed + payload + b"".join(plain)
    return body + hashlib.blake2b(body, digest_size=_CHECK).digest(), per_weight


def unpack(path: str | PathLike[str], into: nn.Module) -> nn.Module:
    """Read a net that `pack` wrote, given a net of the user's own class.

    Args:
        path: the file.
        into: a plain net of the class that was shrunken, at its full size; left as it is.

    Returns:
        A copy of `into` with the packed sizes and the rounded weights, in evaluation mode. A file
        that is damaged, from elsewhere or of another version is an error.
    """
    check_net(into, "into")
    source = as_path(path)
    if not source.is_file():
        raise VardropError(f"Expected the file {source}, but it is not there.")
    return _from_bytes(source.read_bytes(), str(path), into)


def _from_bytes(raw: bytes, path: str, into: nn.Module) -> nn.Module:
    start = raw[: len(_MARK)]
    if start != _MARK:
        other = " Read what vardrop.save wrote with vardrop.load." if b"vardrop" in raw else ""
        raise VardropError(
            f"Expected {path} to be written by vardrop.pack in format 1, but got "
            f"{start!r} at its start.{other}"
        )
    body, check = raw[:-_CHECK], raw[-_CHECK:]
    if hashlib.blake2b(body, digest_size=_CHECK).digest() != check:
        raise VardropError(
            f"Expected the checksum of {path} to match, but got another. The file is damaged."
        )
    with report_malformed_file(path):
        (length,) = struct.unpack_from("<I", body, len(start))
        begin = len(start) + 4
        plan, *codes = json.loads(_inflate(body[begin : begin + length], into))
        net = resize_to(into, plan)
        load_tensors(net, _decode(net, codes, body[begin + length :]))
    return net


def _inflate(header: bytes, into: nn.Module) -> bytes:
    """The header, at most as long as one that describes every number of `into` by itself."""
    most = 1 << 16
    most += sum(256 + 48 * t.numel() for t in into.state_dict().values())
    inflater = zlib.decompressobj()
    text = inflater.decompress(header, most)
    if inflater.unconsumed_tail:
        raise VardropError(
            f"Expected a header of at most {most} bytes, but got a longer one. "
            "Give a net of the class that was packed."
        )
    return text


def _decode(net: nn.Module, header: list[Any], content: bytes) -> dict[str, Tensor]:
    codes, offset = header
    decoder, tensors = Decoder(content[:offset]), {}
    empty = net.state_dict()
    if len(codes) != len(empty):
        raise VardropError(
            f"Expected the file to hold the {len(empty)} tensors of `into`, but got {len(codes)}. "
            "Give a net of the class that was packed."
        )
    for (name, like), code in zip(empty.items(), codes, strict=True):
        if code is None:
            start, offset = offset, offset + like.numel() * like.element_size()
            raw = torch.frombuffer(bytearray(content[start:offset]), dtype=like.dtype)
            tensors[name] = raw.view(like.shape)
            continue
        step, *table = code
        _check_histogram(name, table, like.numel())
        if step is not None:
            check_number(f"the step of '{name}'", step, above=0)
        integers = decoder.read(*table)
        numbers = integers.cumsum(0) if step is None else integers.double() * step
        tensors[name] = numbers.to(like.dtype).view(like.shape)
    return tensors


def _quantise(name: str, tensor: Tensor, step: float) -> Tensor:
    """The nearest multiples of a step, as integers; an error where they are none or all zero."""
    exact = tensor.detach().double()
    if not step > 0 or float(exact.abs().max()) / step > _EXACT:
        raise VardropError(
            f"Expected '{name}' to lie within 2^53 steps of {step:g}, but got a number of size "
            f"{float(exact.abs().max()):g}. Raise `tolerance` or `standard_deviations`."
        )
    integers = (exact / step).round().long()
    if bool(exact.any()) and not bool(integers.any()):
        raise VardropError(
            f"Expected some weights of '{name}' to survive rounding, but got steps of {step:g} "
            f"for numbers up to {float(exact.abs().max()):g}. Lower `tolerance`."
        )
    return integers


def _differences(tensor: Tensor) -> Tensor:
    """The first entry and the steps from one entry to the next."""
    flat = tensor.flatten()
    return torch.diff(flat, prepend=flat.new_zeros(1))


def _check_histogram(name: str, table: list[Any], size: int) -> None:
    """Refuse a table that is no histogram of so many integers, before anything is made of it."""
    values, counts = table
    integers = all(type(n) is int for n in (*values, *counts))
    if not integers or len(values) != len(counts) or min(counts, default=1) < 1:
        raise VardropError(f"Expected a histogram for '{name}', but got something else.")
    if sum(counts) != size:
        raise VardropError(
            f"Expected {size} values for '{name}', but got {sum(counts)}. "
            "Give a net of the class that was packed."
        )


def _model(counts: list[int]) -> Any:
    numpy = import_optional("numpy", "compress")
    constriction = import_optional("constriction", "compress")
    fractions = numpy.array(counts, dtype=numpy.float64) / sum(counts)
    return constriction.stream.model.Categorical(fractions, perfect=False)


def _encode(parts: list[tuple[Tensor, list[list[int]]]]) -> bytes:
    """Code integer tensors one after the other, each under its histogram."""
    numpy = import_optional("numpy", "compress")
    encoder = import_optional("constriction", "compress").stream.queue.RangeEncoder()
    for integers, (steps, counts) in parts:
        if len(counts) > 1:
            values = torch.tensor(steps).cumsum(0)
            index = torch.searchsorted(values, integers.flatten())
            encoder.encode(index.numpy().astype(numpy.int32), _model(counts))
    return bytes(encoder.get_compressed().astype("<u4").tobytes())


class Decoder:
    """Reads back, in order, what `encode` wrote."""

    def __init__(self, payload: bytes) -> None:
        numpy = import_optional("numpy", "compress")
        words = numpy.frombuffer(payload, dtype="<u4").astype(numpy.uint32)
        self._decoder = import_optional("constriction", "compress").stream.queue.RangeDecoder(words)

    def read(self, steps: list[int], counts: list[int]) -> Tensor:
        """The next tensor, flat."""
        values = torch.tensor(steps, dtype=torch.long).cumsum(0)
        if len(counts) <= 1:
            return values.expand(sum(counts))
        index = self._decoder.decode(_model(counts), sum(counts))
        return values[torch.from_numpy(index).long()]
