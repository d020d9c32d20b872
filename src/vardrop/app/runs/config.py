"""What a run is: stored beside its results, and enough to build everything again."""

from __future__ import annotations

import dataclasses
import platform
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from vardrop._core.checks import check_choice, check_integer, check_type
from vardrop.app.data import About, Dataset, Preprocessing, Roles, load_dataset
from vardrop._core.errors import VardropError
from vardrop._core.files import (
    LOCK,
    check_apart,
    locked,
    read_json,
    remove_leftovers,
    sealed,
    unsealed,
    write_json,
)
from vardrop.recipes import BaseRecipe
from vardrop.app.runs.settings import Settings
from vardrop._core.values import from_json, to_json

# Version 1 has no checksums; up to 2 a run kept its best net on validation data, after a warm-up
# from the first to the fifth tenth of its epochs.
VERSION = 3
# How a user starts what Python sees as a file of this package.
_PROGRAMS = {"cli/__main__.py": ["vardrop"], "app/demo.py": ["vardrop", "demo"]}
FILES = (
    "config.json",
    "history.jsonl",
    "checkpoint.safetensors",
    "checkpoint.json",
    "best.safetensors",
    "preprocessing.json",
    "results.json",
    "arrays.safetensors",
    "small.safetensors",
    "small.vdp",
    "choice.safetensors",
    "report.html",
)
TRIALS = "trials"  # the directory of trainings that only serve to choose
# What says something of the best net, and goes when that changes.
ABOUT_BEST = ("results.json", "arrays.safetensors", "small.safetensors", "small.vdp")


@dataclasses.dataclass(frozen=True)
class Data:
    """Which data: the arguments of `load_dataset`, but for the seed.

    `given` is true where they, or parts of them, were handed over in memory: then they have to be
    handed over again.
    """

    name: str
    roles: Roles = dataclasses.field(default_factory=Roles)
    directory: str | None = None
    validation: str | None = None
    test: str | bool | None = None
    given: bool = False

    def load(self, seed: int) -> Dataset:
        """The data themselves."""
        if self.given:
            raise VardropError(
                f"Expected the data of the run, because they were handed over in memory "
                f"({self.name}), but got none. Pass `data`, as to `fit`."
            )
        return self.read(self.name, self.validation, self.test, seed)

    def read(self, data: Any, validation: Any, test: Any, seed: int) -> Dataset:
        """Data that were handed over, in the parts and roles of these."""
        roles = vars(self.roles)
        return load_dataset(
            data, directory=self.directory, seed=seed, validation=validation, test=test, **roles
        )

    def to_json(self) -> dict[str, Any]:
        """As it is stored: flat."""
        own = {k: v for k, v in vars(self).items() if k != "roles"}
        return {**own, **dataclasses.asdict(self.roles)}

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> Data:
        """What `to_json` described; version 0.1 did not stratify."""
        names = {f.name for f in dataclasses.fields(Roles)}
        roles = {"stratify": False, **{k: v for k, v in stored.items() if k in names}}
        others = {k: v for k, v in stored.items() if k not in names}
        return cls(roles=Roles(**{**roles, "drop": tuple(roles["drop"])}), **others)


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
    version: int = VERSION

    @property
    def outputs(self) -> int:
        """How many outputs the net needs."""
        return self.about.outputs * (2 if self.settings.heteroscedastic else 1)

    @property
    def keeps_best(self) -> bool:
        """Whether the best net on validation data is kept, and not the last one."""
        return self.settings.patience is not None or self.version < 3

    @property
    def checked(self) -> bool:
        """Whether all files of the run carry a checksum, so that one without it is damaged."""
        return self.version >= 2

    def write(self, directory: Path) -> None:
        """Store it, with the command, the versions and what the net has to know of the data."""
        about = self.about
        stored = {
            "version": self.version,
            "command": " && ".join(filter(None, (self.command, command(sys.argv)))),
            "net": self.net,
            "own_net": self.own_net,
            "method": None if self.method is None else to_json(self.method),
            "where": self.where,
            "exclude": self.exclude,
            "seed": self.settings.seed,
            "data": {**self.data.to_json(), "task": about.task},
            "kind": about.kind,
            "shape": about.shape,
            "classes": about.classes,
            "sizes": about.sizes,
            "checksum": about.checksum,
            "settings": self.settings.to_json(),
            "versions": versions(),
        }
        if about.preprocessing is not None:  # first, for what has a config.json can be resumed
            preprocessing = sealed(about.preprocessing.to_json())
            write_json(directory / "preprocessing.json", preprocessing)
        write_json(directory / "config.json", sealed(stored))

    @classmethod
    def read(cls, directory: Path) -> Config:
        """The configuration of a run."""
        path = directory / "config.json"
        found = read_json(path)
        version = found.get("version") if isinstance(found, dict) else 1
        if type(version) is not int or not 1 <= version <= VERSION:
            raise VardropError(
                f"Expected a run of version 1 to {VERSION} in {directory}, but got {version!r}."
            )
        stored = unsealed(found, str(path), required=version >= 2)
        preprocessing = _preprocessing(stored, directory)
        with _describing(path, "a run"):
            return cls._from_json(stored, preprocessing)

    @classmethod
    def _from_json(cls, stored: dict[str, Any], preprocessing: Preprocessing | None) -> Config:
        data, method = stored["data"], stored["method"]
        recipe = None if method is None else from_json(method)
        if not isinstance(recipe, BaseRecipe | None):
            raise VardropError(f"Expected `method` to be a recipe, or null, but got {recipe!r}.")
        for name in ("net", "command"):
            check_type(name, stored[name], str, "a text")
        for name in ("where", "exclude"):
            check_type(name, stored[name], (str, type(None)), "a text, or null")
        check_type("own_net", stored["own_net"], bool, "true or false")
        return cls(
            Data.from_json(data),
            _about(stored, preprocessing),
            stored["net"],
            stored["own_net"],
            recipe,
            stored["where"],
            stored["exclude"],
            _settings(stored),
            stored["command"],
            stored["version"],
        )


def _settings(stored: dict[str, Any]) -> Settings:
    found = Settings.from_json(stored["settings"])
    if stored["version"] > 2:
        return found
    older: dict[str, Any] = {"folds": 1, "compare": False}
    if found.warmup is None and found.epochs is not None:
        older["warmup"] = (0.1 * found.epochs, max(1.0, 0.5 * found.epochs))
    return dataclasses.replace(found, **older)


def _preprocessing(stored: dict[str, Any], directory: Path) -> Preprocessing | None:
    if stored.get("kind") != "table":
        return None
    path = directory / "preprocessing.json"
    content = unsealed(read_json(path), str(path), required=stored["version"] >= 2)
    with _describing(path, "the preprocessing of a table"):
        return Preprocessing.from_json(content)


def _about(stored: dict[str, Any], preprocessing: Preprocessing | None) -> About:
    check_choice("kind", stored["kind"], ("image", "table"))
    check_choice("task", stored["data"]["task"], ("classification", "regression"))
    for name in ("train", "validation", "test"):
        check_integer("sizes", stored["sizes"][name], 0 if name == "test" else 1)
    for size in stored["shape"]:
        check_integer("shape", size)
    for text in (stored["data"]["name"], stored["checksum"], *stored["classes"]):
        check_type("the names of data and classes", text, str, "texts")
    if preprocessing is not None:
        own = [preprocessing.features], list(preprocessing.classes), preprocessing.task
        others = stored["shape"], stored["classes"], stored["data"]["task"]
        if own != others:
            raise VardropError(f"Expected {own}, as in preprocessing.json, but got {others}.")
    return About(
        stored["data"]["name"],
        stored["kind"],
        stored["data"]["task"],
        tuple(stored["shape"]),
        tuple(stored["classes"]),
        stored["sizes"],
        stored["checksum"],
        preprocessing,
    )


@contextmanager
def _describing(path: Path, wanted: str) -> Iterator[None]:
    """What fails inside is told as an error of the file."""
    try:
        yield
    except KeyError as absent:
        raise VardropError(
            f"Expected {path} to describe {wanted}, but got a file without {absent}. It is damaged."
        ) from absent
    except (TypeError, AttributeError, ValueError, RecursionError, OverflowError) as wrong:
        reason = " ".join(str(wrong).split())
        told = reason if isinstance(wrong, VardropError) else f"{type(wrong).__name__}: {reason}."
        raise VardropError(
            f"Expected {path} to describe {wanted}, but got: {told} It is damaged."
        ) from wrong


def command(arguments: Sequence[str]) -> str:
    """What was typed, from the arguments that Python was started with.

    >>> command(["/usr/lib/vardrop/app/cli/__main__.py", "fit", "digits"])
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
    check_free(directory, force)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as failure:
        raise VardropError(
            f"Expected to make the directory {directory}, but got: {failure.strerror}."
        ) from failure


def check_free(directory: Path, force: bool) -> None:
    """Raise where there is something in the way of a new run."""
    if directory.exists() and not directory.is_dir():
        raise VardropError(f"Expected {directory} to be a directory, but it is a file.")
    if directory.is_dir() and any(p.name != LOCK for p in directory.iterdir()) and not force:
        raise VardropError(
            f"Expected {directory} to be free for a new run, but it holds files. Go on with it by "
            "--resume, overwrite it by --force, or choose another directory."
        )


@contextmanager
def working(directory: Path) -> Iterator[None]:
    """Have the directory of a run to oneself, without what killed writes left there."""
    with locked(directory):
        remove_leftovers(directory)
        yield


def check_output(path: Path, run: Path, *inputs: str | Path) -> None:
    """Refuse a file to write that is a file of the run, or one that is read."""
    check_apart(path, [*(run / name for name in (*FILES, LOCK)), *map(Path, inputs)])
