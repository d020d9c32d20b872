"""The configuration of a run, from which its data and its model can be built again."""

from __future__ import annotations

import dataclasses
import platform
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from vardrop._core import files
from vardrop._core.checks import check_type
from vardrop._core.errors import VardropError
from vardrop._core.values import from_json, to_json
from vardrop.app import store
from vardrop.app.data import About, Dataset, Preprocessing, Roles, load_dataset
from vardrop.app.runs.settings import Settings
from vardrop.app.store import Record
from vardrop.recipes import BaseRecipe

if TYPE_CHECKING:
    from vardrop.app.data.inputs import Source

VERSION = 1
TRIALS = "trials"  # the directory of trainings that only serve to choose
# Files about the best model, which are removed when it changes.
ABOUT_BEST = ("results.json", "arrays.safetensors", "small.safetensors", "small.vdp")
_OTHERS = "config.json", "preprocessing.json", "choice.safetensors", "report.html"
FILES = (*_OTHERS, *ABOUT_BEST, store.BEST, store.CHECKPOINT, store.HISTORY, store.PROGRESS)
_PLAIN = "net", "own_net", "include", "exclude"
_ABOUT = "name", "kind", "task", "shape", "classes", "sizes", "checksum", "rows"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data(Roles):
    """The arguments of `load_dataset`, except for the seed.

    `in_memory` is true if the data, or parts of them, were passed in memory. Then they have to be
    passed again.
    """

    name: str
    directory: str | None = None
    validation: str | None = None
    test: str | bool | None = None
    in_memory: bool = False

    def read(
        self, data: Source, validation: Source | None, test: Source | bool | None, seed: int
    ) -> Dataset:
        """Load data with these options."""
        options = {f.name: getattr(self, f.name) for f in dataclasses.fields(Roles)}
        options |= {"directory": self.directory, "validation": validation, "test": test}
        return load_dataset(data, seed=seed, **options)


@dataclasses.dataclass(frozen=True)
class Config:
    """The configuration of a run: data, model, method and settings."""

    data: Data
    about: About
    net: str
    own_net: bool
    method: BaseRecipe | None
    include: str | None
    exclude: str | None
    settings: Settings
    command: str = ""

    @property
    def units(self) -> tuple[float, float]:
        """Mean and standard deviation of a numeric target; 0 and 1 for classes."""
        columns = self.about.preprocessing
        return (0.0, 1.0) if columns is None else (columns.target_mean, columns.target_std)

    def load_data(
        self,
        path: Path,
        data: Source | None = None,
        validation: Source | None = None,
        test: Source | bool | None = None,
    ) -> Dataset:
        """Load the data of a run, or data that were passed. Changed data raise an error."""
        source = self.data
        if data is None:
            if source.in_memory:
                text = f"The data of the run were passed in memory ({source.name})."
                raise VardropError(f"{text} Pass `data`, as to `fit`.")
            data, validation, test = source.name, source.validation, source.test
        dataset = source.read(data, validation, test, self.settings.seed)
        for name in ("checksum", "kind", "task", "shape", "classes", "sizes", "rows"):
            now, then = getattr(dataset, name), getattr(self.about, name)
            if now != then:
                text = f"The {name} of the data of {path} changed from {then} to {now}."
                raise VardropError(f"{text} Pass the same data, or start a new run.")
        return dataset

    def to_json(self) -> Record:
        """The content of config.json. The preprocessing has a separate file."""
        about, numbers = self.about, {"python": platform.python_version()}
        for package in ("vardrop", "torch", "numpy", "scikit-learn", "pandas"):
            with suppress(metadata.PackageNotFoundError):
                numbers[package] = metadata.version(package)
        return {
            "version": VERSION,
            "command": " && ".join(filter(None, (self.command, command(sys.argv)))),
            "versions": numbers,
            "seed": self.settings.seed,
            "method": None if self.method is None else to_json(self.method),
            "data": {**dataclasses.asdict(self.data), "task": about.task},
            "settings": dataclasses.asdict(self.settings),
            **{name: getattr(self, name) for name in _PLAIN},
            **{name: getattr(about, name) for name in _ABOUT},
        }

    def write(self, directory: Path) -> None:
        """Write config.json and preprocessing.json."""
        if (columns := self.about.preprocessing) is not None:
            # First, because a run with a config.json can be resumed.
            content = files.with_checksum(columns.to_json())
            files.write_json(directory / "preprocessing.json", content)
        files.write_json(directory / "config.json", files.with_checksum(self.to_json()))

    @classmethod
    def read(cls, directory: Path) -> Config:
        """The configuration of a run."""
        stored, columns = store.read_sealed(directory / "config.json"), None
        if stored.get("kind") == "table":
            columns = store.read_sealed(directory / "preprocessing.json")
        return cls.from_json(stored, columns, f"{directory} (config.json and preprocessing.json)")

    @classmethod
    def from_json(cls, stored: Record, preprocessing: Record | None, source: str) -> Config:
        """The configuration that `to_json` described. Errors name `source`."""
        if (version := stored.get("version")) != VERSION:
            text = f"Expected a run of version {VERSION} in {source}, but got {version!r}."
            raise VardropError(f"{text} Train it again.")
        with store.reading(source, "the description of a run"):
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


def _check_names(kind: type[Data | Settings], stored: Record) -> Record:
    """Return the fields of a dataclass, or raise an error if one is missing or unknown."""
    if wrong := sorted({f.name for f in dataclasses.fields(kind)} ^ set(stored)):
        raise VardropError(f"The fields {wrong} of {kind.__name__} are missing or unknown.")
    return stored


def command(arguments: Sequence[str]) -> str:
    """The command that was typed, from the arguments of Python.

    >>> command(["/usr/lib/vardrop/__main__.py", "fit", "digits"])
    'vardrop fit digits'
    """
    program = Path(arguments[0])
    if program.name in ("", "-c") or "ipykernel" in program.name:
        return "Python"
    if program.parts[-2:] == ("vardrop", "__main__.py"):
        program = Path("vardrop")
    python = ["python"] if program.suffix == ".py" else []
    return shlex.join([*python, program.name, *arguments[1:]])


def free_directory(name: str) -> Path:
    """The first directory runs/<name>-<number> that does not exist."""
    stem, number = Path(name).stem, 1
    while (path := Path("runs") / f"{stem}-{number}").exists():
        number += 1
    return path


def prepare(directory: Path, force: bool) -> None:
    """Make the directory of a new run. One that holds files is an error, unless forced."""
    if directory.exists() and not directory.is_dir():
        raise VardropError(f"Expected {directory} to be a directory, but it is a file.")
    store.make_directory(directory)
    if not force and any(path.name != files.LOCK for path in directory.iterdir()):
        remedy = "Resume with --resume, overwrite with --force, or choose another directory."
        raise VardropError(f"{directory} already holds files. {remedy}")


@contextmanager
def working(directory: Path) -> Iterator[None]:
    """Lock the directory of a run, and remove leftovers of killed writes."""
    with files.lock_directory(directory):
        files.remove_leftovers(directory)
        yield


@contextmanager
def new_directory(directory: Path, force: bool) -> Iterator[None]:
    """Lock a directory for a new run, and remove the files of an earlier one."""
    prepare(directory, force)
    with working(directory):
        prepare(directory, force)  # now that no other process can write there
        for name in FILES:
            files.remove(directory / name)
        shutil.rmtree(directory / TRIALS, ignore_errors=True)
        yield


def check_output(path: Path, run: Path, *inputs: str | Path) -> None:
    """Raise an error if the output is a file of the run, or an input."""
    stored = (run / name for name in (*FILES, files.LOCK))
    files.check_not_in_use(path, [*stored, *map(Path, inputs)])
