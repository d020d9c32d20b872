"""How to train, as one value that is stored with the run."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from vardrop.errors import VardropError
from vardrop.objective import linear_warmup
from vardrop.training.loop import Schedule
from vardrop.training.step import Precision

RATES = ("constant", "linear", "late", "cosine")


@dataclasses.dataclass(frozen=True)
class Settings:
    """How to train.

    Args:
        epochs: epochs of the noisy net.
        batch_size: examples a step, over all processes together.
        lr: Adam's learning rate.
        noise_lr: its rate for noise parameters; `lr` where None.
        weight_decay: of the weights; noise parameters have none.
        rate: the learning rate over time: "constant"; "linear", falling to 0; "late", constant for
            the first half, then falling to 0; "cosine".
        warmup: the epochs between which the KL weight rises from 0 to `beta`; the first and the
            fifth tenth of `epochs` where None, and no warm-up for (0, 0).
        beta: the KL weight after the warm-up.
        samples: draws of the noise a step.
        clip: the largest norm of a gradient.
        pretrain: epochs of the plain net before it is made noisy.
        patience: stop after so many epochs without a better validation loss.
        precision: "float32", or "bfloat16" for mixed precision.
        compile: use `torch.compile`.
        device: "auto" takes a GPU where there is one.
        seed: of the initial weights, the noise, the shuffling and the split of the data.
        checkpoint_seconds: write a checkpoint inside an epoch after so long.

    >>> Settings(epochs=20).schedule()(10)
    1.0
    """

    epochs: int = 30
    batch_size: int = 100
    lr: float = 1e-3
    noise_lr: float | None = None
    weight_decay: float = 0.0
    rate: str = "late"
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
        for name in ("epochs", "batch_size", "samples", "patience"):
            self._check(name, 1)
        for name in ("pretrain", "weight_decay", "beta", "seed", "checkpoint_seconds"):
            self._check(name, 0)
        for name in ("lr", "noise_lr", "clip"):
            self._check(name, 0, strict=True)
        if self.rate not in RATES:
            raise VardropError(
                f"Expected `rate` to be one of {', '.join(RATES)}, but got {self.rate!r}."
            )
        if self.precision not in ("float32", "bfloat16"):
            raise VardropError(
                f"Expected `precision` to be 'float32' or 'bfloat16', but got {self.precision!r}."
            )
        self.schedule()

    def _check(self, name: str, least: float, strict: bool = False) -> None:
        value = getattr(self, name)
        if value is None:
            return
        if not math.isfinite(value) or value < least or (strict and value == least):
            bound = f"above {least}" if strict else f"at least {least}"
            raise VardropError(f"Expected `{name}` to be {bound}, but got {value}.")

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
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            return torch.empty(0, device=self.device).device
        except (RuntimeError, AssertionError) as absent:
            raise VardropError(
                f"Expected `device` to be one that torch has here, but got {self.device!r}. "
                "Use auto or cpu."
            ) from absent

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
        return cls(**{**data, "warmup": tuple(warmup) if warmup is not None else None})
