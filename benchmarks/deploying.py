"""What comes after training: convert, shrink, pack, load; and how fast the small nets run."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from measuring import Row, Run, Settings, per_call, repeated, rows, working
from predicting import forward
from pruned_nets import NETS, pruned
from torch import Tensor, nn

import vardrop as vd
from vardrop.compression import zero_pruned_weights


def _onnx(net: nn.Module, x: Tensor, threads: int) -> Run:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "net.onnx")
        vd.export_onnx(net, x, path)
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    feed = {session.get_inputs()[0].name: x.numpy()}
    return lambda: session.run(None, feed)


def _runtimes(small: nn.Module, x: Tensor, settings: Settings) -> dict[str, Callable[[], Run]]:
    """Other ways to run the shrunken net."""
    makers: dict[str, Callable[[], Run]] = {
        "shrunken, onnxruntime": lambda: _onnx(small, x, settings.threads)
    }
    if not settings.quick:
        makers["shrunken, torch.compile"] = lambda: forward(torch.compile(small), x)  # type: ignore
    return makers


def latency(settings: Settings) -> list[Row]:
    found = list[Row]()
    for name, (_, make) in NETS.items():
        noisy = pruned(name)
        for batch in (256,) if settings.quick and name == "LeNet-5" else (256, 1):
            x = torch.rand(batch, 1, 28, 28)
            dense, thin = make().eval(), zero_pruned_weights(noisy)[0]
            small = vd.shrink(noisy, x[:1], drop_inputs=True).net
            nets = {"dense": dense, "masked": thin, "shrunken": small}
            group, case = "latency of a pruned net", f"{name} b{batch}"
            others, failed = working(group, case, _runtimes(small, x, settings))
            runs = {n: forward(net, x) for n, net in nets.items()} | others
            often = 100 if batch == 1 else 5
            many = {n: repeated(run, often) for n, run in runs.items()}
            found += per_call(
                rows(group, case, many, settings, "dense"), dict.fromkeys(many, often), "dense"
            )
            found += failed
    return found


def verbs(settings: Settings) -> list[Row]:
    """Times of the verbs, one plain forward pass at batch 256 = 1."""
    found = list[Row]()
    for name, (_, make) in NETS.items():
        plain, x = make().eval(), torch.rand(256, 1, 28, 28)
        noisy = pruned(name)
        small, _ = shrunk = vd.shrink(noisy, x[:1], drop_inputs=True)
        with tempfile.TemporaryDirectory() as folder:
            packed, saved = f"{folder}/net.vdp", f"{folder}/net.safetensors"
            vd.pack(shrunk, packed)
            vd.save(small, saved)
            runs: dict[str, Run] = {
                "plain": forward(plain, x),
                "convert": lambda make=make: vd.convert(make(), vd.sparse_vd()),
                "shrink": partial(vd.shrink, noisy, x[:1], drop_inputs=True),
                "pack": partial(vd.pack, shrunk, packed),
                "unpack": partial(vd.unpack, packed, plain),
                "save": partial(vd.save, small, saved),
                "load": partial(vd.load, saved, plain),
            }
            found += rows("convert, shrink, pack, load", name, runs, settings)
    return found
