"""Train step of noisy nets against the same plain net with default Adam = 1.

    python benchmarks/train_step.py [--rounds 60] [--case part-of-a-name]

Plain and noisy nets with default and fused Adam, nets with convolutions in both memory layouts (a
quick run and the two large nets have fused Adam and channels-last alone, beside the plain net with
neither); dense nets also through `vd.compile`. Nets with attention or recurrent layers have the two
estimators alone; an LSTM draws weights by either.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial

import torch
from measuring import Row, Run, Settings, plain_step, rows, train_step
from naive import Naive, naive
from torch import Tensor, nn

import vardrop as vd
from nets import TRAIN, Case

NUM_DATA = 60_000
SAMPLED = vd.Recipe(vd.AdditiveGaussian(), vd.LogUniform(), vd.weight_sample)
# name: (recipe, steps between two values of the KL)
RECIPES = {
    "sparse_vd (LRT, exact KL)": (vd.sparse_vd(), 1),
    "sparse_vd, KL value every 10": (vd.sparse_vd(), 10),
    "sparse_vd (LRT, sigmoid KL)": (vd.sparse_vd(form="sigmoid"), 1),
    "weight_sample, exact KL": (SAMPLED, 1),
    "weight_sample, KL value every 10": (SAMPLED, 10),
    "bayes_by_backprop (LRT)": (vd.bayes_by_backprop(), 1),
    "variance_layer": (vd.variance_layer(), 1),
    "variational_dropout A": (vd.variational_dropout("A"), 1),
}
LARGE = ("sparse_vd, KL value every 10", "weight_sample, KL value every 10")  # of large nets
QUICK = (*LARGE, "variance_layer", "variational_dropout A")
ADAM = (("", None), (", fused Adam", True))
COMPILED = {
    "sparse_vd, vd.compile": (vd.sparse_vd(), 1),
    "sparse_vd, KL value every 10, vd.compile": (vd.sparse_vd(), 10),
    "weight_sample, KL value every 10, vd.compile": (SAMPLED, 10),
    "variance_layer, vd.compile": (vd.variance_layer(), 1),
    "variational_dropout A, vd.compile": (vd.variational_dropout("A"), 1),
}
NAIVE = "LRT by hand, sigmoid KL by autograd"


def noisy_step(
    net: nn.Module, recipe: vd.Recipe, x: Tensor, y: Tensor, fused: bool | None, every: int = 1
) -> Run:
    elbo = vd.ELBO(vd.convert(net, recipe), vd.Categorical(), NUM_DATA, kl_value_every=every)
    return train_step(lambda: elbo(x, y).loss, vd.parameter_groups(elbo, lr=1e-3), fused)


def compiled_step(net: nn.Module, recipe: vd.Recipe, x: Tensor, y: Tensor, every: int) -> Run:
    elbo = vd.ELBO(vd.convert(net, recipe), vd.Categorical(), NUM_DATA, kl_value_every=every)
    optimizer = torch.optim.Adam(vd.parameter_groups(elbo, lr=1e-3), fused=True)
    return partial(vd.compile(elbo, optimizer), x, y)


def naive_step(net: nn.Module, x: Tensor, y: Tensor) -> Run:
    net = naive(net)
    layers = [m for m in net.modules() if isinstance(m, Naive)]

    def loss() -> Tensor:
        fit = nn.functional.cross_entropy(net(x), y)
        return fit + torch.stack([layer.kl() for layer in layers]).sum() / NUM_DATA

    return train_step(loss, net.parameters())


def _recipes(case: Case, quick: bool) -> dict[str, tuple[vd.Recipe, int]]:
    small = case.quick and case.by_hand
    names = LARGE if not small else QUICK if quick else tuple(RECIPES)
    return {name: RECIPES[name] for name in names}


def candidates(case: Case, quick: bool) -> Iterator[tuple[str, Run]]:
    (x, y), few = case.data(), quick or not case.quick
    yield "plain", plain_step(case.make(), x, y)
    for where, layout in list(case.layouts().items())[-1 if few else 0 :]:
        data = x.to(memory_format=layout)

        def net(layout: torch.memory_format = layout) -> nn.Module:
            return case.make().to(memory_format=layout)  # type: ignore[call-overload]

        if case.by_hand:
            yield f"{NAIVE}{where}", naive_step(net(), data, y)
        for adam, fused in ADAM[1 if few else 0 :]:
            yield f"plain{where}{adam}", plain_step(net(), data, y, fused)
            for name, (recipe, every) in _recipes(case, quick).items():
                yield f"{name}{where}{adam}", noisy_step(net(), recipe, data, y, fused, every)
    if case.quick and len(case.shape) == 2:
        for name, (recipe, every) in COMPILED.items():
            yield f"{name}, fused Adam", compiled_step(case.make(), recipe, x, y, every)


def measure(case: Case, settings: Settings) -> list[Row]:
    return rows("train step", case.name, dict(candidates(case, settings.quick)), settings)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--case", default="", help="part of a case's name")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for case in TRAIN:
        if arguments.case in case.name:
            print(case.name)
            for row in measure(case, Settings(arguments.rounds)):
                print(
                    f"  {row['ratio']:6.2f}x ({row['low']:.2f}-{row['high']:.2f})"
                    f" {row['ms']:9.2f} ms  {row['candidate']}"
                )


if __name__ == "__main__":
    main()
