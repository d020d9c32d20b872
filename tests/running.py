"""Python in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def python(*words, env=(), check=False, **options):
    """Run it with these words, one thread and the source on its path: what it said, how it ended."""
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, **dict(env)}
    given = {"capture_output": True, "text": True, "timeout": 300, "env": env} | options
    return subprocess.run([sys.executable, *map(str, words)], check=check, **given)
