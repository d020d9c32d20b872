"""Files: checksums are required, one process works in a directory, JSON is JSON.

Damaged files of every format: `test_fuzz_files.py`.
"""

import errno
import json
import math
import os
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load, save

from tests.refusals import assert_refused
from vardrop._core import files
from vardrop._core.errors import printable
from vardrop._core.files import verify_checksum


def test_tensors_without_a_checksum_are_an_error(tmp_path):
    path = tmp_path / "t.safetensors"
    files.write_tensors(path, {"net.weight": torch.randn(9, 7)}, {"epoch": 3})
    own = load(path.read_bytes())
    for metadata in (None, {"values": '{"epoch": 3}'}, {"values": "null", "sha25": "0"}):
        path.write_bytes(save(own, metadata))
        assert_refused("checksum of .*t.safetensors to match", files.read_tensors, path)
    path.write_bytes(path.read_bytes()[:-1])
    assert_refused("not found: .*absent. Train first", files.read_tensors, tmp_path / "absent")
    assert_refused("t.safetensors to be a safetensors file.*damaged", files.read_tensors, path)


def test_an_object_without_its_seal_is_an_error():
    whole = files.with_checksum({"epochs": 3})
    assert verify_checksum(whole, "c.json") == {"epochs": 3}
    for changed in ({"epochs": 3}, {**whole, "epochs": 4}):
        told = "checksum of c.json to match its content, but it do"
        assert_refused(told, verify_checksum, changed, "c.json")
    assert_refused("c.json to hold a JSON object, but got list", verify_checksum, [], "c.json")


def test_json_that_cannot_be_read_is_told(tmp_path):
    for content, told in (
        (b"[" * 200_000, "a.json to hold JSON, but got: maximum recursion"),
        (b'{"a": "\xff"}', "a.json to hold JSON, but got: 'utf-8' codec"),
    ):
        (tmp_path / "a.json").write_bytes(content)
        assert_refused(told, files.read_json, tmp_path / "a.json")


def test_numbers_that_are_not_finite_are_null_with_a_note(tmp_path):
    found = {"metrics": {"nll": math.inf, "ece": 0.5}, "curve": [{"metric": math.nan}]}
    files.write_json(tmp_path / "r.json", files.with_checksum(found))
    stored = json.loads((tmp_path / "r.json").read_text(), parse_constant=pytest.fail)
    assert verify_checksum(stored, "r.json") == {
        "metrics": {"nll": None, "ece": 0.5},
        "curve": [{"metric": None}],
        "not_finite": {"metrics.nll": "inf", "curve.0.metric": "nan"},
    }
    assert files.to_json_safe({"a": 1.5, "b": (1, 2)}) == {"a": 1.5, "b": [1, 2]}


def take(directory):
    with files.lock_directory(directory):
        pass


def read_only(*_, **__):
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def test_a_read_only_directory_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.open", read_only)
    monkeypatch.setattr("pathlib.Path.unlink", read_only)
    assert_refused("to .*a, but got: Read-only", files.write_atomically, tmp_path / "a", b"x")
    assert_refused(r"to .*\.lock, but got: Read-only file system", take, tmp_path)
    assert_refused(r"remove .*a, but got: Read-only file system", files.remove, tmp_path / "a")


def test_one_at_a_time_works_in_a_directory(tmp_path):
    with files.lock_directory(tmp_path):
        assert_refused("to be free, but another process is working in", take, tmp_path)
    take(tmp_path)


def test_the_lock_of_a_killed_process_is_free(tmp_path):
    held = (
        "import fcntl, sys, time; file = open(sys.argv[1], 'ab'); "
        "fcntl.flock(file, fcntl.LOCK_EX); print('held', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", held, tmp_path / files.LOCK]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        assert_refused("another process is working in it", take, tmp_path)
        other.send_signal(signal.SIGKILL)
    take(tmp_path)


def test_what_killed_writes_left_is_removed_and_nothing_else(tmp_path):
    names = ["a.json", ".hidden.new", ".b.json.12.old", ".c.json.77.new", ".d.jsonl.5.new"]
    for name in names:
        (tmp_path / name).write_text("")
    files.remove_leftovers(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(names[:3])


def test_an_output_is_no_input(tmp_path):
    (tmp_path / "in.csv").write_text("a")
    (tmp_path / "link.csv").symlink_to(tmp_path / "in.csv")
    files.check_not_in_use(tmp_path / "out.csv", [tmp_path / "in.csv"])
    told, inputs = "which is in use and would be lost. Choose", [tmp_path / "in.csv"]
    for name in ("in.csv", "link.csv", f"../{tmp_path.name}/in.csv"):
        assert_refused(told, files.check_not_in_use, tmp_path / name, inputs)


def test_names_do_not_steer_the_terminal():
    assert printable("a\x1b[2Jb\tc\x9b\u202e\nü 日本") == "a\\x1b[2Jb\\tc\\x9b\\u202e\nü 日本"
