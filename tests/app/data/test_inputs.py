"""Data as people hold them, and which rows are in which part."""

from unittest import mock

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import vardrop as vd
from tests.refusals import assert_refused
from vardrop.app.data import Roles, load_dataset, register_dataset
from vardrop.app.data.splits import Part, fold_numbers, split_rows
from vardrop.app.runs import fit, held_out, load_run, resume

QUIET = {"epochs": 1, "batch_size": 16, "folds": 1, "compare": False}


def frame(rows=60):
    generator = np.random.default_rng(0)
    found = pd.DataFrame(generator.standard_normal((rows, 3)), columns=["a", "b", "c"])
    return found.assign(town=np.where(np.arange(rows) % 3 == 0, "x", "y"), price=found["a"] * 2 + 1)


# Kinds.


def test_arrays_frames_and_tensors_are_one_table():
    table = frame()
    x, y = table.drop(columns="price"), table["price"]
    first, second = load_dataset(table, target="price"), load_dataset((x, y))
    assert second.preprocessing == first.preprocessing
    assert torch.equal(second.train.x, first.train.x)
    bare = x[["a", "b", "c"]].to_numpy()
    third = load_dataset((bare, y.to_numpy()))
    fourth = load_dataset((torch.tensor(bare), y.tolist()))
    assert [c.name for c in third.preprocessing.columns] == ["x0", "x1", "x2"]
    assert torch.equal(third.train.x, fourth.train.x)
    assert torch.allclose(third.train.x, first.train.x[:, :3])
    assert third.task == "regression"


def test_polars_frames_are_read():
    polars, table = pytest.importorskip("polars"), frame()
    found = load_dataset(polars.DataFrame(table.to_dict("list")), target="price")
    assert torch.equal(found.train.x, load_dataset(table, target="price").train.x)


def test_data_sets_and_loaders_are_read_whole():
    x, y = torch.randn(40, 1, 6, 6), torch.arange(40) % 4
    pair = load_dataset((x, y))
    for held in (TensorDataset(x, y), DataLoader(TensorDataset(x, y), batch_size=7)):
        found = load_dataset(held)
        assert torch.equal(found.train.x, pair.train.x)
        assert found.checksum == pair.checksum
    assert (pair.kind, pair.shape, pair.classes) == ("image", (1, 6, 6), ("0", "1", "2", "3"))
    assert load_dataset(TensorDataset(x.flatten(1), y)).kind == "table"


def test_a_registered_set_is_known_by_its_name(monkeypatch):
    from vardrop.app.data import datasets as catalog

    monkeypatch.setattr(catalog, "_REGISTERED", {})
    register_dataset("prices", lambda: (frame()[["a", "b"]], frame()["price"]))
    assert load_dataset("prices").name == "prices"
    assert_refused("`name` to be a new name", register_dataset, "prices", frame)
    assert_refused("or a file that ends in .*, but got 'price'", load_dataset, "price")


@pytest.mark.parametrize("data, more, told", [
    (3, {}, "`data` to be a name, a file, a DataFrame with `target`"),
    ((np.zeros(5), np.zeros(5)), {}, "`X` to be a table"),
    ((np.zeros((5, 2)), np.zeros(4)), {}, "one value for each of 5 rows"),
    (["a.csv", "b.csv"], {}, r"one file or a pair \(X, y\), but got a pair of names"),
    ((torch.zeros(5, 1, 2, 2), torch.zeros(5)), {}, "a class for each input, but got torch.float32"),
    (frame(), {"target": "price", "group": "street"}, "to have the column 'street'"),
    (frame(), {}, "Expected a target for the DataFrame"),
    (frame().iloc[:0], {"target": "price"}, "only names of columns"),
    (frame(), {"target": "price", "test": (torch.zeros(5, 1, 2, 2), torch.zeros(5).long())}, "of the kind of `data`"),
    (frame(), {"target": "price", "test": frame().drop(columns="b")}, "the test data to have"),
    (frame(), {"target": "price", "weight": "a"}, "weights from 0 to 1e9 in every row of column 'a'"),
    (frame().assign(a=[[1]] * 60), {"target": "price"}, r"texts or dates in column 'a' .* got \[1\]"),
    (frame().assign(a=1j), {"target": "price"}, "texts or dates in column 'a' of .* got 1j"),
    (frame(), {"target": "price", "split": "town"}, "train, validation or test in column"),
    (frame(), {"target": "price", "time": "town"}, "ISO dates .* in column 'town'"),
    (frame(), {"target": "price", "time": "a", "group": "town"}, "`group` cannot be combined with `time`"),
    (frame(), {"target": "price", "decimal": ","}, "combined with data of the type DataFrame"),
])  # fmt: skip
def test_what_cannot_be_read_is_told(data, more, told):
    assert_refused(told, load_dataset, data, **more)


# Parts.


def test_every_class_is_in_every_part_in_proportion():
    """12 of 2000: two or three are tested, none is lost."""
    y = np.array([1] * 12 + [0] * 1988)
    for seed in range(20):
        found = load_dataset((np.random.default_rng(seed).standard_normal((2000, 2)), y), seed=seed)
        counts = [int(part.y.sum()) for part in (found.train, found.validation, found.test)]
        assert sum(counts) == 12
        assert counts[0] in (8, 9)
        assert counts[1] in (1, 2)
        assert counts[2] in (2, 3)


@pytest.mark.parametrize("classes, sizes", [(12, [22, 3, 6]), (1, None)])
def test_a_class_of_one_row_is_trained_on(classes, sizes):
    """Also where not all of 12 other classes can be in a test part of 6 rows."""
    y = torch.tensor([i % classes for i in range(30)] + [classes])
    for seed in range(10):
        parts = split_rows(31, seed, "data", classes=y)
        assert sizes in (None, [len(parts[p]) for p in ("train", "validation", "test")])
        assert 30 in parts["train"].tolist()


def test_the_seed_decides_the_split():
    for options in ({}, {"classes": torch.arange(50) % 2}, {"groups": torch.arange(50) // 5}):
        first, again, other = (split_rows(50, seed, "data", **options) for seed in (3, 3, 4))
        assert all(torch.equal(first[part], again[part]) for part in first)
        assert not torch.equal(first["test"], other["test"])
        assert sorted(torch.cat(list(first.values())).tolist()) == list(range(50))


def apart(groups, parts):
    """Whether no group is in two parts."""
    owners = [set(groups[rows].tolist()) for rows in parts]
    return sum(map(len, owners)) == len(set.union(*owners))


def test_groups_stay_together():
    groups = torch.arange(60) // 4
    for seed in range(10):
        found = split_rows(60, seed, "data", groups=groups)
        assert apart(groups, found.values())
        assert len(found["test"]) == 12
        assert len(found["validation"]) in (4, 8)
    large = torch.tensor([0] * 40 + list(range(1, 21)))  # one group of two thirds of the rows
    for seed in range(10):
        assert len(split_rows(60, seed, "data", groups=large)["train"]) > 40
    with pytest.raises(vd.VardropError, match="at least 3 groups to split data .* but got 2"):
        split_rows(60, 0, "data", groups=torch.arange(60) // 30)


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_folds_divide_no_group(task):
    group = torch.arange(90) // 6
    y = torch.arange(90) % 3 if task == "classification" else torch.randn(90, 1)
    rows = Part(torch.zeros(90, 1), y, None, group)
    for seed in range(5):
        assert fold_numbers(rows, 4, task, seed).unique().tolist() == [0, 1, 2, 3]
        for trained, held in held_out.fold_pairs(rows, 4, task, seed):
            assert not set(trained.group.tolist()) & set(held.group.tolist())
            assert len(trained.y) + len(held.y) == 90
    assert_refused("`folds` to be at most 15, the groups", fold_numbers, rows, 16, task, 0)


@pytest.mark.parametrize("role", ["group", "time"])
def test_a_fit_in_folds_keeps_groups_and_times_together(tmp_path, monkeypatch, role):
    spy = mock.Mock(wraps=held_out.fold_pairs)
    monkeypatch.setattr(held_out, "fold_pairs", spy)
    table = frame().assign(owner=np.arange(60) // 5, b=np.arange(60) // 5)
    fit(table, target="price", out=tmp_path / "r", **QUIET | {role: "owner", "folds": 3, "beta": 1})
    rows, folds, task, seed = spy.call_args_list[0].args
    owner = rows.x[:, 1].round(decimals=4).unique(return_inverse=True)[1]  # column b
    numbers = fold_numbers(rows, folds, task, seed)
    assert apart(owner, [(numbers == k).nonzero().flatten() for k in range(3)])


def test_rows_of_one_time_stay_together():
    times = torch.tensor([0.0] * 25 + [1.0] * 20 + [2.0] * 4 + [3.0] * 11)[torch.randperm(60)]
    found = split_rows(60, 0, "data", times=times)
    assert times[found["test"]].unique().tolist() == [3.0]  # 11 rows are nearest to 12
    assert times[found["validation"]].unique().tolist() == [2.0]
    assert times[found["train"]].unique().tolist() == [0.0, 1.0]
    many = split_rows(60, 0, "data", times=torch.tensor([0.0] * 5 + [1.0] * 5 + [2.0] * 50))
    assert [len(many[part]) for part in ("train", "validation", "test")] == [5, 5, 50]
    told, two = "at least 3 different times to split data", torch.arange(60) // 30
    assert_refused(told, split_rows, 60, 0, "data", times=two)


def test_the_latest_rows_are_tested():
    table = frame().assign(day=pd.date_range("2020-01-01", periods=60).astype(str))
    table = table.sample(frac=1.0, random_state=1)
    found = load_dataset(table, target="price", time="day")
    latest = table.sort_values("day")["price"].to_numpy()
    mean, std = found.preprocessing.target_mean, found.preprocessing.target_std
    back = np.sort(found.test.y.flatten().numpy() * std + mean)
    assert np.allclose(back, np.sort(latest[-12:]), atol=1e-5)
    assert "day" not in [c.name for c in found.preprocessing.columns]


def test_parts_of_ones_own_are_kept():
    table, test = frame(60), frame(30).assign(a=9.0)
    found = load_dataset(table, target="price", test=test)
    assert found.sizes == {"train": 54, "validation": 6, "test": 30}
    assert float(found.test.x[:, 0].std()) < 1e-6
    column = ["train"] * 30 + ["validation"] * 10 + ["Test"] * 20
    named = load_dataset(table.assign(part=column), target="price", split="part")
    assert named.sizes == {"train": 30, "validation": 10, "test": 20}
    partly = table.assign(part=["test"] * 10 + [None] * 50)
    partly = load_dataset(partly, target="price", split="part")
    assert (partly.sizes["test"], partly.sizes["validation"]) == (10, 5)


# Runs.


def test_a_run_on_arrays_predicts_and_goes_on_with_them(tmp_path):
    table = frame()
    x, y = table.drop(columns="price"), table["price"]
    run = fit((x, y), out=tmp_path / "r", **QUIET)
    assert len(run.predict(x).mean) == 60
    assert torch.equal(load_run(tmp_path / "r").predict(x).mean, run.predict(x).mean)
    assert_refused("passed in memory .* Pass `data`, as to `fit`", resume, tmp_path / "r", epochs=2)
    assert len(resume(tmp_path / "r", data=(x, y), epochs=2).history) == 2
    with pytest.raises(vd.VardropError, match="The checksum of the data of .* changed"):
        resume(tmp_path / "r", data=(x, -y), epochs=3)


def test_parts_that_were_given_are_not_folded(tmp_path):
    more = {k: v for k, v in QUIET.items() if k != "folds"}
    run = fit(frame(), target="price", out=tmp_path / "r", validation=frame(20), **more)
    assert (run.config.settings.folds, run.config.data.validation) == (1, "DataFrame")
    other = fit(frame(), target="price", out=tmp_path / "s", test=frame(20), **more)
    assert other.config.settings.folds == 4


def test_roles_are_kept_with_the_run(tmp_path):
    table = frame().assign(name=[f"house {i}" for i in range(60)], often=1.0)
    path = tmp_path / "houses.csv"
    table.to_csv(path, index=False)
    fit(path, target="price", id="name", weight="often", out=tmp_path / "r", **QUIET)
    found = load_run(tmp_path / "r")
    roles = Roles("price", "regression", (), "name", "often")
    assert vars(found.config.data).items() >= vars(roles).items()
    assert [c.name for c in found.about.preprocessing.columns] == ["a", "b", "c", "town"]
    assert torch.equal(found.data.train.weight, torch.ones(42))


def test_a_weight_of_two_is_a_row_twice():
    """Exact for the objective: the gradient of weighted rows is that of repeated ones."""
    net = vd.convert(torch.nn.Linear(3, 1), vd.bayes_by_backprop())
    x, y = torch.randn(6, 3), torch.randn(6, 1)
    weight = torch.tensor([2.0, 0.0, 1.0, 1.0, 2.0, 0.0])
    repeated = torch.tensor([0, 0, 2, 3, 4, 4])
    elbo = vd.ELBO(net, vd.Gaussian(0.3), num_data=6)
    with vd.sampling(net, False):
        weighed, twice = elbo(x, y, weight), elbo(x[repeated], y[repeated])
    assert torch.allclose(weighed.loss, twice.loss)
    names = list(elbo.parameters())
    gradients = (torch.autograd.grad(found.loss, names) for found in (weighed, twice))
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)


def test_weights_move_what_is_learned(tmp_path):
    """Two thirds of the rows say -1; with their weight at a hundredth the mean is near 1."""
    x = np.random.default_rng(0).standard_normal((90, 1))
    table = pd.DataFrame({"x": x[:, 0], "y": np.where(np.arange(90) % 3, -1.0, 1.0)})
    light = table.assign(w=np.where(table["y"] < 0, 0.01, 1.0))
    settings = QUIET | {"epochs": 60, "target": "y", "task": "regression"}
    plain = fit(table, out=tmp_path / "a", **settings)
    weighed = fit(light, weight="w", out=tmp_path / "b", **settings)
    assert float(plain.predict(table).mean.mean()) < 0
    assert float(weighed.predict(light).mean.mean()) > 0.5
