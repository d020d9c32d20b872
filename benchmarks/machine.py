"""The machine a run was on, and how quiet it was (Linux)."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import Any

import torch

QUIET = 0.2  # cores


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def facts() -> dict[str, Any]:
    return {
        "processor": _processor(), "cores": os.cpu_count(), "torch": torch.__version__,
        "python": platform.python_version(), "load before": os.getloadavg()[0],
    }  # fmt: skip


def _busy() -> float:
    """Processor seconds that all programs have had since the start, also on other guests."""
    user, nice, system, _, _, irq, soft, steal = (
        int(n) for n in Path("/proc/stat").read_text().split()[1:9]
    )
    return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")


class Others:
    """How many cores are busy with other programs from now on."""

    def __init__(self) -> None:
        self._wall, self._all, self._own = time.perf_counter(), _busy(), sum(os.times()[:4])

    def cores(self) -> float:
        wall = time.perf_counter() - self._wall
        others = (_busy() - self._all) - (sum(os.times()[:4]) - self._own)
        return max(0.0, others / wall)
