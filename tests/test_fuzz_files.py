"""Damaged and forged files: the same content, or a VardropError; no other file, no large memory.

Every format is written once and read again after mutations: of raw bytes, of every key of its JSON
and of every tensor and its name. Mutations of content carry a right checksum, so that they get past
it; these may load as other values, which is what a forged file can do (see SECURITY.md).
"""

import copy
import json
import os
import random
import shutil
import struct
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import vardrop as vd
from tests.nets import assert_unchanged, is_equal
from vardrop._core.files import read_tensors, with_checksum, write_tensors
from vardrop.app.runs.evaluate import write_predictions
from vardrop.app.runs.recorder import read_checkpoint
from vardrop.app.store import read_run
from vardrop.sklearn import VardropClassifier

OUTSIDE = "outside.txt"
LARGE = 2**29  # bytes that no reader needs for files of a few kilobytes
VALUES = (None, True, -1, 10**15, 1e308, "", "../../" + OUTSIDE, [], [10**9, 10**9], {}, {"a": 1})
NAMES = ("../../" + OUTSIDE, "/tmp/" + OUTSIDE, "")


def table(rows=60):
    made = np.random.default_rng(0)
    frame = pd.DataFrame({"a": made.normal(size=rows), "town": made.choice(["u", "v"], rows)})
    frame["day"] = pd.date_range("2020-01-01", periods=rows).astype(str)
    frame["street"] = made.choice([f"s{i}" for i in range(55)], rows)
    return frame.assign(y=frame.a + (frame.town == "u"))


def small_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One directory with a file of every format."""
    base = tmp_path_factory.mktemp("fuzz") / "deep" / "er"
    base.mkdir(parents=True)
    settings = {"epochs": 2, "folds": 1, "beta": 0.1, "batch_size": 32}
    vd.fit(table(200), "dense-6", target="y", out=base / "run", compare=False, **settings)
    shutil.rmtree(base / "run" / "trials", ignore_errors=True)
    frame = table().drop(columns=["y", "street", "day"])
    options = {"epochs": 2, "folds": 1, "beta": 0.1, "random_state": 0}
    classes = ["no", "yes"] * 30
    VardropClassifier((4,), **options).fit(frame, classes).save(base / "estimator.safetensors")
    vd.save(small_net(), base / "net.safetensors")
    vd.pack(small_net(), base / "net.vdp")
    vd.save_noisy(vd.convert(small_net(), vd.sparse_vd()), base / "noisy.safetensors")
    return base


def run_content(path):
    run = vd.load_run(path.parent)
    p = run.predict(table(3), samples=2)
    return run.config.to_json(), run.state()[0], p.mean, run.interval(p).lower


def stored_content(path):
    run = read_run(path.parent)
    return run.results, run.history, run.arrays, run.sizes(), run.fractions(), run.stopped


def estimator_content(path):
    model = VardropClassifier.load(path)
    rows = table(3).drop(columns=["y", "street", "day"])
    return model.predict_proba(rows), model.predict_set(rows)


def net_content(read):
    """What a reader makes of a file; the model that it reads into stays as it is."""

    def content(path):
        with assert_unchanged(into := small_net()):
            return read(path, into=into).state_dict()

    return content


READERS = {
    "run/config.json": run_content, "run/preprocessing.json": run_content,
    "run/best.safetensors": run_content, "run/choice.safetensors": run_content,
    "run/results.json": stored_content, "run/arrays.safetensors": stored_content,
    "run/history.jsonl": stored_content, "run/checkpoint.json": stored_content,
    "run/checkpoint.safetensors": lambda path: read_checkpoint(path.parent),
    "estimator.safetensors": estimator_content,
    "net.safetensors": net_content(vd.load), "net.vdp": net_content(vd.unpack),
    "noisy.safetensors": lambda path: vd.load_noisy(path, into=small_net()).state_dict(),
}  # fmt: skip


CHECKED = ("net.safetensors", "net.vdp")  # a checksum of all bytes: whatever is damaged is told


def memory():
    """The most memory that the process has had so far, in bytes."""
    resource = pytest.importorskip("resource")
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def files_around(base):
    return {p: p.stat().st_mtime_ns for p in base.parents[1].rglob("*") if p.is_file()}


def check(folder, name, content, expected=None):
    """Read a file with other content: an error of the library, or what is expected if anything."""
    path, before = folder / name, memory()
    original = path.read_bytes()
    path.write_bytes(content)
    around = files_around(folder)
    try:
        found = READERS[name](path)
    except vd.VardropError as error:
        told, right = str(error), True
    else:
        told, right = "", expected is None or is_equal(found, expected)
    finally:
        written, used = files_around(folder), memory() - before
        path.write_bytes(original)
    assert right
    assert told or expected is None or name not in CHECKED
    assert written == around
    assert used < LARGE
    assert "can't allocate" not in told  # the size was taken from the file
    assert not Path("/tmp", OUTSIDE).exists()


def places(value, path=()):
    """The paths of all entries of a JSON value."""
    entries = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in list(entries)[:12]:  # of a long list the first ones
        yield (*path, key)
        if isinstance(inner, dict | list):
            yield from places(inner, (*path, key))


def changed(value, path, generator):
    """A copy with the entry at a path deleted, under another name or with another value."""
    value = copy.deepcopy(value)
    owner = value
    for key in path[:-1]:
        owner = owner[key]
    kind = generator.randrange(6)
    if kind == 0:
        del owner[path[-1]]
    elif kind == 1 and isinstance(owner, dict):
        owner[generator.choice(NAMES)] = owner.pop(path[-1])
    else:
        owner[path[-1]] = generator.choice(VALUES)
    return value


def mutated_bytes(raw, generator, count):
    for _ in range(count):
        at = generator.randrange(len(raw))
        yield raw[:at] + bytes([raw[at] ^ (1 << generator.randrange(8))]) + raw[at + 1 :]
    for at in (0, 1, 8, len(raw) // 2, len(raw) - 1):
        yield raw[:at]
    yield struct.pack("<Q", 2**62) + raw[8:]
    yield raw + b"\0"
    yield b"[" * 100_000


@pytest.mark.parametrize("name", READERS)
def test_damaged_bytes_load_as_before_or_not_at_all(folder, name):
    generator, path = random.Random(name), folder / name
    expected = READERS[name](path)
    for content in mutated_bytes(path.read_bytes(), generator, 25):
        check(folder, name, content, expected)


@pytest.mark.parametrize("name", [n for n in READERS if n.endswith(("json", "jsonl"))])
def test_forged_json_is_an_error_or_another_value(folder, name):
    generator, text = random.Random(name), (folder / name).read_text()
    whole = [json.loads(line) for line in text.splitlines()] if name.endswith("l") else None
    value = json.loads(text) if whole is None else whole[0]
    value.pop("sha256")
    for path in places(value):
        forged = json.dumps(with_checksum(changed(value, path, generator)))
        rest = [] if whole is None else [json.dumps(line) for line in whole[1:]]
        check(folder, name, "\n".join([forged, *rest]).encode())


def mutated_tensors(tensors, generator):
    """Every tensor once: gone, under another name, of another shape, type or with other numbers."""
    for name, tensor in tensors.items():
        others = {k: t for k, t in tensors.items() if k != name}
        variants = (
            {},
            {generator.choice(NAMES): tensor},
            {name: tensor.flatten()[:-1] if tensor.numel() > 1 else tensor.new_zeros(2, 2)},
            {name: tensor.new_zeros(0)},
            {name: tensor.to(generator.choice((torch.uint8, torch.int64, torch.float64)))},
            {name: torch.full_like(tensor.double(), float("nan")).to(tensor.dtype)},
            {name: tensor, generator.choice(NAMES): tensor},
        )
        yield {**others, **generator.choice(variants)}


@pytest.mark.parametrize("name", [n for n in READERS if n.endswith("safetensors")])
def test_forged_tensors_are_an_error_or_other_numbers(folder, name):
    generator, path = random.Random(name), folder / name
    tensors, values = read_tensors(path)

    def write(tensors, values):
        write_tensors(folder.parent / "forged", tensors, values)
        content = (folder.parent / "forged").read_bytes()
        (folder.parent / "forged").unlink()
        return content

    for forged in mutated_tensors(tensors, generator):
        check(folder, name, write(forged, values))
    for place in places(values) if values else ():
        check(folder, name, write(tensors, changed(values, place, generator)))


def test_a_forged_size_is_refused_before_memory_is_taken(folder):
    """A net of 10^10 numbers in a configuration of a few hundred bytes, and in an estimator."""
    value = json.loads((folder / "run/config.json").read_text())
    value.pop("sha256")
    for net in ("dense-100000-100000", "dense-99999999999999999999", "dense-1" + "-100000" * 5):
        forged = json.dumps(with_checksum({**value, "net": net})).encode()
        check(folder, "run/config.json", forged)
    tensors, values = read_tensors(folder / "estimator.safetensors")
    for key, size in (("net", "dense-100000-100000"), ("shape", [10**9]), ("shape", [-1])):
        forged = copy.deepcopy(values)
        forged["model"]["config"][key] = size
        write_tensors(folder / "forged.safetensors", tensors, forged)
        with pytest.raises(vd.VardropError):
            VardropClassifier.load(folder / "forged.safetensors")
    (folder / "forged.safetensors").unlink()


def test_a_link_in_the_place_of_a_file_is_read_but_never_written_through(folder, tmp_path):
    """A run whose results.json points elsewhere: writing replaces the link, not what it points to."""
    shutil.copytree(folder / "run", tmp_path / "run")
    (tmp_path / "victim.json").write_bytes((folder / "run/results.json").read_bytes())
    (tmp_path / "run/results.json").unlink()
    os.symlink(tmp_path / "victim.json", tmp_path / "run/results.json")
    run = vd.load_run(tmp_path / "run")
    before = (tmp_path / "victim.json").read_bytes()
    run.keep({**run.results, "more": 1})
    assert (tmp_path / "victim.json").read_bytes() == before
    assert run.results["more"] == 1


def test_images_in_npy_files_are_numbers_or_an_error(tmp_path):
    run = vd.fit("digits", "mlp50", out=tmp_path / "r", epochs=1, compare=False)
    np.save(tmp_path / "x.npy", run.data.test.x[:2].numpy())
    raw, generator = (tmp_path / "x.npy").read_bytes(), random.Random(1)
    for content in mutated_bytes(raw[:200], generator, 20):
        (tmp_path / "x.npy").write_bytes(content + raw[200:])
        with suppress(vd.VardropError):
            write_predictions(run, tmp_path / "x.npy", tmp_path / "p.csv", samples=1)
