"""Build the wheel and the source distribution, check them, and use the wheel in new environments.

    python tests/distribution.py                    # or make dist
    python tests/distribution.py --torch torch==2.13.0 --extras "" app

The tools, and the wheel without extras and with each extra, have their own environments under
build/distribution. An environment of the wheel is deleted when its checks have passed.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
LARGEST = 1_500_000  # bytes of the source distribution


def make_environment(path, *packages):
    """A new virtual environment with packages; returns its folder of programs and the seconds."""
    start = time.monotonic()
    subprocess.run([sys.executable, "-m", "venv", "--clear", path], check=True)
    pip = [path / "bin" / "python", "-m", "pip"]
    for package in packages:
        subprocess.run([*pip, "install", "--quiet", package], check=True)
    subprocess.run([*pip, "check"], check=True)
    return path / "bin", time.monotonic() - start


def use(path, torch, wheel, extra):
    """Install the wheel, run the smoke script and the demo outside of the clone; return the row."""
    programs, seconds = make_environment(path, torch, f"{wheel}[{extra}]" if extra else wheel)
    settings = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    settings["OMP_NUM_THREADS"] = "1"  # the machine may be busy
    commands = [[programs / "python", ROOT / "tests" / "smoke.py"]]
    if extra == "app":
        commands.append([programs / "python", "-m", "vardrop", "--version"])
        commands.append([programs / "vardrop", "demo"])
    with tempfile.TemporaryDirectory() as elsewhere:
        outputs = [
            subprocess.run(
                command, cwd=elsewhere, env=settings, check=True, text=True, stdout=subprocess.PIPE
            ).stdout
            for command in commands
        ]
    print(*outputs, sep="\n", flush=True)
    listed = subprocess.run([programs / "pip", "list"], check=True, text=True, capture_output=True)
    packages = len(listed.stdout.splitlines()) - 2
    shutil.rmtree(path)
    steps = (outputs[0].count(": ok"), outputs[0].count(": skipped"))
    demo = "passed" if extra == "app" else "-"
    return [extra or "none", str(packages), *map(str, steps), demo, f"{seconds:.0f} s"]


def main():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--torch", default="torch", help="what to install, such as torch==2.10")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "distribution")
    parser.add_argument("--extras", nargs="*", default=["", *project["optional-dependencies"]])
    options = parser.parse_args()
    folder = options.folder.resolve()
    tools, _ = make_environment(folder / "tools", "build", "twine")
    with tempfile.TemporaryDirectory() as name:
        subprocess.run([tools / "python", "-m", "build", "--outdir", name, ROOT], check=True)
        files = sorted(Path(name).iterdir())
        subprocess.run([tools / "python", "-m", "twine", "check", "--strict", *files], check=True)
        for file in files:
            print(f"{file.name}: {file.stat().st_size:,} bytes")
        (wheel,) = (file for file in files if file.suffix == ".whl")
        (source,) = (file for file in files if file.suffix == ".gz")
        assert source.stat().st_size < LARGEST, "the source distribution is too large"
        names = {extra: folder / f"wheel-{extra or 'none'}" for extra in options.extras}
        rows = [use(path, options.torch, wheel, extra) for extra, path in names.items()]
    shutil.rmtree(folder)
    print("| extra | packages | steps passed | steps skipped | demo | install |")
    print("|---|--:|--:|--:|---|--:|")
    for row in rows:
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
