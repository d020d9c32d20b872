"""Build the wheel and the source distribution, check them, and use the wheel in a new environment.

    python tests/distribution.py                    # or make dist
    python tests/distribution.py --torch torch==2.13.0

The tools and the wheel have their own environments under build/distribution.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
LARGEST = 1_500_000  # bytes of the source distribution


def make_environment(path, *packages):
    """A new virtual environment with packages; returns its folder of programs."""
    start = time.monotonic()
    subprocess.run([sys.executable, "-m", "venv", "--clear", path], check=True)
    pip = [path / "bin" / "python", "-m", "pip"]
    for package in packages:
        subprocess.run([*pip, "install", "--quiet", package], check=True)
    subprocess.run([*pip, "check"], check=True)
    print(f"{path.name}: {' '.join(packages)}, {time.monotonic() - start:.0f} s", flush=True)
    return path / "bin"


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--torch", default="torch", help="the torch to install, such as torch==2.9")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "distribution")
    parser.add_argument("--extras", nargs="*", default=["", "[app]"])
    options = parser.parse_args()
    folder = options.folder.resolve()
    tools = make_environment(folder / "tools", "build", "twine")
    with tempfile.TemporaryDirectory() as name:
        subprocess.run([tools / "python", "-m", "build", "--outdir", name, ROOT], check=True)
        files = sorted(Path(name).iterdir())
        subprocess.run([tools / "python", "-m", "twine", "check", "--strict", *files], check=True)
        for file in files:
            print(f"{file.name}: {file.stat().st_size:,} bytes")
        (wheel,) = (file for file in files if file.suffix == ".whl")
        (source,) = (file for file in files if file.suffix == ".gz")
        assert source.stat().st_size < LARGEST, "the source distribution is too large"
        for extra in options.extras:
            use(folder / f"wheel{extra}", options.torch, f"{wheel}{extra}", "app" in extra)


def use(path, torch, wheel, demo):
    """Install the wheel, and run the smoke script and the demo outside of the clone."""
    programs = make_environment(path, torch, wheel)
    settings = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    with tempfile.TemporaryDirectory() as elsewhere:
        options = {"cwd": elsewhere, "env": settings}
        subprocess.run([programs / "python", ROOT / "tests" / "smoke.py"], **options, check=True)
        if demo:
            subprocess.run(
                [programs / "python", "-m", "vardrop", "--version"], **options, check=True
            )
            subprocess.run([programs / "vardrop", "demo"], **options, check=True)


if __name__ == "__main__":
    main()
