"""What a run is: stored beside its results, and enough to build everything again."""

from __future__ import annotations

import dataclasses
import platform
import shlex
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from vardrop.data import About, Dataset, Preprocessing, load_dataset
from vardrop.data.preprocessing import Task
from vardrop.errors import VardropError
from vardrop.files import read_json, write_json
from vardrop.recipes import Recipe
from vardrop.training import Settings
from vardrop.values import from_json, to_json

VERSION = 1
# How a user starts what Python sees as a file of this package.
_PROGRAMS = {"cli/__main__.py": ["vardrop"], "vardrop/demo.py": ["vardrop", "demo"]}
FILES = (
    "config.json", "history.jsonl", "checkpoint.safetensors", "checkpoint.json",
    "best.safetensors", "preprocessing.json", "results.json", "arrays.safetensors",
    "small.safetensors", "report.html",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Data:
    """Which data: the arguments of `load_dataset`, but for the seed."""

    name: str
    target: str | None = None
    task: Task | None = None
    drop: tuple[str, ...] = ()
    directory: str | None = None

    def load(self, seed: int) -> Dataset:
        """The data themselves."""
        return load_dataset(self.name, self.target, self.task, self.drop, self.directory, seed)


@dataclasses.dataclass(frozen=True)
class Config:
    """What a run is: data, net, method, settings."""

    data: Data
    about: About
    net: str
    own_net: bool
    method: Recipe | None
    where: str | None
    exclude: str | None
    settings: Settings
    command: str = ""

    def write(self, directory: Path) -> None:
        """Store it, with the command, the versions and what the net has to know of the data."""
        about = self.about
        stored = {
            "version": VERSION,
            "command": " && ".join(filter(None, (self.command, command(sys.argv)))),
            "net": self.net,
            "own_net": self.own_net,
            "method": None if self.method is None else to_json(self.method),
            "where": self.where,
            "exclude": self.exclude,
            "seed": self.settings.seed,
            "data": {**dataclasses.asdict(self.data), "task": about.task},
            "kind": about.kind,
            "shape": about.shape,
            "classes": about.classes,
            "sizes": about.sizes,
            "checksum": about.checksum,
            "settings": self.settings.to_json(),
            "versions": versions(),
        }
        if about.preprocessing is not None:  # first, for what has a config.json can be resumed
            write_json(directory / "preprocessing.json", about.preprocessing.to_json())
        write_json(directory / "config.json", stored)

    @classmethod
    def read(cls, directory: Path) -> Config:
        """The configuration of a run."""
        stored = read_json(directory / "config.json")
        try:
            if stored["version"] != VERSION:
                raise VardropError(
                    f"Expected a run of version {VERSION} in {directory}, but got "
                    f"{stored['version']!r}."
                )
            return cls._from_json(stored, directory)
        except (KeyError, TypeError) as broken:
            raise VardropError(
                f"Expected {directory / 'config.json'} to describe a run, but got a file without "
                f"{broken}. It is damaged."
            ) from broken

    @classmethod
    def _from_json(cls, stored: dict[str, Any], directory: Path) -> Config:
        data, method = stored["data"], stored["method"]
        recipe = None if method is None else from_json(method)
        assert isinstance(recipe, Recipe | None)
        return cls(
            Data(**{**data, "drop": tuple(data["drop"])}), _about(stored, directory),
            stored["net"], stored["own_net"], recipe, stored["where"], stored["exclude"],
            Settings.from_json(stored["settings"]), stored["command"],
        )  # fmt: skip


def _about(stored: dict[str, Any], directory: Path) -> About:
    path = directory / "preprocessing.json"
    table = stored["kind"] == "table"
    return About(
        stored["data"]["name"], stored["kind"], stored["data"]["task"], tuple(stored["shape"]),
        tuple(stored["classes"]), stored["sizes"], stored["checksum"],
        Preprocessing.from_json(read_json(path)) if table else None,
    )  # fmt: skip


def command(arguments: Sequence[str]) -> str:
    """What was typed, from the arguments that Python was started with.

    >>> command(["/usr/lib/vardrop/cli/__main__.py", "fit", "digits"])
    'vardrop fit digits'
    """
    program = Path(arguments[0])
    if program.name in ("", "-c") or "ipykernel" in program.name:
        return "Python"
    own = ["python", program.name] if program.suffix == ".py" else [program.name]
    return shlex.join([*_PROGRAMS.get("/".join(program.parts[-2:]), own), *arguments[1:]])


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that numbers depend on."""
    found = {"python": platform.python_version()}
    for name in ("vardrop", "torch", "numpy", "scikit-learn", "pandas"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def free_directory(name: str) -> Path:
    """The first directory runs/<name>-<number> that does not exist."""
    stem, number = Path(name).stem, 1
    while (path := Path("runs") / f"{stem}-{number}").exists():
        number += 1
    return path


def prepare(directory: Path, force: bool) -> None:
    """Make the directory of a new run; one that holds anything is kept, unless forced."""
    if directory.exists() and not directory.is_dir():
        raise VardropError(f"Expected {directory} to be a directory, but it is a file.")
    if directory.is_dir() and any(directory.iterdir()) and not force:
        raise VardropError(
            f"Expected {directory} to be free for a new run, but it holds files. Go on with it by "
            "--resume, overwrite it by --force, or choose another directory."
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            (directory / name).unlink(missing_ok=True)
    except OSError as failure:
        raise VardropError(
            f"Expected to make the directory {directory}, but got: {failure.strerror}."
        ) from failure
