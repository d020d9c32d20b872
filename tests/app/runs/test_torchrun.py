"""Two processes under torchrun give the loss curve of one, for the same global batch and noise."""

import json
from pathlib import Path

from tests.running import TORCHRUN, python

SCRIPT = str(Path(__file__).with_name("shared.py"))


def trained(path, *launcher):
    done = python(*launcher, SCRIPT, path)
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text())


def test_two_processes_give_the_curve_of_one(tmp_path):
    alone = trained(tmp_path / "one.json")
    shared = trained(tmp_path / "two.json", *TORCHRUN)
    assert (alone["processes"], shared["processes"]) == (1, 2)
    for part in ("loss", "nll"):
        one, two = ([e[part] for e in found["epochs"]] for found in (alone, shared))
        assert max(abs(a - b) for a, b in zip(one, two, strict=True)) <= 1e-4, (part, one, two)
    assert one[-1] < 0.8 * one[0]
