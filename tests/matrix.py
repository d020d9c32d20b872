"""Run the smoke script and selected tests with several versions of Python and torch.

    python tests/matrix.py                                  # or make matrix
    python tests/matrix.py --python python3.13 --torch 2.15.0
    python tests/matrix.py --python python3.11 --lowest     # the lowest versions of pyproject.toml

Every combination has its own environment under build/matrix, which is kept and used again. On Linux
the torch of the package index brings several gigabytes of CUDA libraries per environment. The
default combinations are all installed interpreters, each with the oldest supported and the newest
torch.
"""

import argparse
import os
import re
import shutil
import subprocess
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTHONS = ("python3.11", "python3.12", "python3.13")
EXTRAS = "app,huggingface,lightning"
TOOLS = ("hypothesis", "mpmath", "pytest", "scipy", "tensorboard", "torchmetrics")
# Files that depend on torch or on an optional package.
TESTS = [
    "tests/app/data/test_tables.py",
    "tests/app/runs/test_export.py",
    "tests/compression/test_files.py",
    "tests/compression/test_shrink.py",
    "tests/integrations/test_lightning.py",
    "tests/integrations/test_peft.py",
    "tests/layers/test_goldens.py",
    "tests/test_export.py",
    "tests/tuning/test_train.py",
]


def oldest_torch():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return re.search(r"torch>=([\d.]+)", " ".join(project["dependencies"]))[1]


def pip(environment, *words):
    command = [environment / "bin" / "python", "-m", "pip", "install", "--quiet", *words]
    subprocess.run(command, check=True)


def install(environment, python, torch):
    """Make the environment unless it is complete; return the seconds that it took."""
    stamp, start = environment / "installed", time.monotonic()
    if stamp.is_file():
        return float(stamp.read_text())
    subprocess.run([python, "-m", "venv", environment], check=True)
    project = f"{ROOT}[{EXTRAS}]"
    if torch == "lowest":
        pip(environment, "uv")
        command = [environment / "bin" / "uv", "pip", "install", "--quiet", "--editable", project]
        command += ["--resolution", "lowest-direct", "--python", environment / "bin" / "python"]
        subprocess.run(command, check=True)
        pip(environment, *TOOLS)
    else:
        version = () if torch == "newest" else (f"torch=={torch}",)
        pip(environment, *version, "--editable", project, *TOOLS)
    subprocess.run([environment / "bin" / "python", "-m", "pip", "check"], check=True)
    seconds = time.monotonic() - start
    stamp.write_text(f"{seconds:.0f}")
    return seconds


def run(environment, *words):
    """Run Python in an environment with one thread; return the exit code and the output."""
    command = [environment / "bin" / "python", *words]
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])  # the clone that this script is in
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    done = subprocess.run(
        command, cwd=ROOT, env=settings, text=True, stdout=subprocess.PIPE, check=False
    )
    return done.returncode, done.stdout


def check(environment, python, torch):
    """Run all checks of a combination; return the row of the table and whether all passed."""
    seconds = install(environment, python, torch)
    code, text = run(environment, "tests/smoke.py")
    print(text, flush=True)
    version = re.search(r"torch (\S+), Python (\S+)", text)
    # Warnings of other packages are errors only for the versions in constraints.txt.
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default")
    tests, output = run(environment, *words, *TESTS)
    last = output.strip().splitlines()[-1]
    counts = [re.search(rf"(\d+) {word}", last) for word in ("passed", "failed", "skipped")]
    print(output[-4000:], flush=True)
    names = (version[2], version[1]) if version else (python, torch)
    smoke = "failed" if code else "passed"
    cells = [*names, smoke, *(match[1] if match else "0" for match in counts), f"{seconds:.0f} s"]
    return cells, code == tests == 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--python", nargs="*", default=[p for p in PYTHONS if shutil.which(p)])
    parser.add_argument("--torch", nargs="*", default=[oldest_torch(), "newest"])
    parser.add_argument("--lowest", action="store_true", help="the lowest versions of all packages")
    parser.add_argument("--oldest", action="store_true", help="print the oldest torch and exit")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "matrix")
    options = parser.parse_args()
    if options.oldest:
        print(oldest_torch())
        raise SystemExit
    versions = ["lowest"] if options.lowest else options.torch
    rows, passed = [], True
    for python in options.python:
        for torch in versions:
            environment = options.folder / f"{Path(python).name}-torch-{torch}"
            cells, right = check(environment, python, torch)
            rows.append(cells)
            passed &= right
    print("| Python | torch | smoke | passed | failed | skipped | install |")
    print("|---|---|---|---|---|---|---|")
    for cells in rows:
        print(f"| {' | '.join(cells)} |")
    raise SystemExit(not passed)


if __name__ == "__main__":
    main()
