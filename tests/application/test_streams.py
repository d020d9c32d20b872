"""Data larger than memory: files in pieces, predictions that are written as they come."""

import gzip

import numpy as np
import pandas as pd
import pytest
import torch

import vardrop as vd
from vardrop.application import fit, load_run, write_predictions
from vardrop.application.predictions import prediction_table
from vardrop.data import chunks, read_table
from vardrop.data.chunks import encoding_of, read_chunks
from vardrop.training.observers import Observer

# Means are scaled back batch by batch; vector instructions round their last elements otherwise.
ROUNDING = {"rtol": 1e-5, "atol": 2e-6}
QUIET = {"observer": Observer(), "batch_size": 64, "compare": False, "beta": 0.1}


def table(rows=1500, seed=0):
    generator = np.random.default_rng(seed)
    a, b = generator.standard_normal((2, rows))
    code = np.where(np.arange(rows) < rows // 2, "007", np.where(b > 0, "abc", "8.50"))
    day = pd.date_range("2020-01-01", periods=rows, freq="h").strftime("%Y-%m-%d")
    y = 2 * a - (code == "abc") + 0.1 * generator.standard_normal(rows)
    found = pd.DataFrame({"name": [f"r{i}" for i in range(rows)], "a": a, "code": code, "day": day})
    found.loc[5, "a"] = np.nan
    return found.assign(y=y)


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK", 400)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    table().to_csv(folder / "t.csv", index=False)
    return fit(
        folder / "t.csv", target="y", id="name", out=folder / "r", epochs=2, folds=1, **QUIET
    )


# Pieces of files.


@pytest.mark.parametrize("name", ["t.csv", "t.tsv", "t.csv.gz", "t.parquet"])
def test_pieces_are_the_rows_of_the_table(tmp_path, small_pieces, name):
    path, found = tmp_path / name, table(1000)
    if name == "t.parquet":
        found.to_parquet(path, row_group_size=300)
    else:
        found.to_csv(path, index=False, sep="\t" if "tsv" in name else ",")
    pieces = list(read_chunks(path, texts={"code"}))
    assert len(pieces) > 2
    together = pd.concat(pieces)
    pd.testing.assert_frame_equal(together, read_table(path), check_dtype=False)
    assert set(together["code"]) == {"007", "abc", "8.50"}
    some = pd.concat(list(read_chunks(path, columns={"a", "y"})))
    assert list(some.columns) == ["a", "y"]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "cp1252"])
def test_encodings_follow_from_the_bytes(tmp_path, small_pieces, encoding):
    rows = pd.DataFrame({"größe ": range(900), "ort": ["Zürich"] * 900})
    rows.to_csv(tmp_path / "t.csv", index=False, sep=";", encoding=encoding)
    found = pd.concat(list(read_chunks(tmp_path / "t.csv")))
    pd.testing.assert_frame_equal(found, read_table(tmp_path / "t.csv"))
    assert list(found.columns) == ["größe", "ort"]
    (tmp_path / "late.csv").write_bytes(b"a,b\n" + b"1,2\n" * 300_000 + b"1,\xe9\n")
    assert encoding_of(tmp_path / "late.csv") == "cp1252"


def test_broken_files_are_told(tmp_path):
    for name, content, text in (
        ("a.csv", b"", "it is empty"),
        ("b.csv", b"a,b\n", "only a header"),
        ("c.csv", b"1,2\n3,4\n", "name the columns"),
        ("d.csv.gz", gzip.compress(b"a,b\n1,2\n" * 900)[:-20], "to be a table, but got"),
        ("e.parquet", b"PAR1", "to be a table, but got"),
        ("f.csv", b"a,b\n1,2\n1,2,3\n", "to be a table, but got"),
        ("g.csv", b"a,a \n1,2\n", "more than once"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(vd.VardropError, match=text):
            list(read_chunks(tmp_path / name))
    with pytest.raises(vd.VardropError, match="not there"):
        list(read_chunks(tmp_path / "h.csv"))


# Predictions.


def test_batches_are_predicted_as_the_whole_is():
    net = vd.convert(torch.nn.Linear(4, 3), vd.bayes_by_backprop())
    x = torch.randn(50, 4)
    for options in ({}, {"draw": "weights"}, {"mode": "mean"}, {"keep": 2}):
        whole = vd.predict(net, x.split(16), 8, seed=3, **options)
        parts = list(vd.predict_batches(net, x.split(16), 8, seed=3, **options))
        assert [len(p.probs) for p in parts] == [16, 16, 16, 2]
        assert torch.equal(torch.cat([p.probs for p in parts]), whole.probs)
        assert torch.equal(torch.cat([p.draws for p in parts], 1), whole.draws)


def test_others_draw_between_two_batches_without_an_effect():
    net = vd.convert(torch.nn.Linear(4, 3), vd.bayes_by_backprop())
    x = torch.randn(30, 4)
    whole, parts = vd.predict(net, x.split(10), 8, seed=3), []
    for p in vd.predict_batches(net, x.split(10), 8, seed=3):
        parts.append(p.probs)
        assert torch.is_grad_enabled()
        vd.predict(net, x, 4, seed=9)
        torch.randn(7)
    assert torch.equal(torch.cat(parts), whole.probs)


def test_wrong_batches_are_refused():
    net = vd.convert(torch.nn.Linear(4, 3), vd.bayes_by_backprop())
    with pytest.raises(vd.VardropError, match="`x` to be a loader of batches, but got Tensor"):
        vd.predict_batches(net, torch.randn(4, 4))
    with pytest.raises(TypeError, match="unexpected keyword argument 'chunk'"):
        vd.predict_batches(net, [], chunk=3)
    with pytest.raises(vd.VardropError, match="`draw` to be"):
        vd.predict_batches(net, [], draw="all")
    with pytest.raises(vd.VardropError, match="at least one batch"):
        list(vd.predict_batches(net, []))


@pytest.mark.parametrize("name", ["n.csv", "n.parquet"])
def test_a_file_is_written_piece_by_piece_as_it_was_at_once(tmp_path, small_pieces, run, name):
    new, path = table(2300, seed=1), tmp_path / name
    if name == "n.csv":
        new.to_csv(path, index=False)
    else:
        new.to_parquet(path, row_group_size=700)
    write_predictions(run, path, tmp_path / "p.csv", 16)
    found = pd.read_csv(tmp_path / "p.csv")
    whole = prediction_table(run, run.predict(new, 16))
    assert found.pop("name").tolist() == new["name"].tolist()
    np.testing.assert_allclose(found.to_numpy(), whole.to_numpy(), **ROUNDING)
    np.testing.assert_array_equal(run.predict(path, 16).mean, run.predict(new, 16).mean)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([name, "p.csv"])


def test_nothing_is_written_where_a_late_row_is_wrong(tmp_path, small_pieces, run):
    new = table(1300, seed=1).astype({"a": object})
    new.loc[1200, "a"] = "much"
    new.to_csv(tmp_path / "n.csv", index=False)
    with pytest.raises(vd.VardropError, match="numbers in column 'a' .* got 'much' in row 1201"):
        write_predictions(run, tmp_path / "n.csv", tmp_path / "p.csv", 4)
    assert [p.name for p in tmp_path.iterdir()] == ["n.csv"]
    new.drop(columns="day").to_csv(tmp_path / "n.csv", index=False)
    with pytest.raises(vd.VardropError, match="the columns of the training data.* 'day'"):
        write_predictions(run, tmp_path / "n.csv", tmp_path / "p.csv", 4)


def test_loaders_of_tables_and_tensors_are_predicted(run):
    new = table(2300, seed=1)
    whole = run.predict(new, 8)
    for batches in (
        [new.iloc[i : i + 700] for i in range(0, 2300, 700)],
        [(t, None) for t in run.inputs(new).split(900)],
        new,
    ):
        found = list(run.predict_batches(batches, 8))
        assert [len(p.mean) for p in found] == [1000, 1000, 300]
        assert torch.allclose(torch.cat([p.mean for p in found]), whole.mean, **ROUNDING)
    broken = run.inputs(new)
    broken[1700, 0] = torch.inf
    with pytest.raises(vd.VardropError, match="finite inputs, but got NaN or infinity in row 1701"):
        list(load_run(run.directory).predict_batches(broken, 8))
