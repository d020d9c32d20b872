"""Measure one library inside its own environment, in turns with plain torch; JSON to stdout.

~/.cache/vardrop-bench/<peer>/bin/python benchmarks/worker.py <peer> [--rounds 60]
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
from checks import check
from measuring import (
    Row,
    Run,
    Settings,
    figure,
    per_call,
    plain_step,
    repeated,
    rows,
    train_step,
)
from nets import PREDICT, TRAIN, Case
from peer_layers import BUILDS, Build, Model
from torch import Tensor

DRAWS = 32
NUM_DATA = 60_000


def _noisy_step(model: Model, x: Tensor, y: Tensor) -> Run:
    def loss() -> Tensor:
        fit = torch.nn.functional.cross_entropy(model.forward(x), y)
        return fit + model.kl() / NUM_DATA

    return train_step(loss, model.parameters())


def _reason(error: Exception) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    first = (str(error).splitlines() or [""])[0][:160]
    return f"fails: {type(error).__name__}: {first} ({last.name})"


def _built(
    case: Case, group: str, builds: dict[str, Build], make: Callable[[Model], Run], x: Tensor
) -> tuple[dict[str, Run], list[Row]]:
    """The calls that work once, and a row with the reason for each that does not."""
    runs: dict[str, Run] = {}
    failed = []
    for name, build in builds.items():
        try:
            run = make(build(case.make(), x))
            run()
            runs[name] = run
        except Exception as error:
            failed.append(figure(group, case.name, name, None, _reason(error)))
    return runs, failed


def train(case: Case, builds: dict[str, Build], settings: Settings) -> list[Row]:
    x, y = case.data()
    runs, failed = _built(case, "train step", builds, lambda m: _noisy_step(m, x, y), x)
    if not runs:
        return failed
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
    runs, failed = _built(case, group, builds, lambda m: _loop(m, x), x)
    if not runs:
        return failed
    plain, often = case.make().eval(), 200 if len(x) == 1 else 5

    def forward() -> Tensor:
        with torch.no_grad():
            return plain(x)  # type: ignore[no-any-return]

    found = rows(group, case.name, {"plain": repeated(forward, often), **runs}, settings)
    return per_call(found, {"plain": often}) + failed


def measure(peer: str, settings: Settings) -> dict[str, Any]:
    builds, found = BUILDS[peer], list[Row]()
    verdicts = {}
    for name, build in builds.items():
        try:
            verdicts[name] = check(build)
        except Exception as error:
            verdicts[name] = {"marks": [f"check {_reason(error)}"]}
    for case in TRAIN:
        if case.quick or not settings.quick:
            found += train(case, builds, settings)
    for case in PREDICT:
        found += predict(case, builds, settings)
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
    json.dump(measure(peer, settings), sys.stdout)


if __name__ == "__main__":
    main()
