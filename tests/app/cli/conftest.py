"""A folder with tables and runs, sound and broken, that the tests of the commands share."""

import json
import math
import shutil

import numpy as np
import pandas as pd
import pytest

from tests.app.cli.calling import call
from vardrop._core.files import read_tensors, sealed, write_tensors

N = 80
HOUSES = pd.DataFrame(
    {
        "area": [50 + (7 * i) % 60 for i in range(N)],
        "town": ["Ulm" if i % 3 else "Bern" for i in range(N)],
        "price": [3.5 * ((7 * i) % 60) + (i % 5) for i in range(N)],
    }
)


FILES = {
    "key.toml": "epoch = 2",
    "half.toml": "epochs = 2.5",
    "flag.toml": 'compare = "no"',
    "several.toml": "seed = [1, 2]",
    "day.toml": "target = 2020-01-01",
    "deep.toml": f"epochs = {'[' * 3000}{']' * 3000}",
    "nested.toml": "[option]\na = {b = 1}",
    "modules.toml": "import = {a = {}}",
    "true.toml": "target = true",
    "data.toml": 'data = "iris"',
    "failing.py": "1 / 0",
    "wanting.py": "import absent_package",
}


def tables():
    """Tables by the name of their file; all but the first two have something wrong."""
    rows = range(N)
    return {
        "houses": HOUSES,
        "new": HOUSES.drop(columns="price").head(4),
        "twon": HOUSES.rename(columns={"town": "twon"}).head(4),
        "no_town": HOUSES.drop(columns="town").head(4),
        "words": HOUSES.assign(area=["big" if i == 1 else i for i in rows]).head(4),
        "constant": HOUSES.assign(k=1),
        "constants": HOUSES.assign(**{"k": 1, "k 2": "x"}),
        "same": HOUSES.assign(price=1.0),
        "infinite": HOUSES.assign(area=[float("inf") if i == 8 else i for i in rows]),
        "text": HOUSES.assign(price=["x" if i == 8 else i for i in rows]),
        "hole": HOUSES.assign(price=[None if i == 8 else i for i in rows]),
        "keys": HOUSES.assign(key=[f"n{i}" for i in rows]),
        "many": HOUSES.assign(price=[f"n{i}" for i in rows]),
        "lonely": HOUSES[["price"]],
        "two": HOUSES.head(2),
        "header": HOUSES.head(0),
    }


def changed(run, copy, seal=True, **changes):
    """A copy of a run with other values in its config.json, as if they had been written there."""
    shutil.copytree(run, copy)
    config = {**json.loads((copy / "config.json").read_text()), **changes}
    if seal:
        config = sealed({k: v for k, v in config.items() if k != "sha256"})
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def with_nan(run, copy):
    """A copy of a run whose net has a NaN, as if it had been trained to."""
    shutil.copytree(run, copy)
    tensors, values = read_tensors(copy / "best.safetensors")
    tensors["net.1.weight"][0, 0] = math.nan
    write_tensors(copy / "best.safetensors", tensors, values)


@pytest.fixture(scope="package")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli")
    for name, table in tables().items():
        table.to_csv(folder / f"{name}.csv", index=False)
    (folder / "empty.csv").write_text("")
    (folder / "torn.csv").write_text("a,b\n1,2\n3,4,5\n")
    (folder / "bad.parquet").write_bytes(b"nothing")
    np.save(folder / "small.npy", np.zeros((2, 1, 5, 5)))
    np.save(folder / "nan.npy", np.stack([np.zeros((1, 8, 8)), np.full((1, 8, 8), np.nan)]))
    np.save(folder / "none.npy", np.zeros((0, 1, 8, 8)))
    np.save(folder / "complex.npy", np.zeros((2, 1, 8, 8), dtype=complex))
    (folder / "bad.npy").write_bytes(b"nothing")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    for name in ("notarun", "full", "broken/mnist"):
        (folder / name).mkdir(parents=True)
    (folder / "notarun" / "config.json").write_text("{")
    (folder / "full" / "letter.txt").write_text("mine")
    (folder / "broken" / "mnist" / "train-images-idx3-ubyte.gz").write_bytes(b"nothing")
    quick = ("--epochs", 2, "--json")
    houses = ("fit", folder / "houses.csv", "--target", "price")
    assert call(*houses, "--out", folder / "h", *quick) == 0
    assert call("fit", "digits", "--method", "none", "--out", folder / "plain", *quick) == 0
    assert call("fit", "digits", "--out", folder / "a", *quick) == 0
    changed(folder / "h", folder / "future", version=9)
    changed(folder / "h", folder / "moved", checksum="sha256:0")
    changed(folder / "h", folder / "edited", seal=False, where="0")
    with_nan(folder / "h", folder / "nan")
    torn = changed(folder / "h", folder / "torn")
    for file in ("best", "checkpoint"):
        (torn / f"{file}.safetensors").write_bytes(b"nothing")
    return folder
