"""All benchmarks: python benchmarks/run.py [--quick] [--rounds N] [--threads 1 2] [--only part].

Writes benchmarks/history/<date>.json after every part. A complete run then writes RESULTS.md and
train_step.png; one with --only prints its page.
"""

from __future__ import annotations

import argparse
import json
import os
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
import machine
import memory
import peers
import predicting
import results
import startup
import torch
import train_step
from measuring import Row, Settings, figure
from peer_layers import FASTEST

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
        "kl": partial(kl_cost.million, settings),
        "verbs": partial(deploying.verbs, settings),
        "latency": partial(deploying.latency, settings),
        "growth width": partial(growth.width, settings),
        "growth layers": partial(growth.layers, settings),
        "growth draws": partial(growth.draws, settings),
        "growth per-example": partial(growth.per_example, settings),
        "import": partial(startup.measure, 3 if settings.quick else 15),
        "memory train": partial(memory.training, settings.quick),
    }
    if not settings.quick:
        parts |= {
            "kl of 100 M weights": partial(kl_cost.hundred_million, settings),
            "prediction streaming": partial(predicting.streaming, settings),
            "memory prediction": memory.prediction,
        }
    return parts


def peer(name: str, settings: Settings, run: dict[str, Any]) -> list[Row]:
    """The rows of one library; its checks, or why there are none, go into the run."""
    record = run["peers"].setdefault(name, {**peers.ensure(name)})
    if "failure" in record:
        return [figure("train step", c.name, name, None, record["failure"]) for c in TRAIN[:3]]
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
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        record["failure"] = f"worker ends with {done.returncode}: {last}"
        return []
    answer = json.loads(done.stdout.splitlines()[-1])
    record["checks"] = answer["checks"]
    return [{**row, "environment": name} for row in answer["rows"]]


def _start(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "date": datetime.now().isoformat(timespec="seconds"), "quick": arguments.quick,
        "rounds": arguments.rounds, "seconds": arguments.seconds, "threads": arguments.threads,
        "machine": machine.facts(), "parts": [], "peers": {}, "rows": [],
    }  # fmt: skip


def _parts(arguments: argparse.Namespace, run: dict[str, Any]) -> dict[tuple[str, int], Part]:
    found: dict[tuple[str, int], Part] = {}
    for threads in arguments.threads:
        settings = Settings(arguments.rounds, arguments.seconds, threads, arguments.quick)
        ours = our_parts(settings)
        names = peers.PACKAGES if threads == 1 else FASTEST
        others = {f"peer {n}": partial(peer, n, settings, run) for n in names}
        found |= {(name, threads): part for name, part in (ours | others).items()}
    return {k: part for k, part in found.items() if any(o in k[0] for o in arguments.only)}


def _measured(name: str, threads: int, part: Part, run: dict[str, Any]) -> None:
    """One part: its rows, how long it took, and how busy the machine was otherwise."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    begin, others = time.perf_counter(), machine.Others()
    try:
        run["rows"] += part()
    except Exception as error:
        traceback.print_exc()
        run["rows"].append(figure("failed", name, type(error).__name__, None, str(error)))
    seconds, cores = time.perf_counter() - begin, others.cores()
    run["parts"].append({"name": name, "threads": threads, "seconds": seconds, "others": cores})
    run["machine"]["load after"] = os.getloadavg()[0]
    print(f"{seconds:7.1f} s  {name}, {threads} thread(s)", flush=True)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    run = _start(arguments)
    path = HERE / "history" / f"{run['date'].replace(':', '')}.json"
    path.parent.mkdir(exist_ok=True)
    for (name, threads), part in _parts(arguments, run).items():
        _measured(name, threads, part, run)
        path.write_text(json.dumps(run, indent=1))
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="under five minutes")
    parser.add_argument("--rounds", type=int, help="at most; 60, or 25 in a quick run")
    parser.add_argument("--seconds", type=float, help="of a table; 8, or 2 in a quick run")
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--only", nargs="+", default=[""], help="parts of names of measurements")
    arguments = parser.parse_args()
    arguments.rounds = arguments.rounds or (25 if arguments.quick else 60)
    arguments.seconds = arguments.seconds or (2.0 if arguments.quick else 8.0)
    run = measure(arguments)
    if arguments.only == [""]:
        results.write(run)
    else:
        print(results.markdown(run))


if __name__ == "__main__":
    main()
