"""The configuration of a run, which is enough to build everything again."""

from __future__ import annotations

import dataclasses
import platform
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from vardrop._core import files
from vardrop._core.checks import check_type
from vardrop._core.errors import VardropError
from vardrop._core.values import from_json, to_json
from vardrop.app.data import About, Dataset, Preprocessing, Roles, load_dataset
from vardrop.app.runs.settings import Settings
from vardrop.app.store import (
    BEST,
    CHECKPOINT,
    HISTORY,
    STANDING,
    make_directory,
    read_sealed,
    reading,
)
from vardrop.recipes import BaseRecipe

VERSION = 1
# How a user starts what Python sees as a file of this package.
_PROGRAMS = {"vardrop/__main__.py": ["vardrop"]}
TRIALS = "trials"  # the directory of trainings that only serve to choose
# What says something of the best net, and goes when that changes.
ABOUT_BEST = ("results.json", "arrays.safetensors", "small.safetensors", "small.vdp")
_OWN = "config.json", "preprocessing.json", "choice.safetensors", "report.html"
FILES = (*_OWN, *ABOUT_BEST, BEST, CHECKPOINT, HISTORY, STANDING)
_PLAIN = "net", "own_net", "where", "exclude"
_ABOUT = "name", "kind", "task", "shape", "classes", "sizes", "checksum", "rows"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data(Roles):
    """Which data: the arguments of `load_dataset`, except for the seed.

    `given` is true if they, or parts of them, were passed in memory. Then they have to be passed
    again.
    """

    name: str
    directory: str | None = None
    validation: str | None = None
    test: str | bool | None = None
    given: bool = False

    def load(self, seed: int) -> Dataset:
        """The data themselves."""
        if self.given:
            raise VardropError(
                f"Expected the data of the run, because they were passed in memory ({self.name}), "
                "but got none. Pass `data`, as to `fit`."
            )
        return self.read(self.name, self.validation, self.test, seed)

    def read(self, data: Any, validation: Any, test: Any, seed: int) -> Dataset:
        """Data in memory, in the parts and roles of these."""
        options = {f.name: getattr(self, f.name) for f in dataclasses.fields(Roles)}
        options |= {"directory": self.directory, "validation": validation, "test": test}
        return load_dataset(data, seed=seed, **options)


@dataclasses.dataclass(frozen=True)
class Config:
    """What a run is: data, net, method, settings."""

    data: Data
    about: About
    net: str
    own_net: bool
    method: BaseRecipe | None
    where: str | None
    exclude: str | None
    settings: Settings
    command: str = ""

    @property
    def outputs(self) -> int:
        """How many outputs the net needs."""
        return self.about.outputs * (2 if self.settings.heteroscedastic else 1)

    @property
    def units(self) -> tuple[float, float]:
        """Mean and deviation by which a target of numbers was scaled; 0 and 1 for classes."""
        columns = self.about.preprocessing
        if columns is None or self.about.task == "classification":
            return 0.0, 1.0
        return columns.target_mean, columns.target_std

    def to_json(self) -> dict[str, Any]:
        """With the command and the versions; without the preprocessing, which has its own file."""
        about = self.about
        return {
            "version": VERSION,
            "command": " && ".join(filter(None, (self.command, command(sys.argv)))),
            "versions": versions(),
            "seed": self.settings.seed,
            "method": None if self.method is None else to_json(self.method),
            "data": {**dataclasses.asdict(self.data), "task": about.task},
            "settings": dataclasses.asdict(self.settings),
            **{name: getattr(self, name) for name in _PLAIN},
            **{name: getattr(about, name) for name in _ABOUT},
        }

    def write(self, directory: Path) -> None:
        """Store it, with what the net has to know of the data."""
        columns = self.about.preprocessing
        if columns is not None:  # first, for what has a config.json can be resumed
            files.write_json(
                directory / "preprocessing.json", files.with_checksum(columns.to_json())
            )
        files.write_json(directory / "config.json", files.with_checksum(self.to_json()))

    @classmethod
    def read(cls, directory: Path) -> Config:
        """The configuration of a run."""
        stored = read_sealed(directory / "config.json")
        table = stored.get("kind") == "table"
        columns = read_sealed(directory / "preprocessing.json") if table else None
        return cls.from_json(stored, columns, f"{directory} (config.json and preprocessing.json)")

    @classmethod
    def from_json(
        cls, stored: dict[str, Any], preprocessing: dict[str, Any] | None, source: str
    ) -> Config:
        """The configuration that `to_json` described; an error names `source`."""
        if stored.get("version") != VERSION:
            raise VardropError(
                f"Expected a run of version {VERSION} in {source}, but got "
                f"{stored.get('version')!r}. Train it again."
            )
        with reading(source, "the description of a run"):
            columns = None if preprocessing is None else Preprocessing.from_json(preprocessing)
            method = None if stored["method"] is None else from_json(stored["method"])
            check_type("method", method, BaseRecipe | None, "a recipe, or null")
            about = {name: stored[name] for name in _ABOUT} | {"preprocessing": columns}
            about |= {name: tuple(stored[name]) for name in ("shape", "classes")}
            learned = columns and ((columns.features,), columns.classes)
            if learned is not None and learned != (about["shape"], about["classes"]):
                raise VardropError("Expected the shape and the classes of the preprocessing.")
            data = _check_names(Data, stored["data"])
            return cls(
                data=Data(**{**data, "drop": tuple(data["drop"])}),
                about=About(**about),
                method=method,  # type: ignore[arg-type]
                settings=Settings.from_json(_check_names(Settings, stored["settings"])),
                command=stored["command"],
                **{name: stored[name] for name in _PLAIN},
            )


def _check_names(kind: type[Any], stored: dict[str, Any]) -> dict[str, Any]:
    """The fields of a dataclass, if none is missing and none is unknown."""
    if wrong := sorted({f.name for f in dataclasses.fields(kind)} ^ set(stored)):
        text = f"Expected the fields of {kind.__name__}, each of them"
        raise VardropError(f"{text}, but {wrong} are missing or unknown.")
    return stored


def command(arguments: Sequence[str]) -> str:
    """What was typed, from the arguments that Python was started with.

    >>> command(["/usr/lib/vardrop/__main__.py", "fit", "digits"])
    'vardrop fit digits'
    """
    program = Path(arguments[0])
    if program.name in ("", "-c") or "ipykernel" in program.name:
        return "Python"
    name = ["python", program.name] if program.suffix == ".py" else [program.name]
    return shlex.join([*_PROGRAMS.get("/".join(program.parts[-2:]), name), *arguments[1:]])


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that numbers depend on."""
    numbers = {"python": platform.python_version()}
    for name in ("vardrop", "torch", "numpy", "scikit-learn", "pandas"):
        with suppress(PackageNotFoundError):
            numbers[name] = version(name)
    return numbers


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
    if directory.is_dir() and any(p.name != files.LOCK for p in directory.iterdir()) and not force:
        raise VardropError(
            f"Expected {directory} to be free for a new run, but it holds files. Go on with it by "
            "--resume, overwrite it by --force, or choose another directory."
        )
    make_directory(directory)


@contextmanager
def working(directory: Path) -> Iterator[None]:
    """Have the directory of a run to oneself, without what killed writes left there."""
    with files.lock_directory(directory):
        files.remove_leftovers(directory)
        yield


@contextmanager
def new_directory(directory: Path, force: bool) -> Iterator[None]:
    """Have a directory to oneself for a new run, without the files of an earlier one."""
    prepare(directory, force)
    with working(directory):
        prepare(directory, force)  # by now nobody else can write there
        for name in FILES:
            files.remove(directory / name)
        shutil.rmtree(directory / TRIALS, ignore_errors=True)
        yield


def check_output(path: Path, run: Path, *inputs: str | Path) -> None:
    """Refuse a file to write that is a file of the run, or one that is read."""
    files.check_not_in_use(
        path, [*(run / name for name in (*FILES, files.LOCK)), *map(Path, inputs)]
    )
