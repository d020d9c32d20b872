"""Tables: types, missing values, categories and scale learned on the training part, and clear errors."""

import bz2
import gzip
import json
import math
import time
from pathlib import Path

import pandas as pd
import pytest
import torch

import vardrop as vd
from tests.refusals import assert_refused
from vardrop._core import files
from vardrop.app.data import Preprocessing, Roles, describe, load_dataset, read_table
from vardrop.app.data.preprocessing import CategoryColumn, DateColumn, NumberColumn
from vardrop.app.data.splits import split_rows
from vardrop.app.data.tables import check_columns, check_frame
from vardrop.app.runs import evaluate_rows, fit, load_run
from vardrop.app.runs.models import build_net


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
    assert_refused("'area' of new.csv, but got", again.inputs, new.assign(area=["big"]), "new.csv")
    with pytest.raises(vd.VardropError, match="preprocessing of version 1, but got 2"):
        Preprocessing.from_json({**found.to_json(), "version": 2})


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
    assert_refused("that ends in .csv, .tsv, .*.parquet, .pq", read_table, tmp_path / "table.xls")
    assert_refused("data to be one of digits, iris", load_dataset, "imagenet")


@pytest.mark.parametrize("name", ["iris", "wine", "breast_cancer", "diabetes"])
def test_embedded_tables(name):
    data = load_dataset(name)
    assert data.train.x.dim() == 2
    assert data.preprocessing is not None
    assert data.about.outputs == (1 if name == "diabetes" else len(data.classes))


# Files as people have them: read, or refused with one line that names columns and options.


ROWS = 60


def lines(mark=",", head=("size", "town", "price"), rows=ROWS, cells=None):
    """A small table as text; `cells` gives the texts of a row."""
    make = cells or (lambda i: (f"{i % 13 + 0.5}", "Ulm" if i % 2 else "Bern", f"{3 * i + 0.25}"))
    return "\n".join([mark.join(head), *(mark.join(make(i)) for i in range(rows))]) + "\n"


def with_column(name, text):
    """The table with one more column, of these texts."""
    base = lambda i: (f"{i % 13 + 0.5}", "Ulm" if i % 2 else "Bern")
    return lines(head=("size", "town", name, "price"), cells=lambda i: (*base(i), text(i), f"{3 * i + 0.25}"))  # fmt: skip


def kinds(data):
    return {c.name: type(c) for c in data.preprocessing.columns}


def column(data, name):
    return next(c for c in data.preprocessing.columns if c.name == name)


def read(tmp_path, content, name="t.csv", **more):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return load_dataset(path, **{"target": "price", **more})


SAME = {
    "semicolons": ("t.csv", lines(";").encode()),
    "tabs": ("t.csv", lines("\t").encode()),
    "tsv": ("t.tsv", lines("\t").encode()),
    "bars": ("t.txt", lines("|").encode()),
    "packed": ("t.csv.gz", gzip.compress(lines().encode())),
    "utf-8 with a mark": ("t.csv", b"\xef\xbb\xbf" + lines().encode()),
    "utf-16": ("t.csv", lines().encode("utf-16")),
    "windows line ends": ("t.csv", lines().replace("\n", "\r\n").encode()),
    "blanks after commas": ("t.csv", lines(", ").encode()),
    "blanks around names": ("t.csv", lines(head=(" size", "town ", " price ")).encode()),
    "empty lines": ("t.csv", lines().replace("\n", "\n\n", 5).encode()),
    "quoted": ("t.csv", lines(cells=lambda i: (f'"{i % 13 + 0.5}"', '"Ulm"' if i % 2 else '"Bern"', f'"{3 * i + 0.25}"')).encode()),
    "upper-case name": ("T.CSV", lines().encode()),
    "windows-1252": ("t.csv", lines().replace("Bern", "Bérn").encode("cp1252")),
    "bz2": ("t.csv.bz2", bz2.compress(lines().encode())),
}  # fmt: skip


@pytest.mark.parametrize("case", SAME)
def test_one_table_in_many_clothes(tmp_path, case):
    expected = read(tmp_path, lines(), "plain.csv")
    found = read(tmp_path, SAME[case][1], SAME[case][0])
    assert kinds(found) == {"size": NumberColumn, "town": CategoryColumn}
    assert torch.allclose(found.train.x, expected.train.x)
    assert torch.allclose(found.train.y, expected.train.y)


OPTIONS = {
    "decimal commas": (lines(";", cells=lambda i: (f"{i % 13},5", "Ulm" if i % 2 else "Bern", f"{3 * i},25")), {"decimal": ","}),
    "thousands": (lines(";", cells=lambda i: (f"{i % 13}.000,5", "Ulm" if i % 2 else "Bern", f"{3 * i},25")), {"decimal": ",", "thousands": "."}),
    "a delimiter": (lines("#"), {"sep": "#"}),
    "a tab as it is typed": (lines("\t"), {"sep": "\\t"}),
}  # fmt: skip


@pytest.mark.parametrize("case", OPTIONS)
def test_options_say_how_cells_are_read(tmp_path, case):
    """Of the training file and of new rows alike; without them it is an error that names them."""
    content, options = OPTIONS[case]
    if "decimal" in options:
        told = r"Expected numbers in column .*'0.*,[25]' in row 1, .*--decimal"
        assert_refused(told, read, tmp_path, content, task="regression")
    found = read(tmp_path, content, **options)
    assert kinds(found) == {"size": NumberColumn, "town": CategoryColumn}
    if case != "thousands":
        assert torch.allclose(found.train.x, read(tmp_path, lines()).train.x)
    path = tmp_path / "new.csv"
    path.write_text(content)
    settings = {"epochs": 1, "folds": 1, "beta": 1.0, "compare": False}
    fit(path, target="price", out=tmp_path / "r", **settings, **options)
    run = load_run(tmp_path / "r")
    assert run.read_file(path)["price"].tolist() == [3 * i + 0.25 for i in range(ROWS)]
    assert len(run.predict(path).mean) == ROWS
    text = describe(run.about.preprocessing, run.config.data)
    for name, mark in options.items():
        stored = {"\\t": "\t"}.get(mark, mark)
        assert getattr(run.config.data, name) == stored
        assert f"{name} {stored!r}" in text


READ = {
    "question marks": (lambda i: "?" if i % 7 == 0 else f"{i}.5", NumberColumn),
    "several words for nothing": (lambda i: ("NA", "n/a", "-", "null")[i % 4] if i % 3 == 0 else f"{i}", NumberColumn),
    "exponents": (lambda i: f"{i}e-3", NumberColumn),
    "truth values": (lambda i: str(i % 3 == 0), NumberColumn),
    "truth values with holes": (lambda i: "" if i % 5 == 0 else ("true", "false")[i % 2], CategoryColumn),
    "dates": (lambda i: f"2021-{i % 12 + 1:02d}-{i % 28 + 1:02d}", DateColumn),
    "times": (lambda i: f"2021-03-{i % 28 + 1:02d} {i % 24:02d}:30", DateColumn),
    "times with a zone": (lambda i: f"2021-03-{i % 28 + 1:02d}T{i % 24:02d}:30:00Z", DateColumn),
    "dates with holes": (lambda i: "" if i % 5 == 0 else f"2021-{i % 12 + 1:02d}-01", DateColumn),
    "categories": (lambda i: f"group {i % 6}", CategoryColumn),
    "categories with holes": (lambda i: "" if i % 5 == 0 else f"group {i % 6}", CategoryColumn),
    "versions": (lambda i: f"1.{i % 3}.0", CategoryColumn),
    "other letters": (lambda i: ("Zürich", "東京", "Łódź")[i % 3], CategoryColumn),
    "words that are numbers at times": (lambda i: f"{i % 4}" if i % 3 == 0 else "many", CategoryColumn),
}  # fmt: skip


@pytest.mark.parametrize("text, kind", READ.values(), ids=READ)
def test_columns_are_what_they_look_like(tmp_path, text, kind):
    data = read(tmp_path, with_column("more", text))
    assert kinds(data)["more"] is kind
    assert bool(data.train.x.isfinite().all())
    assert column(data, "more").width == data.train.x.shape[1] - 3
    assert type(data.preprocessing).from_json(data.preprocessing.to_json()) == data.preprocessing


LEFT_OUT = {
    "constant": (lambda i: "7", "left out more: is constant"),
    "constant text": (lambda i: "x", "left out more: is constant"),
    "empty": (lambda i: "", "left out more: is empty"),
    "names of rows": (lambda i: f"house {i} of {i * 7}", "left out more: names the rows"),
}


@pytest.mark.parametrize("text, line", LEFT_OUT.values(), ids=LEFT_OUT)
def test_columns_that_say_nothing_are_left_out_with_a_line(tmp_path, text, line):
    base = lines(rows=120, head=("size", "town", "more", "price"), cells=lambda i: (f"{i % 13}", "Ulm" if i % 2 else "Bern", text(i), f"{3 * i + 0.25}"))  # fmt: skip
    data = read(tmp_path, base)
    assert "more" not in kinds(data)
    assert line in describe(data.preprocessing)


HOUSES = houses()
REFUSED = {
    "a word among numbers": (with_column("more", lambda i: "oops" if i == 30 else f"{i}.5"),
                             {"stratify": False}, r"numbers in column 'more' .*'oops' in row 31\. .*--decimal.*--drop more"),
    "infinity": (with_column("more", lambda i: "inf" if i == 30 else f"{i}.5"), {}, r"'inf' in row 31.*--drop more"),
    "many words": (with_column("more", lambda i: f"{i}" if i % 2 else "many"), {}, r"'many' in row \d+, .* in all"),
    "money": (with_column("more", lambda i: f"${i % 13 + 0.5}"), {}, r"numbers in column 'more' .*'\$\d+.5' in row"),
    "thousands": (with_column("more", lambda i: f'"{i + 1},{i:03d}"'), {}, "numbers in column 'more' .*--thousands"),
    "days first": (with_column("more", lambda i: f"{i % 28 + 1}/{i % 12 + 1}/2021"), {}, "ISO dates .* in column 'more' .*--date-format"),
    "another format": (with_column("more", lambda i: f"{i % 28 + 1}.{i % 12 + 1}.2021"), {"date_format": "%d/%m/%Y"}, "dates of the format '%d/%m/%Y'"),
    "no date": (with_column("more", lambda i: "soon" if i == 9 else f"2021-03-{i % 28 + 1:02d}"), {}, "'soon' in row 10"),
    "a name twice": (lines(head=("size", "size ", "price")), {}, "columns of .* with different names, but got 'size' more than once"),
    "no header": ("\n".join(f"{i},{i * 2},{i * 3}" for i in range(30)), {}, "numbers: 0, 0, 0. Put a line"),
    "a hole in the target": (lines().replace("3.25", "", 1), {}, "row 2 has none"),
    "no target": (HOUSES, {"target": None}, "a target for .*t.csv, but got none. Name one of 'area', 'town'"),
    "unknown target": (HOUSES, {"target": "cost"}, "the column 'cost', but it has 'area'"),
    "overflow": (houses().assign(k=[(-1) ** i * 1.7e308 for i in range(60)]), {}, "'k' .* finite"),
    "constant target": (houses().assign(price=2.0), {}, "target column 'price' .* is constant"),
    "text in target": (lines().replace("18.25", "dear", 1), {}, "column 'price' .* got 'dear' in row 7"),
    "text to regress": (HOUSES, {"target": "town", "task": "regression"}, "'town' .* in row"),
    "many classes": (houses(400), {"task": "classification"}, "at most 50 classes in column"),
    "unknown drop": (HOUSES, {"drop": ["k"]}, "to have the column 'k'"),
    "only target": (HOUSES[["price"]], {}, "columns besides the target"),
    "two rows": (houses(2), {}, "at least 3 rows to split"),
    "two problems": (lines(head=("a", "b", "price"), cells=lambda i: ("no" if i == 9 else f"{i}.5", "inf" if i == 9 else f"{i}", f"{i}.25")),
                     {}, r"'no' in row 10.*'inf' in row 10.*-drop a --drop b"),
    "one mark for two": (lines(), {"decimal": ",", "sep": ","}, "`decimal` and `thousands` to be different"),
    "two marks": (lines(), {"sep": ";;"}, "to be different characters, but got"),
    "only names": (lines(rows=200, head=("name", "price"), cells=lambda i: (f"house {i * i}", f"{i}.5")), {}, "'name' names the rows"),
}  # fmt: skip


@pytest.mark.parametrize("content, more, told", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_read_is_one_line(tmp_path, content, more, told):
    content = content if isinstance(content, str) else content.to_csv(index=False)
    with pytest.raises(vd.VardropError, match=told) as found:
        read(tmp_path, content, **more)
    assert "\n" not in str(found.value)


TWELVE = tuple(map(str, range(12)))


@pytest.mark.parametrize("values, task, classes, said", [
    ([i % 3 for i in range(60)], "classification", ("0", "1", "2"), ""),
    ([float(i % 2) for i in range(60)], "classification", ("0", "1"), ""),
    ([i % 2 == 0 for i in range(60)], "classification", ("False", "True"), ""),
    (["yes" if i % 2 else "no" for i in range(60)], "classification", ("no", "yes"), ""),
    ([i % 12 for i in range(60)], "classification", TWELVE, ""),
    ([i % 6 + 3 for i in range(60)], "regression", (), "6 whole numbers; --task classification"),
    ([i % 4 for i in range(60)], "classification", TWELVE[:4], "0 to 3 taken for classes; --task regression"),
    ([10 * (i % 2) for i in range(60)], "classification", ("0", "10"), ""),
    ([i % 30 for i in range(60)], "regression", (), ""), (list(range(60)), "regression", (), ""),
    ([i / 7 for i in range(60)], "regression", (), ""),
])  # fmt: skip
def test_the_task_follows_a_rule_that_is_told(tmp_path, values, task, classes, said):
    table = pd.DataFrame({"x": [math.sin(i) for i in range(60)], "price": values})
    for data in (load_dataset(table, target="price"), read(tmp_path, table.to_csv(index=False))):
        assert (data.task, data.classes) == (task, classes)
        assert said in describe(data.preprocessing).splitlines()[0]


def test_dates_become_their_place_in_the_year_and_the_week(tmp_path):
    """The same for each format; days are counted from 2000-01-01."""
    iso = read(tmp_path, with_column("day", lambda i: f"2021-{i % 12 + 1:02d}-{i % 28 + 1:02d}"))
    content = with_column("day", lambda i: f"{i % 28 + 1}/{i % 12 + 1}/2021")
    data = read(tmp_path, content, date_format="%d/%m/%Y")
    assert torch.equal(data.train.x, iso.train.x)
    found = column(data, "day")
    x = found.apply(pd.Series(["1/3/2021", "8/3/2021", None]), "new")
    assert torch.allclose(x[0, 3:5], x[1, 3:5], atol=1e-5)  # the same day of the week
    assert float(x[1, 0] - x[0, 0]) == pytest.approx(7 / found.std, rel=1e-4)
    assert float(x[0, 0]) * found.std + found.mean == pytest.approx(7730, abs=1e-3)
    assert_refused("dates .* but got 'soon' in row 1", found.apply, pd.Series(["soon"]), "new")


def test_texts_stay_texts_in_files_that_hold_only_numbers(tmp_path):
    """A code such as 01 is not the number 1 in new rows or in a test file, where no letters are."""
    code = lambda i: "A7" if i % 3 else "01"
    path = tmp_path / "t.csv"
    path.write_text(with_column("code", code))
    new = tmp_path / "new.csv"
    new.write_text("size,town,code,price\n1.5,Ulm,01,3\n2.5,Ulm,01,4\n")
    settings = {"epochs": 1, "folds": 1, "beta": 1.0, "compare": False}
    run = fit(path, target="price", out=tmp_path / "r", test=new, **settings)
    place = 3  # size, Bern, Ulm, 01, A7
    assert run.inputs(new)[:, place].tolist() == [1.0, 1.0]
    assert run.data.test.x[:, place].tolist() == [1.0, 1.0]
    assert not [note for note in evaluate_rows(run, new)["notes"] if "code" in note]


def test_many_categories_get_embeddings_that_are_noisy(tmp_path):
    """A hundred towns with a price level each: an embedding learns what one-hot columns would."""
    generator = torch.Generator().manual_seed(0)
    towns = torch.randint(100, (600,), generator=generator)
    level = torch.randn(100, generator=generator)[towns]
    table = pd.DataFrame({"town": [f"town {i}" for i in towns.tolist()], "size": torch.randn(600, generator=generator), "price": level.tolist()})  # fmt: skip
    data = load_dataset(table, target="price")
    found = column(data, "town")
    assert found.embedded
    assert data.preprocessing.embeddings == {0: 1 + len(found.categories)}
    assert found.apply(pd.Series(["nowhere", None]), "new").flatten().tolist() == [0.0, 0.0]
    settings = {"epochs": 20, "batch_size": 32, "folds": 1, "beta": 0.1, "compare": False}
    run = fit(table, target="price", out=tmp_path / "r", **settings)
    assert run.results["metrics"]["rmse"] < 0.7 * float(level.std())
    tables = [m for m in run.net.modules() if isinstance(m, torch.nn.Embedding)]
    assert any(hasattr(m, "posterior") for m in tables)
    again = load_run(tmp_path / "r")
    assert torch.equal(again.predict(table[:5]).mean, run.predict(table[:5]).mean)


def test_embeddings_take_numbers_beyond_their_table():
    net = build_net("mlp50", (2,), 1, {1: 4})
    y = net(torch.tensor([[0.0, -5.0], [0.0, 0.0], [0.0, 99.0], [0.0, 3.0], [0.0, math.nan]]))
    assert torch.equal(y[0], y[1])
    assert torch.equal(y[2], y[3])
    assert bool(y.isfinite().all())


def test_long_lists_of_names_are_cut_and_control_characters_escaped():
    wide = pd.DataFrame(0.0, index=range(3), columns=[f"c{i}" for i in range(20_000)])
    start = time.monotonic()
    assert check_frame(wide, "wide").shape == (3, 20_000)
    assert time.monotonic() - start < 3  # seven seconds if each name is counted
    with pytest.raises(vd.VardropError) as error:
        check_columns(wide, Roles(target="nothing"), "wide")
    assert len(str(error.value)) < 500
    assert "'c9' (20,000 in all)" in str(error.value)
    assert "\x1b" not in str(vd.VardropError("red \x1b[31m"))


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="a file that cannot be read")
@pytest.mark.parametrize("name", ["a.csv", "a.json", "a.safetensors"])
def test_an_unreadable_file_is_not_called_damaged(tmp_path, name):
    (tmp_path / name).symlink_to("/proc/self/mem")
    read = {"a.csv": read_table, "a.json": files.read_json}.get(name, files.read_tensors)
    with pytest.raises(vd.VardropError, match=r"Reading .* failed: Input/output error") as error:
        read(tmp_path / name)
    assert "damaged" not in str(error.value)
