"""Measure one library inside its own environment, in turns with plain torch; JSON to stdout.

~/.cache/vardrop-bench/<peer>/bin/python benchmarks/worker.py <peer> [--rounds 60]
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from checks import check
from goals import COMPILED, OURS
from measuring import (
    Row,
    Run,
    Settings,
    per_call,
    plain_step,
    reason,
    repeated,
    rows,
    train_step,
    working,
)
from peer_layers import BUILDS, FASTEST, NUM_DATA, Build, Model, beside
from torch import Tensor

from nets import PREDICT, TRAIN, Case

DRAWS = 32


def _noisy_step(model: Model, x: Tensor, y: Tensor) -> Run:
    def loss() -> Tensor:
        if model.loss is not None:
            return model.loss(x, y)
        fit = torch.nn.functional.cross_entropy(model.forward(x), y)
        return fit + model.kl() / NUM_DATA

    return train_step(loss, model.parameters())


def _compiled_step(case: Case, x: Tensor, y: Tensor) -> Run:
    import vardrop as vd  # beside the library that this process measures

    elbo = vd.ELBO(vd.convert(case.make(), vd.sparse_vd()), vd.Categorical(), NUM_DATA)
    return partial(vd.compile(elbo, torch.optim.Adam(vd.parameter_groups(elbo, lr=1e-3))), x, y)


def train(case: Case, builds: dict[str, Build], settings: Settings) -> list[Row]:
    x, y = case.data()

    def step(build: Build, layout: torch.memory_format) -> Run:
        model = build(case.make(), x)
        model.net.to(memory_format=layout)  # type: ignore[call-overload]
        return _noisy_step(model, x.to(memory_format=layout), y)

    makers = {
        name + where: partial(step, build, layout)
        for name, build in builds.items()
        for where, layout in list(case.layouts().items())[0 if case.quick else -1 :]
    }
    if "cplxmodule VD" in builds and case.quick and len(case.shape) == 2:
        makers[f"{OURS}, LRT{COMPILED}"] = partial(_compiled_step, case, x, y)
    runs, failed = working("train step", case.name, makers)
    steps: dict[str, Run] = {"plain": plain_step(case.make(), x, y), **runs}
    return rows("train step", case.name, steps, settings) + failed


def _loop(model: Model, x: Tensor) -> Run:
    def run() -> Tensor:
        with torch.no_grad():
            return sum(model.forward(x).softmax(1) for _ in range(DRAWS)) / DRAWS  # type: ignore

    return run


def predict(case: Case, builds: dict[str, Build], settings: Settings) -> list[Row]:
    x, _ = case.data()
    group = f"prediction, {DRAWS} draws"

    def loop(build: Build) -> Run:
        return _loop(build(case.make(), x), x)

    runs, failed = working(
        group, case.name, {name: partial(loop, build) for name, build in builds.items()}
    )
    plain, often = case.make().eval(), 200 if len(x) == 1 else 5

    def forward() -> Tensor:
        with torch.no_grad():
            return plain(x)  # type: ignore[no-any-return]

    found = rows(group, case.name, {"plain": repeated(forward, often), **runs}, settings)
    return per_call(found, {"plain": often}) + failed


def _cases(cases: list[Case], peer: str, settings: Settings) -> list[Case]:
    """Cases whose layers all have; in a quick run the small ones, of slower libraries the first."""
    cases = [case for case in cases if case.by_hand]
    if not settings.quick:
        return cases
    return [case for case in cases if case.quick][: None if peer in FASTEST else 1]


def measure(peer: str, settings: Settings) -> dict[str, Any]:
    found, verdicts = list[Row](), {}
    for name, build in beside(peer).items():
        try:
            verdicts[name] = check(build)
        except Exception as error:
            verdicts[name] = {"marks": [f"check {reason(error)}"]}
    for case in _cases(TRAIN, peer, settings):
        found += train(case, beside(peer), settings)
    for case in _cases(PREDICT, peer, settings):
        found += predict(case, BUILDS[peer], settings)
    return {"checks": verdicts, "rows": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer", choices=BUILDS)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true")
    arguments = vars(parser.parse_args())
    peer = arguments.pop("peer")
    settings = Settings(**arguments)
    torch.set_num_threads(settings.threads)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    sys.path.append(str(Path(__file__).parents[1] / "src"))
    json.dump(measure(peer, settings), sys.stdout)


if __name__ == "__main__":
    main()
