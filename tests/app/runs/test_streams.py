"""Data larger than memory: files in pieces, predictions that are written as they come."""

import dataclasses
import gzip

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import vardrop as vd
from tests.app.cli.calling import call
from vardrop.app.data import chunks, inputs as given, load_dataset, read_table, splits, streams
from vardrop.app.data.chunks import encoding_of, read_chunks
from vardrop.app.runs import evaluate, fit, load_run, resume, write_predictions
from vardrop.app.runs.callbacks import Observer
from vardrop.app.runs.predict import prediction_table

# What is computed batch by batch: vector instructions round their last elements otherwise.
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


# Training.


def written(folder, name, rows=3000, **options):
    path, found = folder / name, table(rows, **options)
    if name.endswith("parquet"):
        found.to_parquet(path, row_group_size=700)
    else:
        found.to_csv(path, index=False)
    return path


@pytest.fixture
def small_buffers(monkeypatch, small_pieces):
    monkeypatch.setattr(streams, "BUFFER", 800)
    monkeypatch.setattr(streams, "SAMPLE", 1000)
    monkeypatch.setattr(streams, "HELD", {"test": (0.2, 300), "validation": (0.1, 200)})


@pytest.mark.parametrize("name", ["t.csv", "t.parquet"])
def test_every_row_is_in_one_part_and_trained_on_once_an_epoch(tmp_path, small_buffers, name):
    path = written(tmp_path, name)
    data = load_dataset(vd.Stream(path), target="y", drop=["name"])
    whole = table(3000)
    x = data.preprocessing.inputs(whole, "t")
    feed = data.feed.batched(64)
    for _ in range(2):
        batches = list(feed)
        assert len(batches) == len(feed)
        assert [len(y) for _, y in batches[:-1]] == [64] * (len(feed) - 1)
        trained = torch.cat([part for part, _ in batches])
        assert len(trained) == data.sizes()["train"]
        together = torch.cat([trained, data.validation.x, data.test.x])
        # The missing value has the median of others, and is marked in the second column.
        rows, wanted = (t[(t[:, 0] + 100 * t[:, 1]).argsort()] for t in (together, x))
        assert torch.allclose(rows, wanted, **ROUNDING)
    for part, expected in (("test", 300), ("validation", 200)):
        # About so many: a binomial count, five deviations.
        assert abs(data.sizes()[part] - expected) < 5 * expected**0.5
    assert abs(len(data.train.y) - 1000) < 5 * 1000**0.5 + 50  # and a row of each of 50 targets
    first, second = (torch.cat([part for part, _ in feed])[:, 0] for _ in range(2))
    assert not torch.equal(first, second)


def test_preprocessing_of_a_whole_sample_is_that_of_the_table(tmp_path, small_pieces):
    path = written(tmp_path, "t.csv", 900)
    streamed = load_dataset(vd.Stream(path), target="y", drop=["name"]).preprocessing
    known = load_dataset(table(900), target="y", drop=["name"]).preprocessing
    assert [(type(c), c.name) for c in streamed.columns] == [
        (type(c), c.name) for c in known.columns
    ]
    assert streamed.columns[1].categories == ("007", "8.50", "abc")


def test_rows_are_shuffled_far(tmp_path, small_buffers):
    rows = pd.DataFrame({"a": np.arange(4000.0), "y": np.arange(4000) % 7 / 3})
    rows.to_parquet(tmp_path / "t.parquet")
    data = load_dataset(vd.Stream(tmp_path / "t.parquet"), target="y", task="regression")
    first = next(iter(data.feed.batched(100)))[0][:, 0]
    std = data.preprocessing.columns[0].std
    assert float(first.max() - first.min()) * std > 600  # of the 800 rows in the buffer


@pytest.mark.parametrize("name", ["t.csv", "t.parquet"])
def test_a_stream_is_fitted_and_read_again(tmp_path, small_buffers, name):
    path = written(tmp_path, name)
    options = {"target": "y", "drop": ["name"], "epochs": 4, **QUIET}
    run = fit(vd.Stream(path), out=tmp_path / "r", **options)
    assert run.results["metrics"]["r2"] > 0.8
    assert run.elbo.num_data == run.about.sizes["train"] > 2300
    assert run.config.settings.folds == 1
    assert len(run.history) == 4
    again = load_run(tmp_path / "r")
    assert torch.equal(again.data.test.x, run.data.test.x)
    assert again.data.feed.rows == run.data.feed.rows
    evaluated = evaluate(again)
    assert evaluated["metrics"] == pytest.approx(run.results["metrics"])


def test_a_stream_that_was_stopped_inside_an_epoch_goes_on(tmp_path, small_buffers):
    path = written(tmp_path, "t.parquet")
    options = {"target": "y", "drop": ["name"], "epochs": 2, **QUIET}
    whole = fit(vd.Stream(path), out=tmp_path / "a", **options)

    class Stops(Observer):
        def step(self, loop):
            if loop.epoch == 1 and loop.position == 11:
                raise KeyboardInterrupt

    stopped = {**options, "observer": Stops(), "checkpoint_seconds": 0.0}
    with pytest.raises(KeyboardInterrupt):
        fit(vd.Stream(path), out=tmp_path / "b", **stopped)
    assert "1 of 2 epochs and 10 steps" in load_run(tmp_path / "b").standing
    found = resume(tmp_path / "b", observer=Observer())
    for one, other in zip(whole.elbo.parameters(), found.elbo.parameters(), strict=True):
        assert torch.equal(one, other)


def test_held_out_rows_choose_as_for_a_table(tmp_path, small_buffers):
    path = written(tmp_path, "t.parquet")
    options = {**QUIET, "beta": None, "compare": True, "batch_size": 256}
    run = fit(vd.Stream(path), target="y", drop=["name"], out=tmp_path / "r", epochs=1, **options)
    assert {"net", "plain", "mean"} <= set(run.results["held_out"])
    assert len(run.results["held_out"]["weights"]) >= 2


def test_classes_that_are_rare_are_known_and_weighed(tmp_path, small_buffers):
    rows = table(3000)
    rows["kind"] = np.where(rows["a"] > 0, "up", "down")
    rows.loc[[20, 2900], "kind"] = "flat"
    rows.drop(columns=["y", "name"]).to_csv(tmp_path / "t.csv", index=False)
    weights = {"class_weight": {"flat": 50.0, "up": 2.0}}
    options = {"target": "kind", "out": tmp_path / "r", "epochs": 1, **QUIET, **weights}
    run = fit(vd.Stream(tmp_path / "t.csv"), **options)
    assert run.about.classes == ("down", "flat", "up")
    data = splits.weighed(run.data, weights["class_weight"])
    y, weight = (torch.cat(part) for part in list(zip(*data.feed.batched(64), strict=True))[1:])
    assert torch.equal(weight, torch.tensor([1.0, 50.0, 2.0])[y])


def test_weights_of_rows_are_read_along(tmp_path, small_buffers):
    rows = table(2000).assign(times=np.arange(2000) % 3)
    rows.to_parquet(tmp_path / "t.parquet")
    data = load_dataset(
        vd.Stream(tmp_path / "t.parquet"), target="y", drop=["name"], weight="times"
    )
    weights = torch.cat([weight for _, _, weight in data.feed])
    assert set(weights.tolist()) == {0.0, 1.0, 2.0}
    assert data.train.weight is not None


def test_several_files_and_parts_of_ones_own(tmp_path, small_buffers):
    paths = [written(tmp_path, f"{i}.parquet", 900, seed=i) for i in range(3)]
    stream = vd.Stream(paths)
    data = load_dataset(stream, target="y", drop=["name"], test=table(100, seed=8), seed=1)
    sizes = data.sizes()
    assert sizes["test"] == 100
    assert sizes["train"] + sizes["validation"] == 2700
    options = {"target": "y", "drop": ["name"], "epochs": 1, **QUIET}
    run = fit(stream, test=False, out=tmp_path / "r", **options)
    assert run.about.sizes["test"] == 0
    assert load_run(tmp_path / "r").data.feed.rows == run.about.sizes["train"]
    table(900).drop(columns="day").to_parquet(paths[2])
    with pytest.raises(vd.VardropError, match="2.parquet to have the columns of .*'day'"):
        load_dataset(stream, target="y")


def test_what_a_stream_cannot_do_is_refused(tmp_path, small_buffers):
    path = written(tmp_path, "t.csv", 900)
    stream, options = vd.Stream(path), {"target": "y", "out": tmp_path / "r", **QUIET}
    for role in ("group", "time", "split"):
        with pytest.raises(vd.VardropError, match=f"no `{role}` for a Stream.* but got 'day'"):
            fit(stream, **{role: "day"}, **options)
    with pytest.raises(vd.VardropError, match="`folds` to be 1 for a Stream"):
        fit(stream, folds=3, **options)
    with pytest.raises(vd.VardropError, match="a target for .*t.csv, but got none"):
        fit(stream, **{**options, "target": None})
    with pytest.raises(vd.VardropError, match="the target column 'z'"):
        fit(stream, **{**options, "target": "z"})
    for wrong in (3, [], "table.xls", torch.zeros(3), [path, 3]):
        with pytest.raises(vd.VardropError, match="CSV or Parquet file for a Stream"):
            vd.Stream(wrong)
    with pytest.raises(vd.VardropError, match="not there"):
        fit(vd.Stream(tmp_path / "none.csv"), **options)
    gap = table(900).astype({"y": object})
    gap.loc[812, "y"] = None
    gap.to_csv(path, index=False)
    with pytest.raises(vd.VardropError, match="target column 'y' of .* but row 813 has none"):
        fit(stream, **options)
    assert not (tmp_path / "r").exists()


def test_what_is_too_large_for_memory_is_pointed_to_streams(tmp_path, monkeypatch):
    monkeypatch.setattr(given, "LARGEST", 1000)
    path = written(tmp_path, "t.csv", 100)
    with pytest.raises(vd.VardropError, match=r"Pass vardrop.Stream\('.*t.csv'\)"):
        load_dataset(path, target="y")

    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self):
            while True:
                yield torch.zeros(4), torch.tensor(1)

    with pytest.raises(vd.VardropError, match="of inputs from Endless to read into memory"):
        load_dataset(Endless())


# Loaders.


def numbers(rows=1200, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 3, generator=generator)
    return x, 2 * x[:, 0] - x[:, 1] + 3


def loader(*tensors, **options):
    return DataLoader(TensorDataset(*tensors), batch_size=50, **{"shuffle": True, **options})


def test_a_loader_of_rows_is_trained_on_as_it_is(tmp_path, small_buffers):
    parts = {"validation": numbers(200, 1), "test": numbers(200, 2)}
    options = {**QUIET, **parts, "epochs": 6}
    del options["batch_size"]
    stream = vd.Stream(loader(*numbers()))
    run = fit(stream, out=tmp_path / "a", **options)
    assert run.about.sizes == {"train": 1200, "validation": 200, "test": 200}
    assert run.results["metrics"]["r2"] > 0.8
    assert run.config.settings.batch_size == 50

    class Stops(Observer):
        def step(self, loop):
            if loop.epoch == 1 and loop.position == 11:
                raise KeyboardInterrupt

    stopped = {**options, "observer": Stops(), "checkpoint_seconds": 0.0}
    with pytest.raises(KeyboardInterrupt):
        fit(vd.Stream(loader(*numbers())), out=tmp_path / "b", **stopped)
    found = resume(tmp_path / "b", data=vd.Stream(loader(*numbers())), **parts)
    for one, other in zip(run.elbo.parameters(), found.elbo.parameters(), strict=True):
        assert torch.equal(one, other)
    with pytest.raises(vd.VardropError, match="handed over in memory"):
        resume(tmp_path / "b")
    with pytest.raises(vd.VardropError, match="The data have changed since"):
        resume(tmp_path / "b", data=vd.Stream(loader(*numbers(seed=5))), **parts)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_loader_with_a_state_goes_on_inside_an_epoch(small_buffers):
    module = pytest.importorskip("torchdata.stateful_dataloader")
    feeds = []
    for _ in range(2):
        rows = module.StatefulDataLoader(TensorDataset(*numbers(100)), batch_size=20)
        parts = {"validation": numbers(50, 1), "test": False}
        feeds.append(load_dataset(vd.Stream(rows, rows=100), **parts).feed)
    batches = iter(feeds[0])
    first = [next(batches) for _ in range(2)]
    feeds[1].load_state_dict(feeds[0].state_dict())
    rest = list(feeds[1])
    whole = torch.cat([x for x, _ in list(feeds[1])])
    assert torch.equal(torch.cat([x for x, _ in (*first, *rest)]), whole)
    assert len(rest) == 3
    plain = load_dataset(vd.Stream(loader(*numbers(100))), **parts).feed
    assert not hasattr(plain, "state_dict")


def test_a_loader_of_images_with_weights(tmp_path, small_buffers):
    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand(300, 1, 8, 8, generator=generator), torch.arange(300) % 4
    weight = 1 + torch.arange(300.0) % 2
    held = (x[:40], y[:40])
    options = {"validation": held, "test": held, "out": tmp_path / "r", "epochs": 1}
    stream = vd.Stream(loader(x, y, weight, shuffle=False))
    settings = {"compare": False, "observer": Observer(), "class_weight": {"1": 3.0}}
    run = fit(stream, "lenet300", **options, **settings)
    assert run.about.kind == "image"
    data = splits.weighed(run.data, {"1": 3.0})
    found = torch.cat([own for _, _, own in data.feed])
    assert torch.equal(found, weight * torch.where(y == 1, 3.0, 1.0))
    y[280] = 4
    with pytest.raises(vd.VardropError, match="classes from 0 to 3.* but got 4. Add an example"):
        list(dataclasses.replace(run.data.feed, loader=loader(x, y)))


def test_what_a_loader_lacks_is_asked_for(tmp_path, small_buffers):
    rows = numbers(100)
    options = {"out": tmp_path / "r", "observer": Observer()}
    with pytest.raises(vd.VardropError, match="`validation` with a loader in a Stream"):
        fit(vd.Stream(loader(*rows)), **options)
    with pytest.raises(vd.VardropError, match="`test` with a loader.* test=False goes without"):
        fit(vd.Stream(loader(*rows)), validation=rows, **options)
    with pytest.raises(vd.VardropError, match="no `batch_size` with a loader.* but got 8"):
        fit(vd.Stream(loader(*rows)), validation=rows, test=False, batch_size=8, **options)

    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self):
            while True:
                yield torch.randn(3), torch.randn(())

    parts = {"validation": rows, "test": False}
    with pytest.raises(vd.VardropError, match=r"Pass vardrop.Stream\(loader, rows=...\)"):
        fit(vd.Stream(DataLoader(Endless(), batch_size=50)), **parts, **options)
    stream = vd.Stream(DataLoader(Endless(), batch_size=50), rows=1000)
    data = load_dataset(stream, **parts)
    assert data.sizes()["train"] == 1000
    for _ in range(2):
        assert len(list(data.feed)) == 20
    short = load_dataset(vd.Stream(loader(*rows), rows=120), **parts)
    with pytest.raises(
        vd.VardropError, match="120 examples in an epoch of DataLoader, but got 100"
    ):
        list(short.feed)
    assert load_dataset(vd.Stream(loader(*rows, drop_last=True)), **parts).sizes()["train"] == 100
    with pytest.raises(vd.VardropError, match="`rows` to be an integer of at least 1, but got 0"):
        vd.Stream(loader(*rows), rows=0)
    assert not (tmp_path / "r").exists()


def test_the_command_line_reads_piece_by_piece(tmp_path, small_buffers):
    path = written(tmp_path, "t.parquet")
    typed = ["fit", str(path), "--stream", "--target", "y", "--drop", "name", "--epochs", "1"]
    typed += ["--beta", "0.1", "--batch-size", "256", "--out", str(tmp_path / "r")]
    assert call(*typed, "--quiet") in (0, None)
    assert load_run(tmp_path / "r").config.data.stream == (str(path),)
    assert call("fit", "--resume", "--stream", "--out", tmp_path / "r") == 2


def test_what_was_read_of_a_parquet_file_is_let_go(tmp_path, monkeypatch):
    pyarrow = pytest.importorskip("pyarrow")
    monkeypatch.setattr(chunks, "CHUNK", 5000)
    rows = pd.DataFrame(np.random.default_rng(0).standard_normal((200_000, 10)))
    path = tmp_path / "t.parquet"
    rows.add_prefix("x").to_parquet(path, row_group_size=5000)
    most, before = 0, pyarrow.total_allocated_bytes()
    for _ in read_chunks(path):
        most = max(most, pyarrow.total_allocated_bytes() - before)
    assert most < path.stat().st_size / 4  # a fortieth is read at a time
