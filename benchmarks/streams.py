"""Peak memory and speed of a fit and a prediction of a Parquet file that is read piece by piece.

    python benchmarks/streams.py [rows]

A million rows of 18 numbers and two categories, one epoch, then predictions of all rows with 32
draws into a CSV file. Each runs in a process of its own, whose peak resident memory the operating
system tells; what the imports alone take stands beside it. `streams.json` keeps the figures.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_suffix(".json")
ROWS, DRAWS, PIECE = 1_000_000, 32, 100_000


def write(path: Path, rows: int) -> None:
    """The table, written piece by piece."""
    import numpy
    import pyarrow
    from pyarrow import parquet

    generator, writer = numpy.random.default_rng(0), None
    for begin in range(0, rows, PIECE):
        x = generator.standard_normal((18, min(PIECE, rows - begin)))
        town, kind = (generator.integers(0, n, x.shape[1]) for n in (8, 200))
        columns: dict[str, Any] = {f"x{i}": column for i, column in enumerate(x)}
        columns |= {"town": [f"t{i}" for i in town], "kind": [f"k{i}" for i in kind]}
        noise = 0.3 * generator.standard_normal(x.shape[1])
        columns["y"] = x[0] * x[1] + numpy.sin(x[2]) + 0.2 * town + noise
        piece = pyarrow.table(columns)
        writer = writer or parquet.ParquetWriter(path, piece.schema)
        writer.write_table(piece)
    if writer is not None:
        writer.close()


def work(name: str, folder: Path) -> None:
    """One measurement, in this process; printed as JSON."""
    import vardrop as vd
    from vardrop.app.runs import load_run, write_predictions

    vd.Stream  # noqa: B018  the imports of the application count as such
    begun, before = time.perf_counter(), _peak()
    if name == "fit":
        options = {"epochs": 1, "beta": 0.1, "compare": False, "device": "cpu"}
        run = vd.fit(vd.Stream(folder / "t.parquet"), target="y", out=folder / "run", **options)
        scores = {"r2": run.results["metrics"]["r2"], "batch_size": run.config.settings.batch_size}
    else:
        run = load_run(folder / "run")
        write_predictions(run, folder / "t.parquet", folder / "p.csv", DRAWS)
        scores = {"bytes_written": (folder / "p.csv").stat().st_size}
    seconds = time.perf_counter() - begun
    print(json.dumps({"peak": _peak(), "imports": before, "seconds": seconds, **scores}))


def _peak() -> int:
    """The most bytes that this process has held."""
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def measured(rows: int) -> dict[str, Any]:
    """Both measurements."""
    found: dict[str, Any] = {"rows": rows, "columns": 20, "draws": DRAWS}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.parquet"
        write(path, rows)
        found["file_bytes"] = path.stat().st_size
        for name in ("fit", "predict"):
            command = [sys.executable, __file__, name, folder]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            one = json.loads(done.stdout.splitlines()[-1])
            found[name] = {**one, "rows_per_second": rows / one["seconds"]}
    return found


def main(arguments: list[str]) -> None:
    """Measure, print and keep; or do one part of it."""
    if arguments and arguments[0] in ("fit", "predict"):
        work(arguments[0], Path(arguments[1]))
        return
    rows = int(arguments[0]) if arguments else ROWS
    found = measured(rows)
    text = json.dumps(found, indent=1) + "\n"
    print(text)
    if rows == ROWS:
        FILE.write_text(text)


if __name__ == "__main__":
    main(sys.argv[1:])
