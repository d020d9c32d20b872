"""Another library's loop over 32 draws, one plain forward pass = 1, in its own environment.

    ~/.cache/vardrop-bench/<peer>/bin/python benchmarks/peer_loops.py <peer> <seconds a case>

Prints one JSON object: the median ratio of every way to use the library, by case.
"""

from __future__ import annotations

import json
import sys
import warnings

import torch
from measuring import Run, Settings, per_call, repeated, rows
from peer_layers import BUILDS, Model, _WithKL
from torch import Tensor, nn

from nets import PREDICT, Case

DRAWS = 32


def without_kl(model: Model) -> Model:
    """Spare the layers that return (output, kl) the KL, which a prediction does not need."""
    if isinstance(model.forward, nn.Module):
        for module in model.forward.modules():
            if isinstance(module, _WithKL):
                module.forward = lambda x, layer=module.layer: layer(x, return_kl=False)
    return model


def loop(model: Model, x: Tensor) -> Run:
    def run() -> Tensor:
        with torch.no_grad():
            return sum(model.forward(x).softmax(1) for _ in range(DRAWS)) / DRAWS  # type: ignore

    return run


def measure(peer: str, case: Case, seconds: float) -> dict[str, float]:
    x, _ = case.data()
    plain, often = case.make().eval(), 200 if len(x) == 1 else 5

    def forward() -> Tensor:
        with torch.no_grad():
            return plain(x)  # type: ignore[no-any-return]

    loops = {name: loop(without_kl(build(plain, x)), x) for name, build in BUILDS[peer].items()}
    runs: dict[str, Run] = {"plain": repeated(forward, often), **loops}
    found = per_call(rows("", case.name, runs, Settings(15, seconds)), {"plain": often})
    return {row["candidate"]: round(row["ratio"], 1) for row in found if row["candidate"] in loops}


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    peer, seconds = sys.argv[1], float(sys.argv[2])
    print(json.dumps({case.name: measure(peer, case, seconds) for case in PREDICT}))


if __name__ == "__main__":
    main()
