"""A net before and after: how good, how fast, how large."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import Tensor, nn

from vardrop import metrics
from vardrop.checks import check_net
from vardrop.compression.files import save
from vardrop.compression.flow import as_inputs, evaluating
from vardrop.compression.rebuild import densify
from vardrop.compression.report import layer_costs
from vardrop.compression.scoring import Data, batches, outputs
from vardrop.compression.sparse import seconds


@dataclass(frozen=True)
class Figures:
    """What one classifier scores and costs; `auroc` is of its entropy against foreign inputs."""

    accuracy: float
    nll: float
    ece: float
    auroc: float | None
    latency: float
    macs: int
    bytes: int


@dataclass(frozen=True)
class Comparison:
    """Two nets side by side; print it as a table."""

    before: Figures
    after: Figures

    def __str__(self) -> str:
        lines = [f"{'':9} {'before':>12} {'after':>12}"]
        for field in fields(Figures):
            pair = (getattr(self.before, field.name), getattr(self.after, field.name))
            if None not in pair:
                lines.append(f"{field.name:9} {pair[0]:12.5g} {pair[1]:12.5g}")
        return "\n".join(lines)


def compare(
    before: nn.Module, after: nn.Module, test: Data, foreign: Tensor | None = None
) -> Comparison:
    """Accuracy, NLL, ECE, out-of-domain AUROC, latency, MACs and bytes of two classifiers.

    Args:
        before, after: plain nets that return logits (N, classes).
        test: inputs and labels.
        foreign: inputs of another kind, which a net should be less sure about.

    The latency is of one batch of `test` in seconds, the bytes are those of `save` on disk, the
    MACs those of one example.

    >>> import torch
    >>> net = torch.nn.Linear(4, 3)
    >>> result = compare(net, net, (torch.randn(8, 4), torch.zeros(8, dtype=torch.long)))
    >>> result.before.macs
    12
    """
    check_net(before, "before")
    check_net(after, "after")
    return Comparison(_figures(before, test, foreign), _figures(after, test, foreign))


def _entropy(probs: Tensor) -> Tensor:
    return torch.special.entr(probs).sum(1)


def _figures(net: nn.Module, test: Data, foreign: Tensor | None) -> Figures:
    logits, y = outputs(net, test, "test")
    probs = logits.double().softmax(1)
    x = as_inputs(batches(test)[0][0])
    costs = layer_costs(densify(net)[0], tuple(t[:1] for t in x))
    auroc = None
    if foreign is not None:
        other = outputs(net, (foreign, torch.zeros(len(foreign))))[0].double().softmax(1)
        auroc = float(metrics.auroc(_entropy(probs), _entropy(other)))
    with evaluating(net):
        latency = seconds(lambda: net(*x), budget=0.2)
    with tempfile.TemporaryDirectory() as folder:
        size = save(net, Path(folder) / "net.safetensors")
    return Figures(
        float(metrics.accuracy(probs, y)),
        float(metrics.nll_from_log_probs(logits.double().log_softmax(1), y)),
        float(metrics.ece(probs, y)),
        auroc,
        latency,
        sum(c.macs for c in costs.values()),
        size,
    )
