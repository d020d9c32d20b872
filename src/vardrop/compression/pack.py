"""Pack a model into few bytes: weights rounded as the posterior allows, then entropy-coded.

A file contains the magic bytes and version, the length of the header, the header (JSON, deflated),
the coded integers, the bytes of all other tensors, and a BLAKE2 checksum of everything before it.

The integers of a tensor are coded by constriction's range coder under their histogram, which is in
the header. A value takes -log2(count / total) bits, so zeros and coarse values are nearly free.
"""

from __future__ import annotations

import hashlib
import json
import math
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
from vardrop._core.files import check_readable, write_atomically
from vardrop.compression.layer_views import layout_of
from vardrop.compression.probes import check_plain
from vardrop.compression.save import (
    PACKED,
    as_path,
    layer_sizes,
    load_tensors,
    report_malformed_file,
    resize_to,
)
from vardrop.compression.shrink import Shrunk

_MARK = PACKED + b"\x01"
_Code = tuple[float | None, list[int], list[int]]  # step, levels and counts of a tensor
_CHECK = 16  # bytes of the checksum
_EXACT = 2**53  # integers up to here are exact in a double
_ASSUMED = 1 / 32  # of the root mean square of a layer's weights: about six bits per weight
_GRID = 3  # significant digits of a step, so that it is short in a file


@dataclass(frozen=True)
class PackReport:
    """The size of a packed file.

    Args:
        bytes: of the file.
        dense_bytes: of the dense model in float32.
        bits_per_weight: bits per nonzero weight of each rounded tensor.
    """

    bytes: int
    dense_bytes: int
    bits_per_weight: dict[str, float]

    @property
    def ratio(self) -> float:
        """The bytes of the dense float32 model, divided by the bytes of the file."""
        return self.dense_bytes / self.bytes

    def __str__(self) -> str:
        lines = [f"{self.dense_bytes} -> {self.bytes} bytes, {self.ratio:.0f} times smaller"]
        lines += [f"  {name}: {b:.2f} bits per weight" for name, b in self.bits_per_weight.items()]
        return "\n".join(lines)


def pack(
    model: Shrunk | nn.Module,
    path: str | PathLike[str],
    tolerance: float = 1.0,
    *,
    standard_deviations: Mapping[str, Tensor] | None = None,
) -> PackReport:
    """Write a small model with as many bits per weight as its posterior requires.

    The weights of a layer are rounded to multiples of

        step = tolerance (mean over its nonzero weights of 1 / sigma^2)^(-1/2)

    and coded with -log2(fraction of that value in its layer) bits each. Tensors without a
    posterior, such as biases and BatchNorm statistics, are stored exactly. The file is decoded and
    compared before it is written. An existing file is replaced only by a complete one.

    Args:
        model: the result of `shrink`, whose plan has the standard deviations and the size of the
            model before; or a plain model, for which sigma is 1/32 of the root mean square of a
            layer's weights.
        path: the file, which ends in .vdp by convention.
        tolerance: the step in posterior standard deviations.
        standard_deviations: posterior standard deviations by parameter name, instead of the
            standard deviations of the plan.

    Returns:
        The bytes of the file, and bits per weight.

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
    net, plan = model if isinstance(model, Shrunk) else (model, None)
    target = as_path(path)
    check_plain(net)
    if standard_deviations is None:
        standard_deviations = plan.standard_deviations if plan else {}
    steps = _grid_steps(net, standard_deviations, tolerance)
    raw, per_weight = _to_bytes(net, steps)
    decoded = _from_bytes(raw, str(path), net).state_dict()
    for name, original in net.state_dict().items():
        tensor, back = original.detach().cpu(), decoded[name].cpu()
        same = tensor.dtype == back.dtype and torch.equal(_raw(tensor), _raw(back))
        if name in steps:
            off = (tensor.double() - back.double()).abs()
            # Half a step, and the rounding of the tensor's precision.
            allowed = 0.5 * steps[name] + torch.finfo(tensor.dtype).eps * tensor.double().abs()
            same = bool((off <= 1.001 * allowed).all())
        if not same:
            raise VardropError(
                f"Expected '{name}' to be the same after decoding, but got other numbers. "
                "Nothing was written."
            )
    size = plan.total("bytes")[0] if plan else sum(4 * p.numel() for p in net.parameters())
    write_atomically(target, raw)
    return PackReport(len(raw), size, per_weight)


def _grid_steps(
    net: nn.Module, deviations: Mapping[str, Tensor], tolerance: float
) -> dict[str, float]:
    """The rounding step of every weight: `tolerance` posterior standard deviations.

    With the harmonic mean of the variances, the mean of (step / deviation)^2 is tolerance^2. If
    there are no deviations, they are assumed to be a fraction of the root mean square of the
    weights.
    """
    tensors, steps = net.state_dict(), {}
    if unknown := sorted(set(deviations) - set(tensors)):
        raise VardropError(
            f"Expected `standard_deviations` to name tensors of the model, but got "
            f"{', '.join(unknown)}. Pack the result of vardrop.shrink unchanged."
        )
    for name, deviation in (deviations or _assume_deviations(net)).items():
        weight = tensors[name]
        if deviation.shape != weight.shape:
            raise VardropError(
                f"Expected the standard deviations of '{name}' to have the shape "
                f"{tuple(weight.shape)}, but got {tuple(deviation.shape)}."
            )
        if not bool(weight.isfinite().all()):
            raise VardropError(f"Expected '{name}' to hold finite numbers, but got NaN or inf.")
        nonzero = deviation.to(weight.device)[weight != 0].double()
        if not bool((nonzero.isfinite() & (nonzero > 0)).all()):
            raise VardropError(
                f"Expected the standard deviations of '{name}' to be positive and finite, but got "
                f"{float(nonzero.min())} to {float(nonzero.max())}."
            )
        steps[name] = 1.0
        if nonzero.numel():
            # Relative to the smallest, so that no square exceeds the range of a double.
            smallest = float(nonzero.min())
            mean = float((smallest / nonzero).square().mean())
            steps[name] = float(f"{tolerance * smallest / math.sqrt(mean):.{_GRID}g}")
    return steps


def _assume_deviations(net: nn.Module) -> dict[str, Tensor]:
    deviations = {}
    for name, weight in net.named_parameters(remove_duplicate=False):
        owner, _, key = name.rpartition(".")
        if key == "weight" and weight.dim() > 1 and layout_of(net.get_submodule(owner)):
            nonzero = weight.detach()[weight != 0].double()
            size = float(nonzero.square().mean().sqrt()) if nonzero.numel() else 1.0
            deviations[name] = torch.full_like(weight, _ASSUMED * size)
    return deviations


def _sort_tensors(net: nn.Module) -> dict[str, Tensor]:
    """The state dict in an order that does not depend on when parameters were registered.

    For example, `torch.nn.utils.prune.remove` registers a weight again, after the bias.
    """
    tensors, positions = net.state_dict(), {}
    owners = list(dict.fromkeys(name.rpartition(".")[0] for name in tensors))
    parameters = {name for name, _ in net.named_parameters(remove_duplicate=False)}
    for name in tensors:
        owner, _, key = name.rpartition(".")
        order = (False, "bias" in key, key) if name in parameters else (True, "bias" in key, "")
        positions[name] = (owners.index(owner), *order)
    return {name: tensors[name] for name in sorted(tensors, key=positions.__getitem__)}


def _raw(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, in which NaN equals NaN."""
    return tensor.contiguous().flatten().view(torch.uint8)


def _to_bytes(net: nn.Module, steps: dict[str, float]) -> tuple[bytes, dict[str, float]]:
    """The file, and the bits per nonzero weight of every rounded tensor."""
    import_optional("numpy", "compress")  # which the next package needs, too
    queue = import_optional("constriction", "compress").stream.queue.RangeEncoder()
    codes: list[_Code | None] = []
    exact, per_weight = [], {}
    for name, original in _sort_tensors(net).items():
        tensor, step = original.detach().cpu(), steps.get(name)
        if step is None and (tensor.is_floating_point() or tensor.is_complex()):
            codes.append(None)
            exact.append(_raw(tensor).numpy().tobytes())
            continue
        integers = _differences(tensor.long()) if step is None else _quantise(name, tensor, step)
        levels, index, counts = integers.flatten().unique(return_inverse=True, return_counts=True)
        codes.append((step, _differences(levels).tolist(), counts.tolist()))
        if len(levels) > 1:  # a constant takes no bits
            queue.encode(index.int().numpy(), _distribution(counts))
        if step is not None:
            count = counts.double()
            bits = abs(float((count * (count / count.sum()).log2()).sum()))
            per_weight[name] = bits / max(int(tensor.count_nonzero()), 1)
    payload = queue.get_compressed().astype("<u4").tobytes()
    header = json.dumps([layer_sizes(net), codes, len(payload)], separators=(",", ":"))
    packed = zlib.compress(header.encode(), 9)
    body = _MARK + struct.pack("<I", len(packed)) + packed + payload + b"".join(exact)
    return body + hashlib.blake2b(body, digest_size=_CHECK).digest(), per_weight


def unpack(path: str | PathLike[str], into: nn.Module) -> nn.Module:
    """Read a model that `pack` wrote.

    Args:
        path: the file.
        into: a plain model of the class that was shrunk, at its full size. It is left unchanged.

    Returns:
        A copy of `into` with the packed sizes and the rounded weights, in evaluation mode. A file
        that is corrupted, of another format or of another version raises an error.
    """
    check_net(into, "into")
    source = as_path(path)
    check_readable(source)
    return _from_bytes(source.read_bytes(), str(path), into)


def _from_bytes(raw: bytes, path: str, into: nn.Module) -> nn.Module:
    start = raw[: len(_MARK)]
    if start != _MARK:
        other = " Read files of vardrop.save with vardrop.load." if b"vardrop" in raw else ""
        raise VardropError(
            f"Expected {path} to be written by vardrop.pack in format 1, but got "
            f"{start!r} at its start.{other}"
        )
    body, check = raw[:-_CHECK], raw[-_CHECK:]
    if hashlib.blake2b(body, digest_size=_CHECK).digest() != check:
        raise VardropError(f"{path} is corrupted (checksum mismatch).")
    with report_malformed_file(path):
        (length,) = struct.unpack_from("<I", body, len(start))
        begin = len(start) + 4
        # At most as long as a header that lists every number of `into`.
        limit = (1 << 16) + sum(256 + 48 * t.numel() for t in into.state_dict().values())
        inflater = zlib.decompressobj()
        header = inflater.decompress(body[begin : begin + length], limit)
        if inflater.unconsumed_tail:
            raise VardropError(
                f"Expected a header of at most {limit} bytes, but got a longer one. "
                "Pass a model of the class that was packed."
            )
        plan, codes, offset = json.loads(header)
        net = resize_to(into, plan)
        load_tensors(net, _decode(net, codes, offset, body[begin + length :]))
    return net


def _decode(
    net: nn.Module, codes: list[_Code | None], offset: int, content: bytes
) -> dict[str, Tensor]:
    numpy = import_optional("numpy", "compress")
    words = numpy.frombuffer(content[:offset], dtype="<u4").astype(numpy.uint32)
    queue = import_optional("constriction", "compress").stream.queue.RangeDecoder(words)
    tensors, empty = dict[str, Tensor](), _sort_tensors(net)
    if len(codes) != len(empty):
        raise VardropError(
            f"Expected the file to hold the {len(empty)} tensors of `into`, but got {len(codes)}. "
            "Pass a model of the class that was packed."
        )
    for (name, like), code in zip(empty.items(), codes, strict=True):
        if code is None:
            start, offset = offset, offset + like.numel() * like.element_size()
            numbers = torch.frombuffer(bytearray(content[start:offset]), dtype=like.dtype)
            tensors[name] = numbers.view(like.shape)
            continue
        step, differences, counts = code
        integers = all(type(n) is int for n in (*differences, *counts))
        positive = integers and len(differences) == len(counts) and min(counts, default=1) >= 1
        if not positive or sum(counts) != like.numel():
            raise VardropError(
                f"Expected a histogram of {like.numel()} values for '{name}', but got another one. "
                "Pass a model of the class that was packed."
            )
        if step is not None:
            check_number(f"the step of '{name}'", step, above=0)
        index = torch.zeros(like.numel(), dtype=torch.long)
        if len(counts) > 1:
            decoded = queue.decode(_distribution(torch.tensor(counts)), like.numel())
            index = torch.from_numpy(decoded).long()
        coded = torch.tensor(differences, dtype=torch.long).cumsum(0)[index]
        numbers = coded.cumsum(0) if step is None else coded.double() * step
        tensors[name] = numbers.to(like.dtype).view(like.shape)
    return tensors


def _quantise(name: str, tensor: Tensor, step: float) -> Tensor:
    """The nearest multiples of a step, as integers."""
    exact = tensor.detach().double()
    largest = float(exact.abs().max())
    if not step > 0 or largest / step > _EXACT:
        raise VardropError(
            f"Expected '{name}' to be within 2^53 steps of {step:g}, but got a number of size "
            f"{largest:g}. Raise `tolerance` or `standard_deviations`."
        )
    integers = (exact / step).round().long()
    if bool(exact.any()) and not bool(integers.any()):
        raise VardropError(
            f"Expected some weights of '{name}' to survive rounding, but got steps of {step:g} "
            f"for numbers up to {largest:g}. Lower `tolerance`."
        )
    return integers


def _differences(tensor: Tensor) -> Tensor:
    """The first entry, and the differences between consecutive entries."""
    flat = tensor.flatten()
    return torch.diff(flat, prepend=flat.new_zeros(1))


def _distribution(counts: Tensor) -> Any:
    """The distribution of the entries of a tensor with this histogram."""
    stream = import_optional("constriction", "compress").stream
    return stream.model.Categorical((counts.double() / counts.sum()).numpy(), perfect=False)
