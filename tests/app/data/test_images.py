"""Image sets: from a directory, from the network into a cache, with checksums."""

import gzip
import hashlib
import io
import json
import struct
import tarfile
from pathlib import Path

import pytest
import torch
from PIL import Image

import vardrop as vd
from tests.refusals import assert_refused
from tests.running import serve
from vardrop.app import data as catalog
from vardrop.app.data import IMAGE_SETS, load_cifar10, load_images


@pytest.fixture
def idx(tmp_path, monkeypatch):
    """A tiny set in the IDX format, known under the name mnist."""
    folder = tmp_path / "source"
    folder.mkdir()
    pixels = torch.arange(5 * 28 * 28).remainder(256).to(torch.uint8)
    head = struct.pack(">4I", 2051, 5, 28, 28)
    files = {
        "train-images-idx3-ubyte.gz": head + pixels.numpy().tobytes(),
        "train-labels-idx1-ubyte.gz": struct.pack(">2I", 2049, 5) + bytes([3, 1, 4, 1, 5]),
    }
    sums = []
    for name, raw in files.items():
        (folder / name).write_bytes(gzip.compress(raw, mtime=0))
        sums.append(hashlib.md5((folder / name).read_bytes()).hexdigest())
    monkeypatch.setitem(IMAGE_SETS, "mnist", catalog.idx_set("mnist", None, train=tuple(sums)))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def publish(monkeypatch, source):
    """Let the files of the set mnist be fetched from an address."""
    known = catalog.idx_set("mnist", source, **IMAGE_SETS["mnist"].md5)
    monkeypatch.setitem(IMAGE_SETS, "mnist", known)


@pytest.fixture
def server(idx):
    with serve(idx) as address:
        yield address


def test_what_is_absent_is_fetched_once_and_cached(server, idx, tmp_path, monkeypatch):
    publish(monkeypatch, server)
    found = load_images("mnist", directory=tmp_path / "nowhere")
    assert (found.y.tolist(), found.x.shape) == ([3, 1, 4, 1, 5], (5, 1, 28, 28))
    assert float(found.x.max()) == 1.0
    for file in idx.iterdir():
        file.unlink()
    assert torch.equal(load_images("mnist", directory=tmp_path / "nowhere").x, found.x)


def test_a_wrong_checksum_names_the_file(idx, server, tmp_path, monkeypatch):
    (idx.parent / "mnist").mkdir()
    for file in idx.iterdir():
        (idx.parent / "mnist" / file.name).write_bytes(file.read_bytes() + b"!")
    assert_refused("MD5 of .*ubyte.gz to be", load_images, "mnist", directory=idx.parent)
    publish(monkeypatch, server)
    (idx / "train-images-idx3-ubyte.gz").write_bytes(b"changed on the way")
    told, nowhere = "The download from http://127.0.0.1.* failed: .*hash", tmp_path / "nowhere"
    assert_refused(told, load_images, "mnist", directory=nowhere)


def test_what_cannot_be_fetched_says_where_to_put_it(idx, tmp_path, monkeypatch):
    publish(monkeypatch, "http://127.0.0.1:9/")
    nowhere = tmp_path / "nowhere"
    assert_refused("Put it there, or set VARDROP_DATA", load_images, "mnist", directory=nowhere)
    assert_refused("not found: .*notmnist", load_images, "notmnist", "test", nowhere)
    assert_refused("image set among .* but got mnist/never", load_images, "mnist", "never")


def colours(count):
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=generator)
    return x, torch.arange(count) % 10


def test_cifar10_from_its_archive(tmp_path, monkeypatch):
    x, y = colours(6)
    rows = torch.cat([y.to(torch.uint8).unsqueeze(1), x.flatten(1)], 1).numpy().tobytes()
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:gz") as archive:
        for i in range(1, 6):
            info = tarfile.TarInfo(f"cifar-10-batches-bin/data_batch_{i}.bin")
            info.size = len(rows)
            archive.addfile(info, io.BytesIO(rows))
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "cifar10" / "cifar-10-binary.tar.gz").write_bytes(raw.getvalue())
    monkeypatch.setattr(catalog.images, "_MD5", hashlib.md5(raw.getvalue()).hexdigest())
    found = load_cifar10("train", tmp_path)
    assert torch.equal(found.x, torch.cat([x] * 5).float() / 255)
    assert torch.equal(found.y, torch.cat([y] * 5))


def test_cifar10_from_pngs_of_one_image_per_row(tmp_path):
    (x, y), folder = colours(7), tmp_path / "cifar10"
    folder.mkdir()
    rows = Image.fromarray(x.permute(0, 2, 3, 1).reshape(7, 1024, 3).numpy())
    rows.save(folder / "test_batch.png")
    assert_refused("PNGs and their labels in .*test_lables.json", load_cifar10, "test", tmp_path)
    (folder / "test_lables.json").write_text(json.dumps(y.tolist()))
    found = load_cifar10("test", tmp_path)
    assert torch.equal(found.x, x.float() / 255)
    assert torch.equal(found.y, y)
    (folder / "test_lables.json").write_text("[1, 2]")
    assert_refused("Expected 7 labels", load_cifar10, "test", tmp_path)
    (folder / "test_batch.png").write_bytes((folder / "test_batch.png").read_bytes()[:500])
    assert_refused("PNGs and their labels in", load_cifar10, "test", tmp_path)
    assert_refused("`split` to be one of 'train', 'test', but got 'x'", load_cifar10, "x", tmp_path)


def test_the_directory_is_the_given_one_or_that_of_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("VARDROP_DATA", str(tmp_path / "environment"))
    assert catalog.data_directory("given") == Path("given")
    assert catalog.data_directory() == tmp_path / "environment"
    monkeypatch.delenv("VARDROP_DATA")
    assert catalog.data_directory() is None
    assert_refused("to the directory that holds notmnist", load_images, "notmnist", "test")


def test_mnist_has_three_parts_and_a_checksum():
    try:
        data = catalog.load_dataset("mnist")
    except vd.VardropError as absent:
        pytest.skip(str(absent))
    assert data.sizes == {"train": 54000, "validation": 6000, "test": 10000}
    assert (data.kind, data.task, data.shape) == ("image", "classification", (1, 28, 28))
    assert data.about.outputs == 10


def test_other_images_take_the_shape_of_the_net():
    load = catalog.load_out_of_distribution
    assert load("photos", (1, 8, 8)).shape[1:] == (1, 8, 8)
    found = load("digits", (3, 32, 32))
    assert found.shape == (1797, 3, 32, 32)
    assert 0 <= float(found.min()) <= float(found.max()) <= 1.0001
    assert_refused("a model on images to compare with 'photos'", load, "photos", (4,))
    assert_refused("but got 'moons'", load, "moons", (1, 8, 8))


def test_a_set_is_one_row_of_the_table(idx, tmp_path, monkeypatch):
    known = IMAGE_SETS["mnist"]
    letters = catalog.ImageSet(lambda split, _: known.read("train", None))
    monkeypatch.setitem(IMAGE_SETS, "letters", letters)
    idx.rename(tmp_path / "mnist")
    monkeypatch.setenv("VARDROP_DATA", str(tmp_path))
    assert load_images("letters", "test").y.tolist() == [3, 1, 4, 1, 5]
    assert_refused("letters/train, letters/test, but got", load_images, "letters", "validation")
