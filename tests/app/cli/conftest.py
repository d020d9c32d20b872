"""A folder with tables and runs, sound and broken, that the tests of the commands share."""

import shutil

import numpy as np
import pandas as pd
import pytest

from tests.app.cli.calling import call
from tests.app.sealed import reseal

N = 80
HOUSES = pd.DataFrame({
    "area": [50 + (7 * i) % 60 for i in range(N)],
    "town": ["Ulm" if i % 3 else "Bern" for i in range(N)],
    "price": [3.5 * ((7 * i) % 60) + (i % 5) for i in range(N)],
})  # fmt: skip


FILES = {
    "key.toml": "epoch = 2", "half.toml": "epochs = 2.5", "flag.toml": 'compare = "no"',
    "day.toml": "target = 2020-01-01", "true.toml": "target = true", "data.toml": 'data = "iris"',
    "deep.toml": f"epochs = {'[' * 3000}{']' * 3000}",
    "failing.py": "1 / 0", "wanting.py": "import absent_package",
}  # fmt: skip


def changed(run, copy, **changes):
    """A copy of a run with other values in its config.json, as if they had been written there."""
    shutil.copytree(run, copy)
    reseal(copy / "config.json", **changes)
    return copy


@pytest.fixture(scope="package")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli")
    new = HOUSES.drop(columns="price").head(4)
    tables = {"houses": HOUSES, "new": new, "twon": new.rename(columns={"town": "twon"})}
    for name, table in tables.items():
        table.to_csv(folder / f"{name}.csv", index=False)
    np.save(folder / "small.npy", np.zeros((2, 1, 5, 5)))
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
    assert call("fit", "digits", "--recipe", "none", "--out", folder / "plain", *quick) == 0
    assert call("fit", "digits", "--out", folder / "a", *quick) == 0
    changed(folder / "h", folder / "future", version=9)
    (changed(folder / "h", folder / "torn") / "best.safetensors").write_bytes(b"nothing")
    return folder
