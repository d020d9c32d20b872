"""Prediction by our `predict` and by hand-written loops, one plain forward pass = 1."""

from __future__ import annotations

import copy

import torch
from measuring import Row, Run, Settings, per_call, repeated, rows
from predict import SAMPLES
from torch import Tensor, nn

import vardrop as vd
from nets import Case, mlp


def forward(net: nn.Module, x: Tensor) -> Run:
    def run() -> Tensor:
        with torch.no_grad():
            return net(x)  # type: ignore[no-any-return]

    return run


def lrt_loop(net: nn.Module, x: Tensor) -> Run:
    """A loop written by hand: sampling on, one forward pass per draw, the mean probability."""

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


def dropout_loop(net: nn.Module, x: Tensor) -> Run:
    """`nn.Dropout` behind every activation, left on: what Monte-Carlo dropout costs by hand."""
    noisy = nn.Sequential()
    for module in copy.deepcopy(net).children():
        noisy.append(module)
        if type(module) is nn.ReLU:
            noisy.append(nn.Dropout())
    run = forward(noisy.train(), x)
    return lambda: sum(run().softmax(1) for _ in range(SAMPLES)) / SAMPLES  # type: ignore


def measure(case: Case, settings: Settings) -> list[Row]:
    plain, (x, _) = case.make().eval(), case.data()
    net = vd.convert(copy.deepcopy(plain), vd.sparse_vd()).eval()
    often = 200 if len(x) == 1 else 5
    runs: dict[str, Run] = {
        "plain": repeated(forward(plain, x), often),
        "predict": lambda: vd.predict(net, x, SAMPLES),
        "predict, weight draws": lambda: vd.predict(net, x, SAMPLES, draw="functions"),
    }
    if case.quick or not settings.quick:
        runs |= {
            "loop of local reparameterisation": lrt_loop(net, x),
            "loop of weight draws": weight_loop(net, x),
            "loop of nn.Dropout": dropout_loop(plain, x),
        }
    found = rows(f"prediction, {SAMPLES} draws", case.name, runs, settings)
    return per_call(found, {"plain": often})


def streaming(settings: Settings, samples: int = 1000) -> list[Row]:
    """Many draws, reduced as they come."""
    plain = mlp(784, 300, 100, 10).eval()
    net = vd.convert(copy.deepcopy(plain), vd.sparse_vd()).eval()
    x = torch.rand(256, 784)
    runs: dict[str, Run] = {
        "plain": repeated(forward(plain, x), 5),
        "predict": lambda: vd.predict(net, x, samples),
        "moments in one pass": lambda: vd.predict(net, x, samples, mode="moments"),
    }
    group = f"prediction, {samples} draws"
    return per_call(rows(group, "MLP 784-300-100-10 b256", runs, settings), {"plain": 5})
