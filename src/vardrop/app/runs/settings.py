"""The settings of a training, stored with the run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any, Literal, get_args

from vardrop._core.checks import check_choice, check_integer, check_number, check_type, suggest
from vardrop._core.errors import VardropError
from vardrop.objective.schedules import Schedule, linear_warmup
from vardrop.tuning.train import Precision

Rate = Literal["constant", "linear", "late", "cosine"]
FEW, FOLDS = 2000, 4  # tables with fewer rows are held out in so many folds
_STEPS_FEW, _STEPS_MANY, _STEPS_IMAGES = 5000, 6000, 3000
_FULL_KL = 100_000  # images with a KL weight of 1
_LEAST = {
    **dict.fromkeys(("epochs", "batch_size", "folds", "samples", "patience"), 1),
    **dict.fromkeys(("pretrain", "seed"), 0),
}
_LIMITS: dict[str, dict[str, Any]] = {
    **{name: {"at_least": 0} for name in ("weight_decay", "checkpoint_seconds", "beta")},
    **{name: {"above": 0} for name in ("lr", "noise_lr", "clip")},
    "seed": {"below": 2**62},  # generators take 63 bits
}
# Settings that may be None.
_FOLLOWS = {"epochs", "batch_size", "folds", "patience", "beta", "lr", "noise_lr", "clip"}


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of a training.

    Every argument is an option of `vardrop fit`, with this text as its help.

    Settings that are None by default follow from the data, see `for_data`.

    Args:
        epochs: epochs of the noisy model. The default makes 5000 steps, 6000 from 2000 rows of a
            table on and 3000 for images, with at least 5 epochs for tables and 20 for images.
        batch_size: examples per step, over all processes together. The default is an eighth of
            the rows, from 16 to 512, for tables and 64 for images.
        lr: learning rate of Adam. The default is 0.01 below 2000 rows of a table, 0.005 from there
            on and 0.003 for images.
        noise_lr: learning rate of the noise parameters, `lr` by default.
        weight_decay: weight decay of the weights. Noise parameters have none.
        rate: learning rate over time: constant, linear (falls to 0), late (constant for the first
            half, then falls to 0) or cosine.
        warmup: the two epochs between which the KL weight rises from 0 to `beta`, both 0 for no
            warm-up. The default is the first quarter of `epochs`.
        beta: KL weight after the warm-up. For tables the default is chosen on held-out rows, with
            trainings of all epochs. For images it is 1/100000 per image, at most 1.
        folds: parts of a table's rows that are held out in turn to choose the KL weight and the
            scale of the noise. With 1 only the validation part is held out. The default is 4
            below 2000 rows and 1 from there on.
        compare: also train the plain model on the same rows, and report if it is as good.
        heteroscedastic: learn the width of a regression's noise for each row, not one for all.
        class_weight: weights of the rows of each class in training, or balanced for an equal total
            weight of all classes. Test scores are unweighted.
        samples: draws of the noise per step.
        clip: largest norm of the gradient, no bound by default.
        pretrain: epochs of the plain model before it is made noisy.
        patience: stop after so many epochs without a better validation loss, never by default.
            With it the best model on validation data is kept instead of the last one.
        precision: type of the forward pass: float32, or bfloat16 for mixed precision.
        compile: use torch.compile.
        device: device to train on, such as cpu or cuda. With auto it is a GPU if one is available,
            under torchrun one for each process.
        seed: seed of the initial weights, the noise, the shuffling and the split of the data. A
            resumed run keeps its seed.
        checkpoint_seconds: seconds after which a checkpoint is written inside an epoch.

    >>> Settings(epochs=20).schedule(0.5)(10)
    0.5
    """

    epochs: int | None = None
    batch_size: int | None = None
    lr: float | None = None
    noise_lr: float | None = None
    weight_decay: float = 0.0
    rate: Rate = "cosine"
    warmup: tuple[float, float] | None = None
    beta: float | None = None
    folds: int | None = None
    compare: bool = True
    heteroscedastic: bool = False
    class_weight: Literal["balanced"] | dict[str, float] | None = None
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
        settings = {k: v for k, v in vars(self).items() if v is not None or k not in _FOLLOWS}
        for name in _LEAST.keys() & settings:
            check_integer(name, settings[name], _LEAST[name])
        for name in _LIMITS.keys() & settings:
            check_number(name, settings[name], **_LIMITS[name])
        check_choice("rate", self.rate, get_args(Rate))
        check_choice("precision", self.precision, get_args(Precision))
        for name in ("compile", "compare", "heteroscedastic"):
            check_type(name, settings[name], bool, "True or False")
        check_type("device", self.device, str, "the name of a device")
        epochs, weights = self.warmup, self.class_weight
        if epochs is not None and (not isinstance(epochs, tuple) or len(epochs) != 2):
            text = f"Expected `warmup` to be two epochs, such as (5, 20), but got {epochs!r}."
            raise VardropError(text)
        for epoch in epochs or ():
            check_number("warmup", epoch, at_least=0)
        if weights != "balanced":
            wanted = "'balanced', or weights by class such as {'yes': 10, 'no': 1}"
            check_type("class_weight", weights, dict | None, wanted)
        for name, weight in weights.items() if isinstance(weights, dict) else ():
            check_type("class_weight", name, str, "weights by the names of classes")
            check_number(f"class_weight[{name!r}]", weight, at_least=0)
        self.schedule(1.0)
        if self.patience is not None and (self.folds or 1) > 1:
            text = f"`patience` needs a validation part, but got folds={self.folds}."
            raise VardropError(f"{text} Leave one of them out.")

    def for_data(self, rows: int, images: bool = False) -> Settings:
        """Fill settings that are None from the number of rows, except `beta` for tables.

        Args:
            rows: the number of training and validation rows.
            images: whether the data are images instead of a table.

        >>> chosen = Settings(lr=0.1).for_data(800)
        >>> chosen.batch_size, chosen.epochs, chosen.lr, chosen.folds
        (100, 625, 0.1, 4)
        """
        few = rows < FEW and not images
        batch = self.batch_size or (64 if images else min(max(rows // 8, 16), 512))
        steps = _STEPS_IMAGES if images else _STEPS_FEW if few else _STEPS_MANY
        usual: dict[str, Any] = {
            "batch_size": batch,
            "epochs": max(20 if images else 5, math.ceil(steps / math.ceil(rows / batch))),
            "lr": 3e-3 if images else 1e-2 if few else 5e-3,
            "folds": min(FOLDS, rows) if few and self.patience is None else 1,
            "beta": min(1.0, rows / _FULL_KL) if images else None,
        }
        absent = {name: v for name, v in usual.items() if getattr(self, name) is None}
        return dataclasses.replace(self, **absent)

    @property
    def warm(self) -> float:
        """The epoch at which the KL weight reaches `beta`."""
        return max(1.0, 0.25 * (self.epochs or 0)) if self.warmup is None else self.warmup[1]

    def schedule(self, beta: float) -> Schedule:
        """The KL weight by epoch, `beta` after the warm-up."""
        start = 0.0 if self.warmup is None else self.warmup[0]
        if start == self.warm == 0:
            return lambda epoch: beta
        return linear_warmup(start, self.warm, beta)

    def factor(self, epochs: int) -> Schedule:
        """The factor on the learning rate by epoch, for a training of this many epochs."""
        falls = {
            "constant": lambda e: 1.0,
            "linear": lambda e: 1 - e / epochs,
            "late": lambda e: min(1.0, 2 - 2 * e / epochs),
            "cosine": lambda e: 0.5 * (1 + math.cos(math.pi * e / epochs)),
        }
        return falls[self.rate]

    @classmethod
    def from_json(cls, stored: dict[str, Any], others: Iterable[str] = ()) -> Settings:
        """The settings of a dictionary, such as `dataclasses.asdict` makes.

        Args:
            stored: settings by name.
            others: other names to suggest for an unknown one.
        """
        names = {f.name for f in dataclasses.fields(cls)}
        if unknown := sorted(set(stored) - names):
            listed = sorted({*names, *others} - {"options"})
            kind = "argument" if others else "setting"
            text = f"Unknown {kind} {unknown[0]!r}.{suggest(unknown[0], listed)}"
            raise VardropError(f"{text} Available: {', '.join(listed)}.")
        warmup = stored.get("warmup")
        return cls(**{**stored, "warmup": tuple(warmup) if isinstance(warmup, list) else warmup})
