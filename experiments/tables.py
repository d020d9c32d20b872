"""Tables with the defaults of `fit` alone, beside what a user would pick instead.

Every seed is a split of its own: a fifth of the rows to test on, a tenth for validation. Three
predict the same test rows:

- vardrop: `fit` with nothing given.
- MLP: scikit-learn's, with its defaults but `max_iter=1000`, on the training rows; the width of its
  noise is the root mean square error on the validation rows.
- plain: the same net on the same schedule without noise, `--recipe none`; its best epoch and the
  width of its noise (or its temperature) are those of the validation rows.

All choices behind the defaults were made on rows held out of training rows, never on test rows.
"""

from __future__ import annotations

import gzip
import math
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from experiments.trainings import Watch
from vardrop._core.errors import VardropError, import_optional
from vardrop.app.data import DATASETS, data_directory, read_table
from vardrop.app.data.preprocessing import Task
from vardrop.app.runs import Run, fit, load_run, resume
from vardrop.app.runs.run_callbacks import RunCallback

_NEVER = 10**9  # a patience that does not end: the best epoch of all is kept
_SURE = 1.96


def defaults(
    seed: int,
    table: str,
    task: Task | None = None,
    epochs: int | None = None,
    watch: Watch | None = None,
) -> dict[str, Any]:
    """The scores of the three on the test rows of one split.

    Args:
        seed: of the split and of everything that is drawn.
        table: an embedded data set, or the name of a CSV file in `uci` of the data directory.
        task: of a file.
        epochs: fewer than the defaults have, for a quick look.
        watch: keeps the trainings.
    """
    kept = None if watch is None else watch.directory
    more = {} if epochs is None else {"epochs": epochs}
    with TemporaryDirectory() as temporary:
        folder = Path(temporary) if kept is None else kept
        folder.mkdir(parents=True, exist_ok=True)
        source = _source(table, task, folder)
        arguments = source | more | {"seed": seed}
        ours = _run(folder / "vardrop", arguments, watch, 0.8)
        bare = {"recipe": None, "patience": _NEVER}
        plain = _run(folder / "plain", arguments | bare, watch, 0.95)
        scores = {"vardrop": _scores(ours), "plain": _scores(plain), "MLP": _mlp(ours, seed)}
        weight = ours.results["held_out"]["beta"]
    figures = {f"{k}, {name}": v for name, found in scores.items() for k, v in found.items()}
    return {"figures": figures | {"KL weight": weight}}


def _source(table: str, task: Task | None, folder: Path) -> dict[str, Any]:
    """The arguments of `fit` that name the data; a packed file is unpacked into the folder."""
    if table in DATASETS:
        return {"data": table, "stratify": False}
    root = (data_directory() or Path()) / "uci"
    path, packed = root / f"{table}.csv", root / f"{table}.csv.gz"
    if not path.is_file():
        if not packed.is_file():
            raise VardropError(
                f"Expected the file {path}, but it is not there. Set VARDROP_DATA to the directory "
                f"that holds uci/{table}.csv."
            )
        path = folder / f"{table}.csv"
        path.write_bytes(gzip.decompress(packed.read_bytes()))
    found = read_table(path)
    constant = [str(name) for name in found.columns if found[name].nunique() < 2]
    parted = {"stratify": False}  # by chance alone, for all three alike
    return {"data": path, "target": "target", "task": task, "drop": constant, **parted}


def _run(out: Path, arguments: dict[str, Any], watch: Watch | None, part: float) -> Run:
    """A run, from where it was cut off; afterwards this part of the seed is done."""
    if (out / "results.json").is_file():
        return load_run(out)
    begun = (out / "config.json").is_file()
    found = (
        resume(out, callback=RunCallback())
        if begun
        else fit(out=out, callback=RunCallback(), force=True, **arguments)
    )
    if watch is not None and watch.tell is not None:
        watch.tell(part, f"{out.name} trained")
    return found


def _scores(run: Run) -> dict[str, float]:
    found = run.results["metrics"]
    if "accuracy" in found:
        return {"error": 1 - found["accuracy"], "NLL": found["nll"]}
    return {"RMSE": found["rmse"], "NLL": found["nll"], "coverage": found["coverage95"]}


def _mlp(run: Run, seed: int) -> dict[str, float]:
    """scikit-learn's net on the rows that the run trained on, but those of validation."""
    nets, numpy = import_optional("sklearn.neural_network"), import_optional("numpy")
    (x, y), (held_x, held_y), (test_x, test_y) = (
        (part.x.flatten(1).double().numpy(), part.y.flatten().numpy())
        for part in (run.data.train, run.data.validation, run.data.test)
    )
    regression = run.about.task == "regression"
    made = nets.MLPRegressor if regression else nets.MLPClassifier
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that 1000 iterations were not enough
        net = made(max_iter=1000, random_state=seed).fit(x, y)
    if not regression:
        probs = numpy.full((len(test_y), len(run.about.classes)), 1e-15)
        probs[:, net.classes_] = net.predict_proba(test_x).clip(1e-15)
        nll = -float(numpy.log(probs[range(len(test_y)), test_y]).mean())
        return {"error": float((probs.argmax(1) != test_y).mean()), "NLL": nll}
    assert run.about.preprocessing is not None
    unit = run.about.preprocessing.target_std
    width = float(numpy.sqrt(((net.predict(held_x) - held_y) ** 2).mean()))
    missed = numpy.abs(net.predict(test_x) - test_y)
    square = float((missed**2).mean())
    nll = 0.5 * square / width**2 + math.log(width * unit) + 0.5 * math.log(2 * math.pi)
    coverage = float((missed <= _SURE * width).mean())
    return {"RMSE": unit * math.sqrt(square), "NLL": nll, "coverage": coverage}
