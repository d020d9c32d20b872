"""Beta-Bernoulli dropout and its rivals: how many units are left of a pretrained net.

Lee et al. 2018, "Adaptive network sparsification with dependent variational beta-Bernoulli
dropout": 294-110-71 units of LeNet-500-300 and 1.33 % error after 200 dense and 200 gated epochs.
The authors' recipe: batches of 100, pixels in [0, 1], Adam; dense 1e-3 with weight decay 1e-4;
gates 1e-2 and weights 1e-3 with weight decay 1e-4, all times 0.1 at 50 % and 70 % of the epochs.
The gates' learning rate sets the trade-off of sparsity and accuracy. Here the stages are shorter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from experiments.trainings import NETS, Watch, error, images
from vardrop.app.data import Images
from vardrop.conversion import convert
from vardrop.gates import Gate
from vardrop.noisy import relevance
from vardrop.objective import ELBO, Categorical, linear_warmup, parameter_groups
from vardrop.recipes import (
    Recipe,
    beta_bernoulli,
    dependent_beta_bernoulli,
    l0,
    sparse_vd,
    structured_pruning,
)
from vardrop.tuning import Epoch, Loop

METHODS: dict[str, Callable[[], Recipe]] = {
    "beta_bernoulli": beta_bernoulli,
    "structured_pruning": structured_pruning,
    "l0": lambda: l0(drop_rate=0.2),
    "sparse_vd": sparse_vd,
}


def sparse_units(
    seed: int,
    net: str = "lenet500-300",
    method: str = "beta_bernoulli",
    dense_epochs: int = 15,
    epochs: int = 45,
    dependent_epochs: int = 0,
    gate_lr: float = 5e-2,
    weight_lr: float = 1e-3,
    drops: Sequence[float] = (0.5, 0.8),
    warmup: int = 0,
    examples: int = 60_000,
    watch: Watch | None = None,
) -> dict[str, Any]:
    """Pretrain, sparsify, and (for Beta-Bernoulli gates) open the gates by input.

    `drops` are the fractions of the epochs at which all rates are divided by ten; `warmup` is the
    number of gated epochs over which the KL weight rises from 0 to 1.
    """
    train = partial(_train, drops=tuple(drops))
    data = images("mnist", count=examples)
    test, watch = images("mnist", "test"), watch or Watch()
    total = dense_epochs + 2 * epochs + 2 * dependent_epochs  # a gated epoch costs twice as much
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = NETS[net]()
        train(watch, "dense", model, data, seed, dense_epochs, dense_epochs / total)
        figures = {"error of the dense net, %": error(model, *test)}
        convert(model, METHODS[method]())
        stage = (watch, method, model, data, seed, epochs, 2 * epochs / total)
        curve = train(*stage, gate_lr, weight_lr, warmup=warmup)
        prune(model)
        figures |= {"error, %": error(model, *test), **_named("units", units(model))}
        figures["MACs, thousands"] = macs(units(model)) / 1000
        if dependent_epochs:
            convert(model, dependent_beta_bernoulli())
            fraction = 2 * dependent_epochs / total
            stage = (watch, "dependent", model, data, seed, dependent_epochs, fraction)
            train(*stage, gate_lr, weight_lr)
            figures["error, dependent, %"] = error(model, *test)
            active = active_units(model, test.x)
            figures |= _named("active units, dependent", active)
            figures["MACs, dependent, thousands"] = macs(active) / 1000
    return {"figures": figures, "curve": curve}


def _train(
    watch: Watch,
    name: str,
    net: nn.Module,
    data: Images,
    seed: int,
    epochs: int,
    fraction: float,
    gate_lr: float | None = None,
    weight_lr: float = 1e-3,
    drops: Sequence[float] = (0.5, 0.8),
    warmup: int = 0,
) -> list[dict[str, Any]]:
    elbo = ELBO(net, Categorical(), len(data.x), beta=0.0 if gate_lr is None else 1.0)
    groups = parameter_groups(elbo, lr=weight_lr, noise_lr=gate_lr, weight_decay=1e-4)
    loop = Loop(
        elbo,
        torch.optim.Adam(groups, fused=True),
        *data,
        epochs,
        seed=seed,
        beta=linear_warmup(0, warmup) if warmup else None,
        rate=lambda e: 0.1 ** sum(e >= drop * epochs for drop in drops),
    )

    def measure(epoch: Epoch) -> dict[str, float]:
        found = {} if gate_lr is None else _named("units", units(net))
        return {"nll": epoch.nll, "kl": epoch.kl, **found}

    return watch.fit(name, loop, measure, fraction)


def _named(title: str, counts: list[float]) -> dict[str, float]:
    return {f"{title} {i + 1}": count for i, count in enumerate(counts)}


def macs(counts: Sequence[float]) -> float:
    """Multiplications that are left of a LeNet with so many units at each gate.

    Three gates are the inputs and the hidden units of a dense net; four are the channels of both
    convolutions of LeNet-5-Caffe and the inputs and hidden units of its dense layers.
    """
    first, second, *rest = counts
    if not rest[1:]:
        return first * second + second * rest[0] + 10 * rest[0]
    kernels = 25 * (24 * 24 * first + 8 * 8 * first * second)
    return kernels + rest[0] * rest[1] + 10 * rest[1]


def units(net: nn.Module) -> list[float]:
    """Units that each gate keeps; for noisy weights, inputs with at least one weight left."""
    found = []
    for r in relevance(net).values():
        kept = r.kept.transpose(0, 1).flatten(1).any(1) if r.kind == "weight" else r.kept
        found.append(float(kept.sum()))
    return found


def active_units(net: nn.Module, x: Tensor) -> list[float]:
    """How many units of each gate are open for an input, on average."""
    gates = [m for m in net.modules() if isinstance(m, Gate)]
    counts = [0.0] * len(gates)

    def count(index: int, gate: Gate) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            mean = gate.noise.mean(inputs[0], gate.axis, gate.tensors)
            assert mean is not None
            counts[index] += float((mean != 0).sum()) / len(x)

        return hook

    hooks = [g.register_forward_pre_hook(count(i, g)) for i, g in enumerate(gates)]
    net.eval()
    with torch.no_grad():
        for part in x.split(1000):
            net(part)
    for hook in hooks:
        hook.remove()
    return counts


@torch.no_grad()
def prune(net: nn.Module) -> None:
    """Zero the weights that the method's rule drops; closed gates multiply by zero already."""
    for name, r in relevance(net).items():
        if r.kind == "weight":
            net.get_parameter(f"{name}.weight").mul_(r.kept)
