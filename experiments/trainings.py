"""What the papers' runs share: their nets and images, and trainings that can be cut off."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vardrop._core.files import with_checksum, write_atomically
from vardrop.app.data import Images, load_images
from vardrop.app.runs import Recorder, read_history
from vardrop.app.store import CHECKPOINT, HISTORY
from vardrop.tuning import Epoch, Loop

ProgressCallback = Callable[[float, str], None]  # which fraction is done, and what is being done
Record = dict[str, Any]


def mlp(*widths: int) -> nn.Sequential:
    """A dense ReLU net on flattened inputs: `mlp(784, 300, 100, 10)` is LeNet-300-100."""
    layers: list[nn.Module] = [nn.Flatten()]
    for n, m in pairwise(widths):
        layers += [nn.Linear(n, m), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def lenet5(classes: int = 10, sizes: Sequence[int] = (20, 50, 500)) -> nn.Sequential:
    """LeNet-5-Caffe: conv 20@5, pool, conv 50@5, pool, 800-500-classes; in the faster layout."""
    first, second, units = sizes
    net = nn.Sequential(
        *(nn.Conv2d(1, first, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(first, second, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(16 * second, units), nn.ReLU(), nn.Linear(units, classes)),
    )
    return net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


NETS: dict[str, Callable[[], nn.Module]] = {
    "lenet300": lambda: mlp(784, 300, 100, 10),
    "lenet500-300": lambda: mlp(784, 500, 300, 10),
    "lenet5": lenet5,
}


def small_weights(net: nn.Module) -> nn.Module:
    """Dense weights N(0, 0.01^2) and biases 0; kernels stay as torch draws them."""
    for module in net.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.01)
            nn.init.zeros_(module.bias)
    return net


def images(name: str, split: str = "train", count: int | None = None) -> Images:
    """The first images of a set, in file order."""
    x, y = load_images(name, split)
    return Images(x[:count], y[:count])


def batches(data: Images, size: int = 1000) -> list[tuple[Tensor, Tensor]]:
    """Image batches in order, for evaluation."""
    return list(zip(data.x.split(size), data.y.split(size), strict=True))


def error(net: nn.Module, x: Tensor, y: Tensor) -> float:
    """Wrong answers in per cent; leaves the net in evaluation mode."""
    net.eval()
    with torch.no_grad():
        guess = torch.cat([net(part).argmax(1) for part in x.split(2000)])
    return 100 * float((guess != y).double().mean())


def learned(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that are trained; a variance layer's means are not."""
    return [p for p in module.parameters() if p.requires_grad]


class Watch:
    """Runs the trainings of one seed: says how far they are, goes on where they were cut off.

    Args:
        directory: where checkpoints go; without it nothing is kept.
        tell: is told which fraction of the seed is done, after every epoch.
        seconds: how long after a checkpoint the next one is due.
    """

    def __init__(
        self,
        directory: Path | None = None,
        tell: ProgressCallback | None = None,
        seconds: float = 60.0,
    ) -> None:
        self.directory, self.tell, self.seconds = directory, tell, seconds
        self.done = 0.0

    def fit(
        self,
        name: str,
        loop: Loop,
        measure: Callable[[Epoch], Record] | None = None,
        fraction: float = 1.0,
    ) -> list[Record]:
        """Train to the end, from the checkpoint of this name where there is one.

        Args:
            name: tells this training from the others of the seed.
            loop: the training.
            measure: what to record after each epoch; NLL and KL by default.
            fraction: of the seed's work that this training is.

        Returns:
            A record for each epoch.
        """
        curve, written = self._resumed(name, loop), time.monotonic()
        for epoch in loop.run():
            found = measure(epoch) if measure else {"nll": epoch.nll, "kl": epoch.kl}
            curve.append({"epoch": epoch.epoch, **found})
            self._say(name, loop, fraction)
            if loop.epoch == loop.epochs or time.monotonic() - written > self.seconds:
                self._save(name, loop, curve)
                written = time.monotonic()
        self.done += fraction
        return curve

    def _say(self, name: str, loop: Loop, fraction: float) -> None:
        if self.tell is not None:
            part = fraction * loop.epoch / loop.epochs
            self.tell(self.done + part, f"{name}, epoch {loop.epoch} of {loop.epochs}")

    def _resumed(self, name: str, loop: Loop) -> list[Record]:
        if self.directory is None or not (self.directory / name / CHECKPOINT).is_file():
            return []
        Recorder(self.directory / name).resume(loop)
        return read_history(self.directory / name)

    def _save(self, name: str, loop: Loop, curve: list[Record]) -> None:
        if self.directory is None:
            return
        folder = self.directory / name
        folder.mkdir(parents=True, exist_ok=True)
        # The curve first: what it has beyond the checkpoint is cut off on the way back.
        lines = "".join(json.dumps(with_checksum(record)) + "\n" for record in curve)
        write_atomically(folder / HISTORY, lines.encode())
        Recorder(folder).save(loop)
