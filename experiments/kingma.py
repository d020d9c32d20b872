"""Kingma, Salimans & Welling 2015: the KL fits, table 1, the cost of an epoch, figure 1."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from experiments.diagnostics import gradient_variance
from experiments.trainings import Record, Watch, error, images, mlp
from vardrop import functional
from vardrop.conversion import convert
from vardrop.estimators import (
    Estimator,
    flipout,
    local_reparameterization,
    per_example,
    weight_sample,
)
from vardrop.layers import Variational
from vardrop.noisy import kl
from vardrop.objective import ELBO, Categorical, parameter_groups
from vardrop.recipes import Recipe, binary_dropout, gaussian_dropout, variational_dropout
from vardrop.tuning import Callback, Epoch, Loop, Position

_ESTIMATORS: dict[str, Estimator] = {
    "local": local_reparameterization,
    "per_example": per_example,
    "flipout": flipout,
    "per_batch": weight_sample,
}


def kl_approximations(seed: int) -> dict[str, Any]:
    """The largest distance of each approximation from the exact KL, log alpha in [-12, 12]."""
    grid = torch.linspace(-12, 12, 2401, dtype=torch.float64)
    exact = functional.log_uniform_kl(0.5 * torch.exp(-grid))
    forms = {
        "sigmoid": (functional.log_uniform_kl_sigmoid(grid), grid <= 12),
        "cubic, alpha <= 1": (functional.log_uniform_kl_cubic(grid), grid <= 0),
        "cubic at log alpha 2": (functional.log_uniform_kl_cubic(grid), (grid - 2).abs() < 5e-3),
        "ARD": (0.5 * nn.functional.softplus(-grid), grid <= 12),
    }
    figures = {name: float((f - exact).abs()[part].max()) for name, (f, part) in forms.items()}
    curve = [
        {"log_alpha": float(grid[i]), "exact": float(exact[i])}
        | {name: float(f[i]) for name, (f, part) in forms.items() if bool(part[i])}
        for i in range(0, len(grid), 20)
    ]
    return {"figures": figures, "curve": curve}


def _type_b(width: int) -> nn.Module:
    net = mlp(784, width, width, width, 10)
    convert(net, variational_dropout("B", drop_rate=0.2), include="1")
    return convert(net, variational_dropout("B", drop_rate=0.5), exclude="1")


def _rows(x: Tensor, y: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(size), y.split(size), strict=True))


def gradient_variances(
    seed: int,
    epochs: int = 10,
    width: int = 1024,
    batch: int = 1000,
    batches: int = 60,
    example_batches: int = 4,
    examples: int = 60_000,
    watch: Watch | None = None,
) -> dict[str, Any]:
    """Table 1: variance of the gradient of N * mean loss, top and bottom layer, by estimator."""
    x, y = images("mnist", count=examples)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = _type_b(width)
        elbo = ELBO(net, Categorical(), num_data=len(x), kl_value_every=10)
        optimizer = torch.optim.Adam(parameter_groups(elbo, lr=1e-3), fused=True)
        loop = Loop(elbo, optimizer, x, y, epochs, batch_size=batch, seed=seed)
        (watch or Watch()).fit("type B", loop, fraction=0.3)  # the measurement takes longer
        order = torch.randperm(len(x))
        parts = [(x[i], y[i]) for i in order.split(min(batch, len(x) // batches))[:batches]]
        # Examples with weights of their own are independent: the variance of a batch follows from
        # that of its parts, and there are more pairs of those.
        small = [p for xs, ys in parts[:example_batches] for p in _rows(xs, ys, 50)]
        figures: dict[str, float] = {}
        for name, estimator in {"none": None, **_ESTIMATORS}.items():
            loader = small if name == "per_example" else parts
            found = gradient_variance(
                net, loader, estimator=estimator, noise=estimator is not None, num_data=len(x)
            )
            part = len(loader[0][0]) / len(parts[0][0])
            figures[f"{name}, top"] = found["7.weight"].value * part
            figures[f"{name}, bottom"] = found["1.weight"].value * part
    for name in ("none", "per_example", "flipout", "per_batch"):
        figures[f"{name} / local, top"] = figures[f"{name}, top"] / figures["local, top"]
    return {"figures": figures}


def epoch_seconds(
    seed: int, width: int = 1024, batch: int = 1000, small_batch: int = 50, rows: int = 1000
) -> dict[str, Any]:
    """CPU seconds of one training epoch of 60 000 examples, measured on `rows` of them.

    A weight draw per example needs the memory of `small_batch` times all weights, so a batch is run
    in parts of that size, whose gradients are summed: one KL and one step of the optimiser for a
    batch, as with local reparameterisation. Both ways are timed at both sizes of the batch.
    """
    figures = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        x, y = torch.rand(rows, 784), torch.randint(10, (rows,))
        for size in (batch, small_batch):
            for name, estimator, part in (
                ("local", local_reparameterization, size),
                ("per example", per_example, small_batch),
            ):
                net = _type_b(width)
                for layer in (m for m in net.modules() if isinstance(m, Variational)):
                    layer.estimator = estimator
                elbo = ELBO(net, Categorical(), num_data=60_000)
                optimizer = torch.optim.Adam(parameter_groups(elbo, lr=1e-3), fused=True)
                _step(elbo, optimizer, x[:part], y[:part], part)
                start = time.process_time()
                for batch_x, batch_y in _rows(x, y, size):
                    _step(elbo, optimizer, batch_x, batch_y, part)
                took = (time.process_time() - start) * 60_000 / rows
                figures[f"{name}, batches of {size}, seconds an epoch"] = took
    local, example, small_local, small_example = figures.values()
    figures["per example / local, same batches"] = example / local
    figures["per example / local, same small batches"] = small_example / small_local
    return {"figures": figures}


def _step(elbo: ELBO, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, part: int) -> None:
    """One step on a batch; in parts where they are smaller than the batch."""
    optimizer.zero_grad(set_to_none=True)
    if part >= len(x):
        elbo(x, y).loss.backward()
    else:
        for some_x, some_y in _rows(x, y, part):
            (Categorical()(elbo.net(some_x), some_y) * len(some_x) / len(x)).backward()
        (kl(elbo.net) / elbo.num_data).backward()
    optimizer.step()


METHODS: dict[str, tuple[Recipe, Recipe] | None] = {  # for the inputs, for the hidden units
    "none": None,
    "binary": (binary_dropout(0.2), binary_dropout(0.5)),
    "gaussian_a": (gaussian_dropout(0.2, "A"), gaussian_dropout(0.5, "A")),
    "gaussian_b": (gaussian_dropout(0.2, "B"), gaussian_dropout(0.5, "B")),
    "vd_a": (variational_dropout("A", drop_rate=0.2), variational_dropout("A")),
    "vd_a2": (variational_dropout("A2", drop_rate=0.2), variational_dropout("A2")),
    "vd_b": (variational_dropout("B", drop_rate=0.2), variational_dropout("B")),
}


def width_errors(
    seed: int,
    width: int = 100,
    epochs: int = 60,
    methods: tuple[str, ...] = tuple(METHODS),
    examples: int = 50_000,
    watch: Watch | None = None,
) -> dict[str, Any]:
    """Figure 1a: test error at the epoch of the smallest error on 10 000 validation images."""
    x, y = images("mnist")
    test, watch = images("mnist", "test"), watch or Watch()
    figures, curve = {}, []
    for name in methods:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            net, recipes = mlp(784, width, width, width, 10), METHODS[name]
            if recipes is not None:
                convert(convert(net, recipes[0], include="1"), recipes[1], exclude="1")
            elbo = ELBO(net, Categorical(), examples, beta=0.0 if recipes is None else 1.0)
            optimizer = torch.optim.Adam(parameter_groups(elbo, lr=1e-3), fused=True)
            loop = Loop(
                elbo,
                optimizer,
                x[:examples],
                y[:examples],
                epochs,
                seed=seed,
                rate=lambda e: min(1.0, 2 - 2 * e / epochs),
            )

            def errors(epoch: Epoch, net: nn.Module = net) -> dict[str, float]:
                validation = error(net, x[-10_000:], y[-10_000:])
                return {"validation_error": validation, "test_error": error(net, *test)}

            found = watch.fit(name, loop, errors, fraction=1 / len(methods))
        chosen = min(found, key=lambda record: record["validation_error"])
        figures[f"{name}, {width} units"] = chosen["test_error"]
        curve += [{"method": name, **record} for record in found]
    return {"figures": figures, "curve": curve}


_AVERAGED_EPOCHS = {"none": 30, "binary": 120, "gaussian_a": 120, "gaussian_b": 120}


def averaged_errors(
    seed: int,
    width: int = 100,
    methods: tuple[str, ...] = tuple(METHODS),
    epochs: int | None = None,
    examples: int = 60_000,
    watch: Watch | None = None,
) -> dict[str, Any]:
    """Figure 1a with averaged weights: test error of the averaged model after the last epoch.

    Adam at 1e-3, constant for two thirds of the epochs and then linearly to 0, all training images,
    nothing chosen. Epochs: 30 without noise, 80 with learned noise, 120 with fixed noise, unless
    `epochs` is given.
    """
    x, y = images("mnist", count=examples)
    test, watch = images("mnist", "test"), watch or Watch()
    figures, curve = {}, []
    for name in methods:
        total = epochs or _AVERAGED_EPOCHS.get(name, 80)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            net, recipes = mlp(784, width, width, width, 10), METHODS[name]
            if recipes is not None:
                convert(convert(net, recipes[0], include="1"), recipes[1], exclude="1")
            elbo = ELBO(net, Categorical(), len(x), beta=0.0 if recipes is None else 1.0)
            optimizer = torch.optim.Adam(parameter_groups(elbo, lr=1e-3), fused=True)
            rate, compiled = partial(_last_third, total), name.startswith("vd_") and total > 10
            loop = Loop(
                elbo,
                optimizer,
                *(x, y, total),
                rate=rate,
                seed=seed,
                average=True,
                compile=compiled,  # the KL takes half of the time otherwise
            )

            def measure(epoch: Epoch, net: nn.Module = net, last: int = total - 1) -> Record:
                due = epoch.epoch % 5 == 4 or epoch.epoch == last
                return {"nll": epoch.nll} | ({"test_error": error(net, *test)} if due else {})

            records = watch.fit(name, loop, measure, fraction=1 / len(methods))
        figures[f"{name}, {width} units"] = records[-1]["test_error"]
        curve += [{"method": name, **r} for r in records if "test_error" in r]
    for kind in ("a", "b"):
        if {f"vd_{kind}", f"gaussian_{kind}"} <= set(methods):
            gain = figures[f"vd_{kind}, {width} units"] - figures[f"gaussian_{kind}, {width} units"]
            figures[f"vd_{kind} less gaussian_{kind}, {width} units"] = gain
    return {"figures": figures, "curve": curve}


def _last_third(epochs: int, epoch: float) -> float:
    """One for two thirds of the epochs, then linearly to 0."""
    return min(1.0, 3 - 3 * epoch / epochs)


@dataclass(frozen=True)
class Training:
    """How a net without noise is trained; the fields are what may explain another level."""

    init: str = "torch"  # uniform by fan-in; or "he" (normal, biases zero), or "centred"
    batch: int = 100
    lr: float = 1e-3
    epochs: int = 1  # times as many
    averaged: bool = False  # predict with the mean of the weights over steps, decay 0.999


TRAININGS: dict[str, Training] = {
    "as in figure 1": Training(),
    "He initialisation": Training(init="he"),
    "centred and normalised columns": Training(init="centred"),
    "batches of 1000": Training(batch=1000),
    "rate 3e-4": Training(lr=3e-4),
    "twice the epochs": Training(epochs=2),
    "averaged weights": Training(averaged=True),
    "averaged weights, batches of 1000": Training(averaged=True, batch=1000),
}


def plain_levels(
    seed: int,
    width: int = 250,
    epochs: int = 60,
    ways: tuple[str, ...] = tuple(TRAININGS),
    examples: int = 50_000,
) -> dict[str, Any]:
    """The net without noise of figure 1a, trained in ways that differ in one thing each.

    The epoch is chosen on 10 000 validation images, as in `width_errors`.
    """
    x, y = images("mnist")
    test, figures, curve = images("mnist", "test"), {}, []
    for name in ways:
        way = TRAININGS[name]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            net = _initialised(mlp(784, width, width, width, 10), way.init)
            smooth = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.999))
            total = way.epochs * epochs
            loop = Loop(
                ELBO(net, Categorical(), examples, beta=0.0),
                torch.optim.Adam(net.parameters(), lr=way.lr, fused=True),
                *(x[:examples], y[:examples], total, way.batch),
                seed=seed,
                rate=partial(_second_half, total),
            )
            found = []
            for epoch in loop.run(_Smooth(smooth, net)):
                judged = smooth.module if way.averaged else net
                validation = error(judged, x[-10_000:], y[-10_000:])
                record = {"epoch": epoch.epoch, "validation_error": validation}
                found.append(record | {"test_error": error(judged, *test)})
        chosen = min(found, key=lambda record: record["validation_error"])
        figures[f"{name}, {width} units"] = chosen["test_error"]
        curve += [{"way": name, **record} for record in found]
    return {"figures": figures, "curve": curve}


class _Smooth(Callback):
    """Averages the parameters of a model over steps."""

    def __init__(self, average: AveragedModel, net: nn.Module) -> None:
        self.average, self.net = average, net

    def on_step(self, at: Position, loss: Tensor) -> None:
        self.average.update_parameters(self.net)


def _second_half(epochs: int, epoch: float) -> float:
    """One, and from half-way on linearly to 0."""
    return min(1.0, 2 - 2 * epoch / epochs)


@torch.no_grad()
def _initialised(net: nn.Module, init: str) -> nn.Module:
    for layer in (m for m in net.modules() if isinstance(m, nn.Linear) and init != "torch"):
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        nn.init.zeros_(layer.bias)
        if init == "centred":
            layer.weight -= layer.weight.mean(1, keepdim=True)
            layer.weight /= layer.weight.norm(dim=1, keepdim=True)
    return net
