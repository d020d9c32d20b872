"""Seconds that `import vardrop` takes beyond `import torch`, each in a fresh process."""

from __future__ import annotations

import os
import subprocess
import sys

from measuring import Row, figure, quartiles

PROGRAM = """
import time, torch
start = time.process_time()
import vardrop
print(time.process_time() - start)
"""


def measure(times: int) -> list[Row]:
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}

    def once() -> float:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True, env=kept
        )
        return float(done.stdout)

    once()  # writes the bytecode
    low, middle, high = (1e3 * s for s in quartiles([once() for _ in range(times)]))
    row = figure("import", "import vardrop, beyond torch", "vardrop", None)
    return [{**row, "ms": middle, "note": f"quartiles {low:.0f} to {high:.0f} ms"}]
