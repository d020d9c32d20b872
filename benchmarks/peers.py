"""Other libraries at pinned versions, each in an environment of its own.

    python benchmarks/peers.py [name ...]

torch comes first and the library after it without its dependencies, so that none can bring another
torch or a torchvision; the small packages it needs are named here. What fails is written down with
its reason and shown in the results.
"""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path.home() / ".cache" / "vardrop-bench"
CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"
TORCH = "torch==2.13.0"
# The library imports, and nothing has brought another torch.
IMPORT = "import {module}, torch; assert ('torch==' + torch.__version__).startswith('{torch}')"


@dataclass(frozen=True)
class Package:
    """A library, what it needs beside torch, and the module that must import."""

    requirement: str
    needs: tuple[str, ...]
    module: str


PACKAGES = {
    "torchbnn": Package("torchbnn==1.2", ("numpy==2.4.6",), "torchbnn"),
    "bayesian-torch": Package("bayesian-torch==0.5.0", ("numpy==2.4.6",), "bayesian_torch.layers"),
    "blitz": Package("blitz-bayesian-pytorch==0.2.8", ("numpy==2.4.6",), "blitz.modules"),
    "torch-uncertainty": Package(
        "torch-uncertainty==0.13.0", ("numpy==2.4.6", "einops==0.8.2"), "einops"
    ),
    "cplxmodule": Package(
        "cplxmodule==2022.6", ("numpy==2.4.6", "scipy==1.17.1"), "cplxmodule.nn.relevance"
    ),
    "pytorch-ard": Package("pytorch_ard==0.2.4", ("numpy==2.4.6",), "torch_ard"),
    "tyxe": Package(
        "tyxe==0.0.2",
        ("numpy==2.4.6", "pyro-ppl==1.9.1", "pyro-api==0.1.2", "opt_einsum==3.4.0", "tqdm==4.70.1"),
        "tyxe",
    ),
}


def python(name: str) -> Path:
    return ROOT / name / "bin" / "python"


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise RuntimeError(lines[-1] if lines else f"exit {done.returncode}")


def _install(name: str, package: Package) -> None:
    venv.create(ROOT / name, clear=True)
    interpreter = str(python(name))
    pip = (sys.executable, "-m", "pip", "--python", interpreter, "install", "--quiet")
    _run(*pip, "--no-compile", "-c", str(CONSTRAINTS), TORCH)
    _run(*pip, "--no-deps", *package.needs, package.requirement)
    _run(interpreter, "-c", IMPORT.format(module=package.module, torch=TORCH))


def ensure(name: str) -> dict[str, str]:
    """The peer's record: its requirement, and the reason where it does not install."""
    package, record = PACKAGES[name], ROOT / f"{name}.json"
    needs = " ".join((TORCH, *package.needs))
    wanted = {"requirement": package.requirement, "needs": needs}
    if record.exists() and json.loads(record.read_text()) == wanted:
        return wanted
    try:
        _install(name, package)
    except (RuntimeError, OSError, subprocess.CalledProcessError) as failure:
        wanted["failure"] = f"does not install: {failure}"
    record.parent.mkdir(parents=True, exist_ok=True)
    record.write_text(json.dumps(wanted))
    return wanted


def main() -> None:
    for name in sys.argv[1:] or PACKAGES:
        print(name, ensure(name), flush=True)


if __name__ == "__main__":
    main()
