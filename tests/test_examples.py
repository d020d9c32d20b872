"""The example scripts run as their first lines say."""

import re
from importlib.util import find_spec

import pytest

from tests.running import ROOT, TORCHRUN, python

COMMANDS = {
    "fsdp2": (TORCHRUN, "torch", r"rank 1: 70914 of 141828 parameters, KL \d+, accuracy 0\.9"),
    "accelerate_loop": (TORCHRUN, "accelerate", r"2 processes, accuracy 0\.9"),
    "lightning_ddp": ((), "lightning", r"'val_nll': 0\.\d+, 'sparsity': 0\.\d+"),
    "ray_train": ((), "ray", r"'nll': 0\.\d+"),
}


def test_every_example_is_run():
    assert set(COMMANDS) == {path.stem for path in (ROOT / "examples").glob("*.py")}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_example(name):
    command, package, expected = COMMANDS[name]
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    found = python(*command, ROOT / "examples" / f"{name}.py")
    assert found.returncode == 0, found.stderr[-2000:]
    assert re.search(expected, found.stdout), found.stdout[-2000:]
