"""How to train, as one value that is stored with the run."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, get_args

import torch

from vardrop.checks import check_choice, check_integer, check_number, check_type
from vardrop.errors import VardropError
from vardrop.objective import linear_warmup
from vardrop.training.loop import Schedule
from vardrop.training.processes import device_named
from vardrop.training.step import Precision

Rate = Literal["constant", "linear", "late", "cosine"]


@dataclasses.dataclass(frozen=True)
class Settings:
    """How to train.

    Every argument is an option of `vardrop fit`, which takes its help from here.

    Args:
        epochs: epochs of the noisy net.
        batch_size: examples per step, over all processes together.
        lr: learning rate of Adam.
        noise_lr: learning rate of the noise parameters; as `lr` unless given.
        weight_decay: weight decay of the weights; noise parameters have none.
        rate: learning rate over time: constant, linear (falls to 0), late (constant for the first
            half, then falls to 0) or cosine.
        warmup: the two epochs between which the KL weight rises from 0 to `beta`, both 0 for no
            warm-up; the first and the fifth tenth of `epochs` unless given.
        beta: KL weight after the warm-up.
        samples: draws of the noise per step.
        clip: largest norm of the gradient; no bound unless given.
        pretrain: epochs of the plain net before it is made noisy.
        patience: epochs without a better validation loss after which to stop; never unless given.
        precision: type of the forward pass: float32, or bfloat16 for mixed precision.
        compile: use torch.compile.
        device: where to train: cpu, cuda and so on; auto takes a GPU where there is one, under
            torchrun each process its own.
        seed: seed of the initial weights, the noise, the shuffling and the split of the data; a
            resumed run keeps its own.
        checkpoint_seconds: seconds after which a checkpoint is written inside an epoch.

    >>> Settings(epochs=20).schedule()(10)
    1.0
    """

    epochs: int = 30
    batch_size: int = 100
    lr: float = 1e-3
    noise_lr: float | None = None
    weight_decay: float = 0.0
    rate: Rate = "late"
    warmup: tuple[float, float] | None = None
    beta: float = 1.0
    samples: int = 1
    clip: float | None = None
    pretrain: int = 0
    patience: int | None = None
    precision: Precision = "float32"
    compile: bool = False
    device: str = "auto"
    seed: int = 0
    checkpoint_seconds: float = 60.0

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "samples"):
            check_integer(name, getattr(self, name), 1)
        for name in ("pretrain", "seed"):
            check_integer(name, getattr(self, name), 0)
        check_number("seed", self.seed, below=2**62)  # generators take 63 bits
        for name in ("weight_decay", "beta", "checkpoint_seconds"):
            check_number(name, getattr(self, name), at_least=0)
        check_number("lr", self.lr, above=0)
        for name in ("noise_lr", "clip"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), above=0)
        if self.patience is not None:
            check_integer("patience", self.patience, 1)
        if self.warmup is not None:
            _check_pair(self.warmup)
        check_choice("rate", self.rate, get_args(Rate))
        check_choice("precision", self.precision, get_args(Precision))
        check_type("compile", self.compile, bool, "True or False")
        check_type("device", self.device, str, "the name of a device")
        self.schedule()

    @property
    def warm(self) -> float:
        """The epoch from which the KL weight is full."""
        if self.warmup is None:
            return max(1.0, 0.5 * self.epochs)
        return self.warmup[1]

    def schedule(self) -> Schedule:
        """The KL weight by epoch."""
        start = 0.1 * self.epochs if self.warmup is None else self.warmup[0]
        if start == self.warm == 0:
            return lambda epoch: self.beta
        return linear_warmup(start, self.warm, self.beta)

    def factor(self, epochs: int) -> Schedule:
        """The factor on the learning rate by epoch, of so many epochs."""
        falls = {
            "constant": lambda e: 1.0,
            "linear": lambda e: 1 - e / epochs,
            "late": lambda e: min(1.0, 2 - 2 * e / epochs),
            "cosine": lambda e: 0.5 * (1 + math.cos(math.pi * e / epochs)),
        }
        return falls[self.rate]

    def torch_device(self) -> torch.device:
        """The device that was asked for, or an error where there is no such one."""
        return device_named(self.device)

    def to_json(self) -> dict[str, Any]:
        """The settings as a dictionary."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Settings:
        """The settings that `to_json` described."""
        known = {f.name for f in dataclasses.fields(cls)}
        if unknown := sorted(set(data) - known):
            raise VardropError(f"Expected settings among {sorted(known)}, but got {unknown}.")
        warmup = data.get("warmup")
        return cls(**{**data, "warmup": tuple(warmup) if isinstance(warmup, list) else warmup})


def _check_pair(warmup: Any) -> None:
    check_type("warmup", warmup, tuple, "two epochs, such as (5, 20)")
    if len(warmup) != 2:
        raise VardropError(
            f"Expected `warmup` to be two epochs, such as (5, 20), but got {warmup}."
        )
    for epoch in warmup:
        check_number("warmup", epoch, at_least=0)
