"""Random codes: LeNets of fewest bytes, each block of weights a number of a shared generator.

A net of fewer units has Gaussian weights, whose KL is steered to the budget of every block; then
the blocks are coded one after the other while the others go on learning. Sizes, lengths and rates
were chosen on images held out of the training data; the test set is looked at once, at the end,
with the net that another process has read from the file.

Havasi, Peharz & Hernandez-Lobato 2019, "Minimal random code learning".
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from experiments.louizos import Split, load_split, rate_factor
from experiments.random_code import RandomCode, write_code
from experiments.trainings import Record, Watch, error, lenet5, mlp
from vardrop.compression import load
from vardrop.conversion import convert
from vardrop.estimators import local_reparameterization, weight_sample
from vardrop.objective import ELBO, Categorical, ELBOParts, parameter_groups
from vardrop.posteriors import AdditiveGaussian
from vardrop.priors import Normal
from vardrop.recipes import Recipe
from vardrop.tuning import Epoch, Loop

_FULL = {"lenet5": (20, 50, 500), "lenet300": (300, 100)}
_DENSE = {"lenet5": 4 * 431_080, "lenet300": 4 * 266_610}  # bytes of float32
_READ = """
from pathlib import Path
from experiments.havasi import full_net
from experiments.random_code import read_code
from vardrop.compression import save
save(read_code(Path({path!r}), full_net({net!r})), {out!r})
"""


def small_net(net: str, sizes: Sequence[int]) -> nn.Module:
    """LeNet-5-Caffe or LeNet-300-100 with so many units; the latter sees squares of 2 x 2 pixels.

    That is a LeNet-300-100 whose first weights are shared by four neighbouring pixels.
    """
    if net == "lenet5":
        return lenet5(sizes=sizes)
    return nn.Sequential(nn.AvgPool2d(2), *mlp(196, *sizes, 10))


def full_net(net: str) -> nn.Module:
    """The net of the papers, into which a file is read."""
    return small_net(net, _FULL[net])


def coded_bytes(
    seed: int,
    net: str = "lenet5",
    sizes: Sequence[int] = (8, 16, 32),
    bits: int = 11_360,
    block_bits: int = 16,
    epochs: int = 30,
    coding_epochs: int = 30,
    rates: Sequence[float] = (2e-3, 0.5, 0.1),
    batch: int = 200,
    examples: int = 55_000,
    validation: int = 5000,
    watch: Watch | None = None,
) -> dict[str, Any]:
    """Train, code, write; bytes on disk and the error of what another process reads from them.

    `rates`: that of the means, and its factors at the first block and at the last one.
    """
    split = load_split(validation, examples)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _noisy(small_net(net, sizes))
        code = RandomCode(model, bits, block_bits, seed, beta=0.02)
        steps = math.ceil(len(split.train.x) / batch)
        last = epochs + coding_epochs - 1  # and one epoch with all blocks closed
        elbo = CodedELBO(model, code, len(split.train.x), epochs * steps, last * steps)
        rate, *factors = rates
        knots = ((0, 1.0), (0.6 * epochs, 1.0), (epochs, factors[0]), (last + 1, factors[1]))
        loop = Loop(
            elbo,
            torch.optim.Adam(parameter_groups(elbo, rate, 10 * rate), fused=True),
            *split.train,
            last + 1,
            batch,
            rate=partial(rate_factor, knots),
            seed=seed,
        )
        curve = (watch or Watch()).fit("code", loop, _measure(elbo, split))
        code.close(nearest=True)
        return {"figures": _figures(code, net, split), "curve": curve}


def _noisy(model: nn.Module) -> nn.Module:
    """All weights and biases Gaussian, with one prior deviation per tensor.

    Kernels are drawn once per batch: noise drawn for each output by itself would average out over
    an image, which that of a kernel does not.
    """
    recipe = partial(Recipe, AdditiveGaussian(-6.0), Normal(std=0.2, learned=True), noisy_bias=True)
    if any(isinstance(m, nn.Conv2d) for m in model.modules()):
        convert(model, recipe(weight_sample), include=nn.Conv2d)
    return convert(model, recipe(local_reparameterization), include=nn.Linear)


class CodedELBO(ELBO):
    """The NLL and the KL of every open block; from `first` to `last` step blocks are closed."""

    steps: Tensor

    def __init__(
        self, net: nn.Module, code: RandomCode, num_data: int, first: int, last: int
    ) -> None:
        super().__init__(net, Categorical(), num_data)
        self.code, self.first, self.last = code, first, last
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x: Any, y: Any, weight: Tensor | None = None) -> ELBOParts:
        """The loss of a batch, after what the step before it has left to do."""
        if self.training:
            self._advance()
        nll = self.likelihood(self.net(x), y)
        loss = nll + self.code() / self.num_data
        return ELBOParts(loss, nll, self.code.latest.sum(), self.beta)

    def _advance(self) -> None:
        self.code.steer()
        blocks, closed = self.code.layout.blocks, self.code.layout.blocks - self.code.open
        due = blocks * (int(self.steps) - self.first) // max(self.last - self.first, 1)
        if (more := min(due, blocks) - closed) > 0:
            self.code.close(more, nearest=True)
        self.steps += 1


def _measure(elbo: CodedELBO, split: Split) -> Callable[[Epoch], Record]:
    def measure(epoch: Epoch) -> Record:
        still = elbo.code.index < 0
        bits = float(elbo.code.latest[still].mean()) / math.log(2) if bool(still.any()) else 0.0
        return {
            "nll": epoch.nll,
            "open blocks": int(still.sum()),
            "bits per open block": bits,
            "validation error, %": error(elbo.net, *split.validation),
        }

    return measure


def _figures(code: RandomCode, net: str, split: Split) -> dict[str, float]:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "net.vdr"
        size = write_code(code, path)
        found = _read_elsewhere(path, net)
    return {
        "error of the file, %": error(found, *split.test),
        "validation error of the file, %": error(found, *split.validation),
        "bytes": float(size),
        "times fewer bytes": _DENSE[net] / size,
        "weights": float(code.layout.weights),
        "bits per weight": code.block_bits * code.layout.blocks / code.layout.weights,
    }


def _read_elsewhere(path: Path, net: str) -> nn.Module:
    """The net in a file, decoded by another process."""
    out = path.with_suffix(".safetensors")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    program = _READ.format(path=str(path), net=net, out=str(out))
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)
    return load(out, into=full_net(net))
