"""How the time of a train step grows: with width, draws, layers; and per-example sampling."""

from __future__ import annotations

import math

import torch
from measuring import Row, Run, Settings, figure, plain_step, rows, train_step
from train_step import NUM_DATA, noisy_step

import vardrop as vd
from nets import mlp

NOISY = "sparse_vd, KL value every 10"


def _pair(widths: list[int], batch: int) -> dict[str, Run]:
    x, y = torch.rand(batch, widths[0]), torch.randint(10, (batch,))
    return {
        "plain": plain_step(mlp(*widths), x, y),
        NOISY: noisy_step(mlp(*widths), vd.sparse_vd(), x, y, None, every=10),
    }


def _exponent(group: str, sizes: list[int], found: list[Row], candidate: str) -> Row:
    """The power of the last doubling-or-more: log time ratio over log size ratio."""
    times = [row["ms"] for row in found if row["candidate"] == candidate]
    power = math.log(times[-1] / times[-2]) / math.log(sizes[-1] / sizes[-2])
    note = f"time grows as size^{power:.2f} from {sizes[-2]} to {sizes[-1]}"
    return figure(group, "growth", candidate, None, note)


def width(settings: Settings) -> list[Row]:
    sizes = [100, 316, 1000] if settings.quick else [100, 316, 1000, 3162, 10_000]
    group, found = "growth with width", list[Row]()
    for n in sizes:
        found += rows(group, f"MLP {n}-{n}-10 b128", _pair([n, n, 10], 128), settings)
    return [*found, _exponent(group, sizes, found, "plain"), _exponent(group, sizes, found, NOISY)]


def layers(settings: Settings) -> list[Row]:
    sizes = [2, 10, 30] if settings.quick else [2, 10, 30, 100]
    group, found = "growth with layers", list[Row]()
    for n in sizes:
        found += rows(
            group, f"MLP, {n} layers of 100, b100", _pair([*[100] * n, 10], 100), settings
        )
    return [*found, _exponent(group, sizes, found, "plain"), _exponent(group, sizes, found, NOISY)]


def draws(settings: Settings) -> list[Row]:
    """Several draws of one step's likelihood."""
    sizes = [1, 10, 100] if settings.quick else [1, 10, 100, 1000]
    x, y = torch.rand(100, 784), torch.randint(10, (100,))
    group, found = "growth with draws", list[Row]()
    for n in sizes:
        net = vd.convert(mlp(784, 300, 100, 10), vd.sparse_vd())
        elbo = vd.ELBO(net, vd.Categorical(), NUM_DATA, samples=n)

        def loss(elbo: vd.ELBO = elbo) -> torch.Tensor:
            return elbo(x, y).loss

        runs = {
            "plain": plain_step(mlp(784, 300, 100, 10), x, y),
            "sparse_vd": train_step(loss, vd.parameter_groups(elbo, lr=1e-3)),
        }
        found += rows(group, f"MLP 784-300-100-10 b100, {n} draws", runs, settings)
    return [*found, _exponent(group, sizes, found, "sparse_vd")]


def per_example(settings: Settings) -> list[Row]:
    """Fresh weights for every example, which local reparameterisation replaces.

    Kingma, Salimans & Welling 2015, section 4: 1635 s against 7.4 s an epoch on a GPU.
    """
    x, y = torch.rand(100, 784), torch.randint(10, (100,))
    sampled = vd.Recipe(vd.AdditiveGaussian(), vd.LogUniform(), vd.per_example)
    runs = {
        "local reparameterisation": noisy_step(
            mlp(784, 300, 100, 10), vd.sparse_vd(), x, y, None, every=10
        ),
        "weights drawn per example": noisy_step(
            mlp(784, 300, 100, 10), sampled, x, y, None, every=10
        ),
    }
    return rows(
        "per-example sampling",
        "MLP 784-300-100-10 b100",
        runs,
        settings,
        "local reparameterisation",
    )
