"""Bytes of LeNet-300-100 on disk: sparse VD compared with magnitude pruning and LAMP.

All files come from the same packer. Each method has three operating points (thresholds of sparse
VD, or shares of the weights that pruning keeps) and the same rounding steps. Of these candidates,
the smallest file within a limit of the validation error is reported.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import nn

from experiments.baselines import prune_magnitudes
from experiments.louizos import Split, load_split, rate_factor
from experiments.slim import train
from experiments.trainings import NETS, Watch, error, small_weights
from vardrop.compression import Shrunk, pack, shrink, unpack
from vardrop.conversion import convert
from vardrop.objective import ELBO, Categorical, linear_warmup
from vardrop.recipes import sparse_vd
from vardrop.tuning import Loop


class Candidate(NamedTuple):
    """A packed file."""

    validation_error: float
    test_error: float
    bytes: int


def compare_packing(
    seed: int,
    epochs: int = 20,
    examples: int = 30_000,
    validation: int = 5000,
    thresholds: Sequence[float] = (3.0, 2.0, 1.0),
    keeps: Sequence[float] = (0.012, 0.02, 0.04),
    tolerances: Sequence[float] = (1.0, 2.0, 3.0),
    limits: Sequence[float] = (2.5, 3.0),
    watch: Watch | None = None,
) -> dict[str, Any]:
    """Bytes and test error of the smallest file within each validation error, by method.

    Args:
        seed: of the training and its noise.
        epochs: of sparse VD. Pruned models train for as many before and after pruning.
        examples: training digits.
        validation: digits for the choice, the last of the training set.
        thresholds: of log alpha, for sparse VD.
        keeps: shares of the weights that pruning keeps.
        tolerances: rounding steps of the packer.
        limits: of the validation error, in per cent.
        watch: keeps the training of sparse VD.
    """
    split = load_split(validation, examples)
    with torch.random.fork_rng(devices=[]), TemporaryDirectory() as folder:
        file = Path(folder) / "model.vdp"
        noisy = _train_sparse_vd(split, epochs, seed, watch or Watch())
        models: dict[str, list[Shrunk | nn.Module]] = {
            "sparse VD": [shrink(noisy, split.test.x[:1], threshold) for threshold in thresholds]
        }
        torch.manual_seed(seed)
        dense = train(NETS["lenet300"](), *split.train, epochs, 2e-3, seed, 1e-4)
        for row, layerwise_scores in (("magnitude pruning", False), ("LAMP", True)):
            models[row] = []
            for keep in keeps:
                net = copy.deepcopy(dense)
                prune_magnitudes(net, keep, layerwise_scores)
                models[row].append(train(net, *split.train, epochs, 2e-3, seed + 100))
        figures: dict[str, float] = {}
        for row, group in models.items():
            files = [_pack(model, t, split, file) for model in group for t in tolerances]
            for limit in limits:
                allowed = [f for f in files if f.validation_error <= limit] or [min(files)]
                smallest = min(allowed, key=lambda candidate: candidate.bytes)
                figures[f"bytes within {limit:g}%, {row}"] = float(smallest.bytes)
                figures[f"test error within {limit:g}%, {row}"] = smallest.test_error
    return {"figures": figures}


def _train_sparse_vd(split: Split, epochs: int, seed: int, watch: Watch) -> nn.Module:
    torch.manual_seed(seed)
    net = convert(small_weights(NETS["lenet300"]()), sparse_vd(train_clip=3.0))
    elbo = ELBO(net, Categorical(), len(split.train.x), kl_value_every=10)
    knots = ((0, 1.0), (epochs / 2, 1.0), (epochs, 0.0))
    loop = Loop(
        elbo,
        torch.optim.Adam(elbo.parameters(), lr=1e-3),
        *split.train,
        epochs,
        beta=linear_warmup(1, max(2, epochs // 3)),
        rate=partial(rate_factor, knots),
        seed=seed,
    )
    watch.fit("sparse VD", loop, fraction=0.4)
    return net.eval()


def _pack(model: Shrunk | nn.Module, tolerance: float, split: Split, path: Path) -> Candidate:
    """Pack a model, and score what the file holds."""
    report = pack(model, path, tolerance)
    decoded = unpack(path, into=NETS["lenet300"]())
    return Candidate(error(decoded, *split.validation), error(decoded, *split.test), report.bytes)
