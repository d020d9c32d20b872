"""All benchmarks: python benchmarks/run.py [--quick] [--rounds N] [--threads 1 2] [--only part].

Writes benchmarks/history/<date>.json after every part, then RESULTS.md and train_step.png.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import time
import traceback
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import deploying
import growth
import kl_cost
import memory
import peers
import predicting
import results
import startup
import torch
import train_step
from measuring import Row, Settings, figure
from nets import PREDICT, TRAIN

HERE = Path(__file__).parent
Part = Callable[[], list[Row]]


def our_parts(settings: Settings) -> dict[str, Part]:
    """The measurements of this library by name, for one number of threads."""
    cases = [c for c in TRAIN if c.quick or not settings.quick]
    parts: dict[str, Part] = {
        **{f"train step {c.name}": partial(train_step.measure, c, settings) for c in cases},
        **{f"prediction {c.name}": partial(predicting.measure, c, settings) for c in PREDICT},
    }
    if settings.threads > 1:
        return parts
    parts |= {
        "prediction streaming": partial(predicting.streaming, settings),
        "kl": partial(kl_cost.million, settings),
        "verbs": partial(deploying.verbs, settings),
        "latency": partial(deploying.latency, settings),
        "growth width": partial(growth.width, settings),
        "growth layers": partial(growth.layers, settings),
        "growth draws": partial(growth.draws, settings),
        "growth per-example": partial(growth.per_example, settings),
        "import": partial(startup.measure, 5 if settings.quick else 15),
        "memory train": partial(memory.training, settings.quick),
        "memory prediction": memory.prediction,
    }
    if not settings.quick:
        parts["kl of 100 M weights"] = partial(kl_cost.hundred_million, settings)
    return parts


def peer(name: str, settings: Settings, run: dict[str, Any]) -> list[Row]:
    """The rows of one library; its checks, or why there are none, go into the run."""
    record: dict[str, Any] = {**peers.ensure(name)}
    run["peers"].setdefault(name, record)
    if "failure" in record:
        return [figure("train step", c.name, name, None, record["failure"]) for c in TRAIN[:1]]
    command = [
        str(peers.python(name)), str(HERE / "worker.py"), name, "--rounds", str(settings.rounds),
        "--seconds", str(settings.seconds), "--threads", str(settings.threads),
    ]  # fmt: skip
    done = subprocess.run(
        [*command, *(["--quick"] if settings.quick else [])],
        env={**os.environ, "OMP_NUM_THREADS": str(settings.threads)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        run["peers"][name]["failure"] = f"worker fails: {done.stderr.strip().splitlines()[-1]}"
        return []
    answer = json.loads(done.stdout.splitlines()[-1])
    run["peers"][name]["checks"] = answer["checks"]
    return list(answer["rows"])


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _start(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "date": datetime.now().isoformat(timespec="minutes"), "quick": arguments.quick,
        "rounds": arguments.rounds, "threads": arguments.threads, "peers": {}, "rows": [],
        "machine": {
            "processor": _processor(), "cores": os.cpu_count(), "torch": torch.__version__,
            "python": platform.python_version(), "load before": os.getloadavg()[0],
        },
    }  # fmt: skip


def _parts(arguments: argparse.Namespace, run: dict[str, Any]) -> dict[tuple[str, int], Part]:
    found: dict[tuple[str, int], Part] = {}
    for threads in arguments.threads:
        settings = Settings(arguments.rounds, arguments.seconds, threads, arguments.quick)
        ours = our_parts(settings)
        others = {f"peer {n}": partial(peer, n, settings, run) for n in peers.PACKAGES}
        found |= {(name, threads): part for name, part in (ours | others).items()}
    return {k: part for k, part in found.items() if any(o in k[0] for o in arguments.only)}


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    run = _start(arguments)
    path = HERE / "history" / f"{run['date'].replace(':', '')}.json"
    path.parent.mkdir(exist_ok=True)
    for (name, threads), part in _parts(arguments, run).items():
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        begin = time.perf_counter()
        try:
            run["rows"] += part()
        except Exception as error:
            traceback.print_exc()
            run["rows"].append(figure("failed", name, type(error).__name__, None, str(error)))
        print(f"{time.perf_counter() - begin:7.1f} s  {name}, {threads} thread(s)", flush=True)
        run["machine"]["load after"] = os.getloadavg()[0]
        path.write_text(json.dumps(run, indent=1))
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="under five minutes")
    parser.add_argument("--rounds", type=int, help="at most; 60, or 15 in a quick run")
    parser.add_argument("--seconds", type=float, help="of a table; 90, or 3 in a quick run")
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--only", nargs="+", default=[""], help="parts of names of measurements")
    arguments = parser.parse_args()
    arguments.rounds = arguments.rounds or (15 if arguments.quick else 60)
    arguments.seconds = arguments.seconds or (3.0 if arguments.quick else 90.0)
    results.write(measure(arguments))


if __name__ == "__main__":
    main()
