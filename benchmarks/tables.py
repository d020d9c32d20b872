"""`fit` with its defaults beside scikit-learn's MLPRegressor with its own, on large tables.

OMP_NUM_THREADS=1 python benchmarks/tables.py [rows]

Three tables of 100 000 rows and 21 columns: one that takes many steps to learn, Friedman's first
function and a plane with noise, which scikit-learn's net leaves after few steps. Both train on 80 %
of the rows, a tenth of all held out, and are scored on the same fifth; the width of the MLP's noise
is that of its held-out errors, and its columns are scaled for it. Processor time of one thread, so
that other work on the machine weighs on both alike: `fit` reads the table, chooses the KL weight,
trains the plain net beside, evaluates and writes all files. The figures go to tables.json.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import machine
import numpy as np
import pandas
import torch
from sklearn.neural_network import MLPRegressor

import vardrop as vd
from vardrop.app.runs.run_callbacks import RunCallback

ROWS, COLUMNS, TIMES = 100_000, 21, 3.0
HERE = Path(__file__).parent


def waves(x: Any) -> Any:
    smooth = 2 * np.sin(np.pi * x[:, 0] * x[:, 1] / 2) + x[:, 2] ** 2 + x[:, 3]
    return smooth + 0.5 * x[:, 4] * x[:, 5] + np.abs(x[:, 6]) - np.tanh(2 * x[:, 7]) * x[:, 8]


def friedman(x: Any) -> Any:
    u = 0.5 * (1 + np.tanh(0.8 * x))  # about even between 0 and 1
    curved = 10 * np.sin(np.pi * u[:, 0] * u[:, 1]) + 20 * (u[:, 2] - 0.5) ** 2
    return curved + 10 * u[:, 3] + 5 * u[:, 4]


def plane(x: Any) -> Any:
    return x @ np.linspace(-0.5, 0.5, x.shape[1])


# The function and the deviation of the noise.
TABLES = {"waves": (waves, 0.5), "friedman": (friedman, 1.0), "plane": (plane, 0.5)}


def table(name: str, rows: int, seed: int = 0) -> pandas.DataFrame:
    """Columns x0 to x20, the target y, and the part of each row."""
    function, noise = TABLES[name]
    g = np.random.default_rng(seed)
    x = g.standard_normal((rows, COLUMNS))
    frame = pandas.DataFrame(x, columns=[f"x{i}" for i in range(COLUMNS)])
    frame["y"] = function(x) + noise * g.standard_normal(rows)
    tenth = rows // 10
    frame["part"] = np.repeat(["train", "validation", "test"], [rows - 3 * tenth, tenth, 2 * tenth])
    return frame


def mlp(frame: pandas.DataFrame) -> dict[str, float]:
    """scikit-learn's net: seconds, steps and scores."""
    parts = dict(iter(frame.groupby("part")))
    x = {part: own.drop(columns=["y", "part"]).to_numpy() for part, own in parts.items()}
    y = {part: own["y"].to_numpy() for part, own in parts.items()}
    begun = time.process_time()
    mean, std = x["train"].mean(0), x["train"].std(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that 200 iterations were not enough
        net = MLPRegressor(random_state=0).fit((x["train"] - mean) / std, y["train"])
    errors = {part: net.predict((x[part] - mean) / std) - y[part] for part in x}
    width = float(np.sqrt(np.square(errors["validation"]).mean()))
    seconds = time.process_time() - begun
    square = float(np.square(errors["test"]).mean())
    nll = 0.5 * square / width**2 + math.log(width) + 0.5 * math.log(2 * math.pi)
    return {"seconds": seconds, "epochs": net.n_iter_, "rmse": math.sqrt(square), "nll": nll}


def ours(frame: pandas.DataFrame, **more: Any) -> dict[str, float]:
    """`fit` from a table in memory to its results."""
    with tempfile.TemporaryDirectory() as folder:
        begun = time.process_time()
        run = vd.fit(
            frame, target="y", split="part", out=Path(folder) / "r", callback=RunCallback(), **more
        )
        seconds = time.process_time() - begun
        scores, held = run.results["metrics"], run.results["held_out"]
    return {
        "seconds": seconds,
        "epochs": run.config.settings.epochs,
        **{name: scores[name] for name in ("rmse", "nll", "coverage95")},
        "KL weight": held["beta"],
    }


def measured(name: str, rows: int, **more: Any) -> dict[str, Any]:
    frame, others = table(name, rows), machine.Others()
    found = {"table": name, "MLPRegressor": mlp(frame), "fit": ours(frame, **more)}
    found["times"] = found["fit"]["seconds"] / found["MLPRegressor"]["seconds"]
    better = found["fit"]["nll"] < found["MLPRegressor"]["nll"]
    return {**found, "goal": found["times"] <= TIMES and better, "busy cores": others.cores()}


def main() -> None:
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else ROWS
    torch.set_num_threads(1)
    found = []
    for name in TABLES:
        found.append(measured(name, rows))
        print(json.dumps(found[-1]), flush=True)
    kept = {"rows": rows, "columns": COLUMNS, "machine": machine.facts(), "tables": found}
    (HERE / "tables.json").write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
