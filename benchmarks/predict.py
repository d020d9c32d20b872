"""Speed and memory of prediction, as ratios in one run: python benchmarks/predict.py [rounds].

32 draws by `predict` against loops over the same net, and against the loops of other libraries
where they are installed. Every round runs every contender once, in turn; medians of processor time
on one thread, so that other work on the machine weighs on all alike.
"""

from __future__ import annotations

import copy
import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import vardrop as vd
from vardrop.experiments.nets import lenet5, mlp
from vardrop.prediction import predict
from vardrop.prediction.cost import calls, chunk_size
from vardrop.prediction.moments import propagate

SAMPLES = 32
Run = Callable[[], object]


def lrt_loop(net: nn.Module, x: Tensor) -> Run:
    """What a user writes by hand: the noise on, a forward pass a draw, the mean probability."""

    def run() -> Tensor:
        with torch.no_grad(), vd.sampling(net):
            total = torch.zeros(())
            for _ in range(SAMPLES):
                total = total + net(x).softmax(1)
            return total / SAMPLES

    return run


def weight_loop(net: nn.Module, x: Tensor) -> Run:
    """A loop that draws all weights for every pass, as weight-sampling libraries do."""
    sampled = copy.deepcopy(net)
    for module in sampled.modules():
        if hasattr(module, "estimator"):
            module.estimator = vd.weight_sample
    return lrt_loop(sampled, x)


def _plain_layers(net: nn.Module, make: Callable[[nn.Module], nn.Module]) -> nn.Module:
    copied = copy.deepcopy(net)
    for name, child in list(copied.named_children()):
        if isinstance(child, nn.Linear | nn.Conv2d):
            setattr(copied, name, make(child))
    return copied


def torchbnn_net(net: nn.Module) -> nn.Module:
    bnn = importlib.import_module("torchbnn")

    def make(layer: nn.Module) -> nn.Module:
        if isinstance(layer, nn.Linear):
            return bnn.BayesLinear(0, 0.1, layer.in_features, layer.out_features)
        return bnn.BayesConv2d(0, 0.1, layer.in_channels, layer.out_channels, layer.kernel_size[0])

    return _plain_layers(net, make)


def bayesian_torch_net(net: nn.Module) -> nn.Module:
    layers = importlib.import_module("bayesian_torch.layers")

    class First(nn.Module):
        """Their layers return (output, kl)."""

        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x, return_kl=False)

    def make(layer: nn.Module) -> nn.Module:
        if isinstance(layer, nn.Linear):
            return First(layers.LinearReparameterization(layer.in_features, layer.out_features))
        return First(
            layers.Conv2dReparameterization(
                layer.in_channels, layer.out_channels, layer.kernel_size[0]
            )
        )

    return _plain_layers(net, make)


def cplxmodule_net(net: nn.Module) -> nn.Module:
    relevance = importlib.import_module("cplxmodule.nn.relevance")

    def make(layer: nn.Module) -> nn.Module:
        if isinstance(layer, nn.Linear):
            return relevance.LinearVD(layer.in_features, layer.out_features)
        return relevance.Conv2dVD(layer.in_channels, layer.out_channels, layer.kernel_size[0])

    return _plain_layers(net, make).train()  # its layers are noisy in training mode only


PEERS = {
    "torchbnn": torchbnn_net,
    "bayesian-torch": bayesian_torch_net,
    "cplxmodule": cplxmodule_net,
}


def peer_loops(plain: nn.Module, x: Tensor) -> tuple[dict[str, Run], list[str]]:
    """Loops over the nets of other libraries, and the names of those that are absent."""
    found: dict[str, Run] = {}
    absent = []
    for name, build in PEERS.items():
        try:
            net = build(plain)
        except ImportError:
            absent.append(name)
            continue

        def run(net: nn.Module = net) -> Tensor:
            with torch.no_grad():
                return sum(net(x).softmax(1) for _ in range(SAMPLES)) / SAMPLES

        found[name] = run
    return found, absent


def medians(contenders: dict[str, Run], rounds: int) -> dict[str, float]:
    """Median processor seconds of each, all contenders in turn in every round."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for run in contenders.values():
        run()
    for _ in range(rounds):
        for name, run in contenders.items():
            start = time.process_time()
            run()
            times[name].append(time.process_time() - start)
    return {name: statistics.median(t) for name, t in times.items()}


def repeated(run: Run, times: int) -> Run:
    def many() -> None:
        for _ in range(times):
            run()

    return many


def speed(name: str, build: Callable[[], nn.Module], batch: int, rounds: int) -> dict[str, object]:
    plain = build().eval()
    net = vd.convert(copy.deepcopy(plain), vd.sparse_vd()).eval()
    x = torch.randn(batch, 1, 28, 28)
    peers, absent = peer_loops(plain, x)

    def forward() -> Tensor:
        with torch.no_grad():
            return plain(x)

    often = 200 if batch == 1 else 5
    found = medians(
        {
            "plain": repeated(forward, often),
            "moments": repeated(lambda: propagate(net, x), often),
            "auto": lambda: predict(net, x, SAMPLES),
            "local": lambda: predict(net, x, SAMPLES, draw="local"),
            "weights": lambda: predict(net, x, SAMPLES, draw="weights"),
            "loop of local reparameterisation": lrt_loop(net, x),
            "loop of weight draws": weight_loop(net, x),
            **peers,
        },
        rounds,
    )
    unit = found["plain"] / often
    found["plain"], found["moments"] = unit, found["moments"] / often
    loops = ["loop of local reparameterisation", "loop of weight draws", *peers]
    return {
        "case": f"{name}, batch {batch}",
        "forwards": {k: round(v / unit, 1) for k, v in found.items()},
        "faster than": {k: round(found[k] / found["auto"], 2) for k in loops},
        "auto / better way": round(found["auto"] / min(found["local"], found["weights"]), 2),
        "absent": absent,
    }


def _resident(field: str) -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field))


def peak(run: Run) -> int:
    """Kilobytes above the resident set before the call (Linux)."""
    with open("/proc/self/clear_refs", "w") as reset:
        reset.write("5")
    before = _resident("VmRSS")
    run()
    return _resident("VmHWM") - before


def memory(samples: int = 10_000) -> dict[str, object]:
    """Peak memory of many draws against that of one chunk."""
    net = vd.convert(mlp(784, 300, 100, 10), vd.sparse_vd()).eval()
    x = torch.randn(256, 1, 28, 28)
    chunk = chunk_size(calls(net, x), len(x), samples, 2**28)
    predict(net, x, chunk, draw="local", chunk=chunk)  # what a first call leaves behind
    one = peak(lambda: predict(net, x, chunk, draw="local", chunk=chunk))
    many = peak(lambda: predict(net, x, samples, draw="local", chunk=chunk))
    return {
        "case": "memory, MLP, batch 256",
        "chunk": chunk,
        "one chunk, kB": one,
        f"{samples} draws, kB": many,
        "ratio": round(many / one, 2),
    }


def memory_in_a_process_of_its_own() -> None:
    """With an allocator that gives freed tensors back, so that what is resident is in use."""
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}
    subprocess.run([sys.executable, __file__, "memory"], env=environment, check=True)


def wide() -> nn.Module:
    return mlp(784, 1000, 1000, 1000, 10)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if sys.argv[1:] == ["memory"]:
        print(json.dumps(memory()), flush=True)
        return
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    memory_in_a_process_of_its_own()
    cases = [
        ("MLP 784-300-100-10", lambda: mlp(784, 300, 100, 10)),
        ("LeNet-5", lenet5),
        ("MLP 784-1000-1000-1000-10", wide),
    ]
    for name, build in cases:
        for batch in (1, 32, 256):
            print(json.dumps(speed(name, build, batch, rounds)), flush=True)


if __name__ == "__main__":
    main()
