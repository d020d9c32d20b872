"""Tables: types, missing values, categories and scale learned on the training part, and clear errors."""

import json
import math

import pandas as pd
import pytest
import torch

import vardrop as vd
from tests.refusals import assert_refused
from vardrop.app.data import Preprocessing, describe, load_dataset, read_table
from vardrop.app.data.splits import split_rows


def houses(n=60):
    area = (50 + 100 * torch.rand(n, generator=torch.Generator().manual_seed(0))).tolist()
    return pd.DataFrame({
        "area": [math.nan if i % 7 == 3 else a for i, a in enumerate(area)],
        "town": ["Ulm" if i % 3 else "Bern" for i in range(n)],
        "garden": [i % 2 == 0 for i in range(n)],
        "price": [3 * a + (i % 5) for i, a in enumerate(area)],
    })  # fmt: skip


def write(tmp_path, table, name="houses.csv"):
    path = tmp_path / name
    table.to_csv(path, index=False) if name.endswith("csv") else table.to_parquet(path)
    return path


@pytest.mark.parametrize("name", ["houses.csv", "houses.parquet"])
def test_a_table_becomes_tensors(tmp_path, name):
    data = load_dataset(write(tmp_path, houses(), name), target="price")
    assert (data.task, data.kind, data.classes) == ("regression", "table", ())
    assert (data.about.outputs, data.sizes) == (1, {"train": 42, "validation": 6, "test": 12})
    assert data.shape == (5,)  # area and its missing values, two towns, garden
    assert float(data.train.y.mean()) == pytest.approx(0, abs=1e-5)
    assert float(data.train.y.std(correction=0)) == pytest.approx(1, abs=1e-4)
    assert float(data.train.x[:, 0].mean()) == pytest.approx(0, abs=1e-5)
    assert set(data.train.x[:, 1].tolist()) == {0.0, 1.0}


def test_scales_come_from_the_training_part_alone(tmp_path):
    plain, wild = houses(), houses()
    first = load_dataset(write(tmp_path, plain), target="price")
    rows = split_rows(60, 0, "houses")
    for row in torch.cat([rows["test"], rows["validation"]]).tolist():
        wild.loc[row, "area"] = 1e6
    second = load_dataset(write(tmp_path, wild, "wild.csv"), target="price")
    assert first.preprocessing == second.preprocessing
    assert torch.equal(first.train.x, second.train.x)
    assert not torch.equal(first.test.x, second.test.x)


def test_preprocessing_travels_and_takes_unknown_categories(tmp_path):
    found = load_dataset(write(tmp_path, houses()), target="price").preprocessing
    again = Preprocessing.from_json(json.loads(json.dumps(found.to_json())))
    assert again == found
    new = pd.DataFrame({"garden": [True], "town": ["Oslo"], "area": [None], "more": [1]})
    x = again.inputs(new, "new.csv")
    assert (x.shape, x[0, 1:4].tolist()) == ((1, 5), [1.0, 0.0, 0.0])
    with pytest.raises(vd.VardropError, match="columns of the training in new.csv, but no 'town'"):
        again.inputs(new.drop(columns="town"), "new.csv")
    with pytest.raises(vd.VardropError, match="'area' of new.csv, but got 'big' in row 1"):
        again.inputs(new.assign(area=["big"]), "new.csv")
    with pytest.raises(vd.VardropError, match="preprocessing of version 1, but got 2"):
        Preprocessing.from_json({**found.to_json(), "version": 2})
    text = describe(found)
    assert "price: regression" in text
    assert "number   area: median" in text
    assert "category town: Bern, Ulm" in text


@pytest.mark.parametrize("values, task, classes", [
    ([i % 3 for i in range(30)], "classification", ("0", "1", "2")),
    ([float(i % 2) for i in range(30)], "classification", ("0", "1")),
    ([i % 2 == 0 for i in range(30)], "classification", ("False", "True")),
    (["yes" if i % 2 else "no" for i in range(30)], "classification", ("no", "yes")),
    ([i % 12 for i in range(30)], "classification", tuple(map(str, range(12)))),
    (list(range(30)), "regression", ()),
    ([i / 7 for i in range(30)], "regression", ()),
])  # fmt: skip
def test_tasks_are_inferred(tmp_path, values, task, classes):
    table = pd.DataFrame({"x": [math.sin(i) for i in range(30)], "y": values})
    data = load_dataset(write(tmp_path, table), target="y")
    assert (data.task, data.classes) == (task, classes)


def changed(column, row, value):
    table = houses().astype({column: object})
    table.loc[row, column] = value
    return table


BROKEN = {
    "no target": (houses(), {}, "a target for .*houses.csv, but got none. Name one of 'area', 'town'"),
    "unknown target": (houses(), {"target": "cost"}, "the column 'cost', but it has 'area'"),
    "overflow": (houses().assign(k=[(-1) ** i * 1.7e308 for i in range(60)]), {}, "'k' .* finite"),
    "constant target": (houses().assign(price=2.0), {}, "target column 'price' .* is constant"),
    "text in target": (changed("price", 6, "dear"), {}, "column 'price' .* got 'dear' in row 7"),
    "text to regress": (houses(), {"target": "town", "task": "regression"}, "'town' .* in row"),
    "many classes": (houses(400), {"task": "classification"}, "at most 50 classes in column"),
    "unknown drop": (houses(), {"drop": ["k"]}, "to have the column 'k'"),
    "only target": (houses()[["price"]], {}, "columns besides the target"),
    "two rows": (houses(2), {}, "at least 3 rows to split"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_broken_tables_are_told(tmp_path, case):
    table, arguments, text = BROKEN[case]
    if case != "no target":
        arguments = {"target": "price", **arguments}
    assert_refused(text, load_dataset, write(tmp_path, table), **arguments)


def test_broken_files_are_told(tmp_path):
    (tmp_path / "empty.csv").write_text("")
    (tmp_path / "head.csv").write_text("a,b\n")
    (tmp_path / "torn.csv").write_text('a,b\n1,2\n3,4,5\n"6')
    (tmp_path / "bad.parquet").write_bytes(b"nothing")
    for name, text in {
        "empty.csv": "empty.csv to hold a table, but it is empty",
        "head.csv": "head.csv to have rows, but it has only names of columns",
        "torn.csv": "torn.csv to be a table, but got: .*line 3",
        "bad.parquet": "bad.parquet to be a table",
        "absent.csv": "File not found: .*absent.csv",
    }.items():
        assert_refused(text, read_table, tmp_path / name)
    with pytest.raises(vd.VardropError, match="a file that ends in .csv, .tsv, .*.parquet, .pq"):
        read_table(tmp_path / "table.xls")
    assert_refused("data to be one of digits, iris", load_dataset, "imagenet")


@pytest.mark.parametrize("name", ["iris", "wine", "breast_cancer", "diabetes"])
def test_embedded_tables(name):
    data = load_dataset(name)
    assert data.train.x.dim() == 2
    assert data.preprocessing is not None
    assert data.about.outputs == (1 if name == "diabetes" else len(data.classes))
