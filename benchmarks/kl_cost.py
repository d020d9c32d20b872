"""kl(net) and its gradient, against the sigmoid approximation by autograd = 1."""

from __future__ import annotations

import torch
from measuring import Row, Run, Settings, figure, rows
from naive import sigmoid_kl
from torch import nn

import vardrop as vd

REFERENCE = "sigmoid by autograd"


def _layer(width: int) -> nn.Module:
    return vd.convert(nn.Linear(width, width, bias=False), vd.sparse_vd())


def _gradient(net: nn.Module, value: bool, compiled: bool = False) -> Run:
    kl = torch.compile(vd.kl) if compiled else vd.kl

    def run() -> None:
        net.zero_grad(set_to_none=True)
        kl(net, value=value).backward()

    return run


def million(settings: Settings) -> list[Row]:
    net, other = _layer(1000), _layer(1000)
    weight, log_sigma2 = other.weight, other.log_sigma2

    def reference() -> None:
        other.zero_grad(set_to_none=True)
        sigmoid_kl(weight, log_sigma2).backward()  # type: ignore[arg-type, no-untyped-call]

    approximate = vd.convert(nn.Linear(1000, 1000, bias=False), vd.sparse_vd(form="sigmoid"))
    runs = {
        REFERENCE: reference,
        "exact gradient without value": _gradient(net, value=False),
        "exact value and gradient": _gradient(net, value=True),
        "exact value and gradient, torch.compile": _gradient(_layer(1000), True, compiled=True),
        "sigmoid of vardrop": _gradient(approximate, value=True),
    }
    return rows("kl(net) and gradient", "1 M weights", runs, settings, REFERENCE)


def hundred_million(settings: Settings) -> list[Row]:
    """Value alone; once, as it is long."""
    net = _layer(10_000)
    clock = settings.clock()
    with torch.no_grad():
        start = clock()
        vd.kl(net)
        seconds = clock() - start
        weight, log_sigma2 = net.weight, net.log_sigma2
        start = clock()
        sigmoid_kl(weight, log_sigma2)  # type: ignore[arg-type]
        unit = clock() - start
    note = f"{seconds:.2f} s, sigmoid {unit:.2f} s, one call each"
    return [figure("kl(net), value alone", "100 M weights", "exact value", seconds / unit, note)]
