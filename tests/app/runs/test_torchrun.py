"""Two processes under torchrun give the loss curve of one, for the same global batch and noise."""

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = str(Path(__file__).with_name("shared.py"))


def trained(path, *launcher):
    done = subprocess.run(
        [sys.executable, *launcher, SCRIPT, str(path)],
        capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text())


def test_two_processes_give_the_curve_of_one(tmp_path):
    alone = trained(tmp_path / "one.json")
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    shared = trained(tmp_path / "two.json", *launcher)
    assert (alone["processes"], shared["processes"]) == (1, 2)
    for part in ("loss", "nll"):
        one, two = ([e[part] for e in found["epochs"]] for found in (alone, shared))
        assert max(abs(a - b) for a, b in zip(one, two, strict=True)) <= 1e-4, (part, one, two)
    assert one[-1] < 0.8 * one[0]
