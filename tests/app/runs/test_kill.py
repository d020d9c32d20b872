"""A run that is killed twenty times at random moments ends with the numbers of an unbroken one."""

import json
from pathlib import Path

import torch

from tests.running import python
from vardrop._core.files import read_tensors
from vardrop.app.runs import read_history

KILLS = 21  # twenty SIGKILLs and one SIGINT


def test_twenty_kills_change_nothing(tmp_path):
    done = python(Path(__file__).with_name("killed.py"), tmp_path, KILLS)
    assert done.returncode == 0, done.stderr
    kills, places = (int(word) for word in done.stdout.split() if word.isdigit())
    assert kills == KILLS
    assert places >= KILLS // 2
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for name in ("checkpoint.safetensors", "best.safetensors", "choice.safetensors"):
        (expected, values), (found, again) = read_tensors(whole / name), read_tensors(broken / name)
        assert values == again
        assert set(found) == set(expected)
        assert all(torch.equal(found[key], expected[key]) for key in expected), name
    histories = [[{**r, "seconds": 0} for r in read_history(d)] for d in (whole, broken)]
    assert histories[0] == histories[1]
    assert len(histories[0]) == 11
    results = [json.loads((d / "results.json").read_text()) for d in (whole, broken)]
    assert results[0] == results[1]
    assert not (whole / "trials").exists()
    assert not (broken / "trials").exists()
