"""The example scripts run as their first lines say."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
COMMANDS = {
    "fsdp2": (TORCHRUN, "torch", r"rank 1: 70914 of 141828 parameters, KL \d+, accuracy 0\.9"),
    "accelerate_loop": (TORCHRUN, "accelerate", r"2 processes, accuracy 0\.9"),
    "lightning_ddp": ([sys.executable], "lightning", r"'val_nll': 0\.\d+, 'sparsity': 0\.\d+"),
    "smoke": ([sys.executable], "onnxruntime", r"all well"),
    "ray_train": ([sys.executable], "ray", r"'nll': 0\.\d+"),
}


def test_every_example_is_run():
    assert set(COMMANDS) == {path.stem for path in (ROOT / "examples").glob("*.py")}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_example(name):
    command, package, expected = COMMANDS[name]
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    paths = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    found = subprocess.run(
        [*command, str(ROOT / "examples" / f"{name}.py")],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-2000:]
    assert re.search(expected, found.stdout), found.stdout[-2000:]
