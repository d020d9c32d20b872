"""What comes after training: convert, shrink, pack, load; and how fast the small nets run."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from measuring import Row, Run, Settings, figure, per_call, repeated, rows
from nets import lenet5, mlp
from predicting import forward
from torch import Tensor, nn

import vardrop as vd
from vardrop.compression import SparseLinear, masked

NETS: dict[str, Callable[[], nn.Module]] = {
    "LeNet-300-100": lambda: mlp(784, 300, 100, 10),
    "LeNet-5": lenet5,
}
KEPT = 0.02


@torch.no_grad()
def pruned(net: nn.Module, kept: float = KEPT) -> nn.Module:
    """A noisy net in which most weights are dead, gathered in rows and columns as in training."""
    noisy = vd.convert(net, vd.sparse_vd(log_sigma2=-16.0))
    generator = torch.Generator().manual_seed(0)
    for module in noisy.modules():
        if type(module) in (vd.Linear, vd.Conv2d):
            weight: Tensor = module.weight  # type: ignore[assignment]
            outs = torch.rand(weight.shape[0], generator=generator)
            score = outs[:, None] * torch.rand(weight.shape[1], generator=generator)
            dead = score < score.flatten().quantile(1 - min(1.0, 4 * kept))
            dead = dead.view(*dead.shape, *(1,) * (weight.dim() - 2)).expand_as(weight)
            module.log_sigma2[dead] = 10.0  # type: ignore[index, operator]
    return noisy


def _sparse(net: nn.Module) -> nn.Module:
    net = copy.deepcopy(net)
    for name, module in list(net.named_modules()):
        if type(module) is nn.Linear:
            net.set_submodule(name, SparseLinear(module))
    return net


def _onnx(net: nn.Module, x: Tensor, threads: int, folder: str) -> Run:
    import onnxruntime

    path = str(Path(folder) / "net.onnx")
    vd.export_onnx(net, path, x)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    feed = {session.get_inputs()[0].name: x.numpy()}
    return lambda: session.run(None, feed)


def _runtimes(small: nn.Module, x: Tensor, settings: Settings) -> tuple[dict[str, Run], list[str]]:
    """Other runtimes of the shrunken net, and why one is absent."""
    makers: dict[str, Callable[[], Run]] = {}
    runs, absent = dict[str, Run](), []
    with tempfile.TemporaryDirectory() as folder:
        makers["shrunken, onnxruntime"] = lambda: _onnx(small, x, settings.threads, folder)
        if not settings.quick:
            makers["shrunken, torch.compile"] = lambda: forward(torch.compile(small), x)  # type: ignore
        for name, make in makers.items():
            try:
                run = make()
                run()
                runs[name] = run
            except Exception as error:
                absent.append(f"{name}: {type(error).__name__}: {error}"[:200])
    return runs, absent


def latency(settings: Settings) -> list[Row]:
    found = list[Row]()
    for name, make in NETS.items():
        noisy = pruned(make())
        for batch in (256, 1):
            x = torch.rand(batch, 1, 28, 28)
            dense, thin = make().eval(), masked(noisy)[0]
            small = vd.shrink(noisy, x[:1], drop_inputs=True)
            nets = {
                "dense": dense, "masked": thin, "CSR": _sparse(thin), "shrunken": small,
                "shrunken, CSR where it wins": vd.sparsify(small, x),
            }  # fmt: skip
            others, absent = _runtimes(small, x, settings)
            runs = {n: forward(net, x) for n, net in nets.items()} | others
            often = 100 if batch == 1 else 5
            many = {n: repeated(run, often) for n, run in runs.items()}
            group, case = "latency of a pruned net", f"{name} b{batch}"
            found += per_call(
                rows(group, case, many, settings, "dense"), dict.fromkeys(many, often), "dense"
            )
            found += [figure(group, case, "absent", None, reason) for reason in absent]
    return found


def verbs(settings: Settings) -> list[Row]:
    """Times of the verbs, one plain forward pass at batch 256 = 1."""
    found = list[Row]()
    for name, make in NETS.items():
        plain, x = make().eval(), torch.rand(256, 1, 28, 28)
        noisy = pruned(make())
        small = vd.shrink(noisy, x[:1], drop_inputs=True)
        with tempfile.TemporaryDirectory() as folder:
            packed, saved = f"{folder}/net.vdp", f"{folder}/net.safetensors"
            vd.pack(small, packed)
            vd.save(small, saved)
            runs: dict[str, Run] = {
                "plain": forward(plain, x),
                "convert": lambda make=make: vd.convert(make(), vd.sparse_vd()),
                "shrink": partial(vd.shrink, noisy, x[:1], drop_inputs=True),
                "pack": partial(vd.pack, small, packed),
                "unpack": partial(vd.unpack, packed, plain),
                "save": partial(vd.save, small, saved),
                "load": partial(vd.load, saved, plain),
            }
            found += rows("convert, shrink, pack, load", name, runs, settings)
    return found
