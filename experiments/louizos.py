"""Bayesian compression in bytes: sparse variational dropout, shrunk and packed into a file.

The net is trained by the settings of `sparse_lenets`; the threshold and the precision are chosen on
images held out of the training data, and the test set is looked at once, at the end.

Louizos, Ullrich & Welling 2017, "Bayesian compression for deep learning".
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from experiments.compression import packed
from experiments.sparse_lenets import (
    NETS,
    SETTINGS,
    Split,
    error,
    fresh,
    load_split,
    masked_figures,
)
from experiments.watch import Watch
from vardrop.compression import choose_threshold, shrink
from vardrop.compression.layout import affine_layers
from vardrop.compression.scoring import accuracy
from vardrop.objective import ELBO, Categorical, linear_warmup, parameter_groups
from vardrop.training import Epoch, Loop


def packed_bytes(
    seed: int, net: str = "lenet300", knots: list[list[float]] | None = None,
    warmup: list[int] | None = None, max_drop: float = 0.002, examples: int = 55_000,
    validation: int = 5000, watch: Watch | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Train, choose the threshold, shrink, pack; bytes on disk and the error of what they hold."""
    setting = dataclasses.replace(SETTINGS[net], seed=seed, validation=validation)
    if knots is not None:
        pairs = tuple((int(epoch), factor) for epoch, factor in knots)
        setting = dataclasses.replace(setting, knots=pairs)
    split = load_split(setting)
    x, y = (t[:examples] for t in split.train)
    with torch.random.fork_rng(devices=[]), TemporaryDirectory() as directory:
        torch.manual_seed(seed)
        model = fresh(setting, Path(directory))
        elbo = ELBO(model, Categorical(), len(x), kl_value_every=10)
        optimizer = torch.optim.Adam(parameter_groups(elbo, setting.lr), fused=True)
        warm = linear_warmup(*(warmup or setting.warmup or (0, 1)))
        loop = Loop(
            elbo, optimizer, x, y, setting.epochs, setting.batch_size, warm,
            lambda epoch: setting.factor(int(epoch)), seed,
        )  # fmt: skip

        def measure(epoch: Epoch) -> dict[str, float]:
            wrong, ratio = masked_figures(model, split.validation)
            return {
                "nll": epoch.nll,
                "kl": epoch.kl,
                "validation_error": wrong,
                "times fewer weights": ratio,
            }

        curve = (watch or Watch()).fit("sparse VD", loop, measure)
        model.eval()
        figures = _figures(model, split, setting.net, max_drop, Path(directory))
    return {"figures": figures, "curve": curve}


def _figures(
    model: torch.nn.Module, split: Split, net: str, max_drop: float, directory: Path
) -> dict[str, float]:
    chosen = choose_threshold(model, split.validation, accuracy, max_drop=max_drop, points=61)
    small = shrink(model, split.test[0][:1], chosen, drop_inputs=True)
    _, decoded, report = packed(small, NETS[net], split, directory / "net.vdp")
    full = NETS[net]()
    weights = [sum(int(m.weight.count_nonzero()) for m in affine_layers(n).values())
               for n in (full, small)]  # fmt: skip
    size = sum(4 * p.numel() for p in full.parameters())
    return {
        "error of the trained net, %": error(model, split.test),
        "error of the file, %": error(decoded, split.test),
        "times fewer weights": weights[0] / weights[1],
        "bytes": float(report.bytes),
        "times fewer bytes": size / report.bytes,
    }
