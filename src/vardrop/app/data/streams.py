"""Tables that are trained on without being in memory: a sample, held-out rows, and batches."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vardrop._core.checks import check_integer
from vardrop._core.errors import VardropError, needed
from vardrop.app.data.chunks import as_texts, count_rows, inferred, names_of, read_chunks
from vardrop.app.data.preprocessing import Preprocessing, numbers
from vardrop.app.data.splits import Roles
from vardrop.app.data.tables import check_no_gaps, is_table

if TYPE_CHECKING:
    import pandas

SAMPLE = 100_000  # training rows that the preprocessing is learned from
HELD = {"test": (0.2, 50_000), "validation": (0.1, 20_000)}  # the fraction, and about how many
BUFFER = 100_000  # rows among which batches are shuffled
_LABELS = 50  # the first different targets, of which one row each is held: the most classes
_PIECE = 1 << 20


@dataclass(frozen=True, eq=False)
class Stream:
    """Data that are trained on piece by piece, so that they may be larger than memory.

    Of files about a tenth of the rows (20 000 at most) is held out for validation and a fifth
    (50 000 at most) for the test, by a hash of their numbers; they and a sample of 100 000 other
    rows, which the preprocessing is learned from, are held in memory. All other rows are read in
    every epoch, and shuffled in a buffer of 100 000: a file that is sorted should be shuffled once
    before.

    A loader is trained on as it is, after its first 100 000 rows were looked at; `fit` has to be
    given `validation`, and `test` or test=False.

    Args:
        source: a CSV or Parquet file, or several with the same columns; or a `DataLoader` of (x, y)
            or (x, y, weight).
        rows: how many examples a loader gives in an epoch; for one that does not say so.

    >>> import tempfile, pandas, vardrop as vd
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = f"{folder}/big.parquet"
    ...     pandas.DataFrame({"a": range(2000), "y": range(2000)}).to_parquet(path)
    ...     run = vd.fit(vd.Stream(path), target="y", out=f"{folder}/run", epochs=1, beta=0.1)
    >>> run.about.sizes["train"] > 1300
    True
    """

    source: str | Path | Sequence[str | Path] | torch.utils.data.DataLoader[Any]
    rows: int | None = None

    def __post_init__(self) -> None:
        if self.rows is not None:
            check_integer("rows", self.rows)
        files = [p for p in self.paths if isinstance(p, str) and is_table(p)]
        if not self.loads and (not files or len(files) < len(self.paths) or self.rows is not None):
            raise VardropError(
                "Expected a CSV or Parquet file for a Stream, several of them, or a DataLoader, "
                f"for which `rows` is, but got {self.source!r} with rows={self.rows}."
            )

    @property
    def loads(self) -> bool:
        """Whether it is a loader."""
        return isinstance(self.source, torch.utils.data.DataLoader)

    @property
    def paths(self) -> tuple[Any, ...]:
        """The files, by their full names; none of a loader."""
        given: Any = self.source
        if self.loads:
            return ()
        several = given if isinstance(given, tuple | list) else (given,)
        return tuple(str(Path(p).resolve()) if isinstance(p, str | Path) else p for p in several)

    @property
    def name(self) -> str:
        """The first file, and how many more there are; the type of a loader."""
        if self.loads:
            return type(self.source).__name__
        more = len(self.paths) - 1
        return str(self.paths[0]) + (f" and {more} more" if more else "")


def check_streamed(roles: Roles) -> None:
    """Refuse what only a table in memory can do."""
    for role in ("split", "group", "time"):
        if (column := getattr(roles, role)) is not None:
            raise VardropError(
                f"Expected no `{role}` for a Stream, whose rows are parted one by one, but got "
                f"{column!r}. Write the parts into files of their own, and pass `validation` and "
                "`test`."
            )


@dataclass(frozen=True)
class Parting:
    """Which rows are held out, and which are in the sample, by a hash of their numbers."""

    seed: int
    test: float
    validation: float
    sample: float

    @classmethod
    def of(cls, rows: int, seed: int, given: Iterable[str]) -> Parting:
        """That of so many rows; parts that are given are not held out."""
        held = {
            part: 0.0 if part in given else min(fraction, most / rows)
            for part, (fraction, most) in HELD.items()
        }
        left = rows * (1 - sum(held.values()))
        return cls(seed, held["test"], held["validation"], min(1.0, SAMPLE / left))

    def parts(self, begin: int, count: int) -> Any:
        """Of rows from a number on: 0 for test, 1 for validation, 2 for training."""
        place = _uniform(begin, count, 2 * self.seed)
        return needed("numpy").digitize(place, (self.test, self.test + self.validation))

    def sampled(self, begin: int, count: int) -> Any:
        """Which of them are in the sample, if they are trained on."""
        return _uniform(begin, count, 2 * self.seed + 1) < self.sample


def _uniform(begin: int, count: int, seed: int) -> Any:
    """A number in [0, 1) for each row: the mixing function of SplitMix64 (Steele et al. 2014)."""
    numpy = needed("numpy")
    golden = 0x9E3779B97F4A7C15
    start = (begin + (2 * seed + 1) * 0xD1342543DE82EF95) % 2**64
    with numpy.errstate(over="ignore"):
        z = (numpy.arange(count, dtype="uint64") + numpy.uint64(start)) * numpy.uint64(golden)
        z = (z ^ (z >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
        z = z ^ (z >> numpy.uint64(31))
    return (z >> numpy.uint64(11)).astype("float64") / 2.0**53


@dataclass(frozen=True, eq=False)
class Files:
    """The files of a stream with the number of the first row of each, and who is in which part."""

    paths: tuple[str, ...]
    begins: tuple[int, ...]
    rows: int
    parting: Parting

    @classmethod
    def of(cls, stream: Stream, seed: int, given: Iterable[str]) -> Files:
        """Look how many rows there are."""
        names = names_of(Path(stream.paths[0]))
        begins = [0]
        for path in stream.paths:
            if absent := sorted(set(names) - set(names_of(Path(path)))):
                raise VardropError(
                    f"Expected {path} to have the columns of {stream.paths[0]}, but got none named "
                    f"{', '.join(map(repr, absent))}."
                )
            begins.append(begins[-1] + count_rows(Path(path), names[0]))
        rows = begins[-1]
        return cls(stream.paths, tuple(begins[:-1]), rows, Parting.of(rows, seed, given))

    def checksum(self) -> str:
        """SHA-256 of the bytes of all files."""
        digest = hashlib.sha256()
        for path in self.paths:
            with open(path, "rb") as file:
                while piece := file.read(_PIECE):
                    digest.update(piece)
        return f"sha256:{digest.hexdigest()}"

    @cached_property
    def counts(self) -> dict[str, int]:
        """How many rows each part has."""
        total = [0, 0, 0]
        for begin in range(0, self.rows, _PIECE):
            count = min(_PIECE, self.rows - begin)
            found = needed("numpy").bincount(self.parting.parts(begin, count), minlength=3)
            total = [a + int(b) for a, b in zip(total, found, strict=True)]
        return dict(zip(("test", "validation", "train"), total, strict=True))

    def gathered(self, target: str | None) -> tuple[pandas.DataFrame, list[str]]:
        """The rows that are held in memory, and the part of each.

        They are those that are held out, the sample, and one row at least of every class.
        """
        frames: list[pandas.DataFrame] = []
        parts: list[str] = []
        seen: set[Any] = set()
        for path, begin in zip(self.paths, self.begins, strict=True):
            for piece in read_chunks(path, texts=names_of(Path(path))):
                chosen, own = self._chosen(piece, begin, target, seen, path)
                frames.append(piece[chosen].set_axis(piece.index[chosen] + begin, axis=0))
                parts += own
        return inferred(needed("pandas").concat(frames), self.paths[0]), parts

    def _chosen(
        self, piece: pandas.DataFrame, begin: int, target: str | None, seen: set[Any], path: str
    ) -> tuple[Any, list[str]]:
        first = begin + int(piece.index[0])
        part = self.parting.parts(first, len(piece))
        chosen = (part < 2) | self.parting.sampled(first, len(piece))
        if target in piece.columns:
            values = piece[target]
            check_no_gaps(values, str(target), path)
            once = values[~values.duplicated()]
            for row, value in once.items():
                if len(seen) < _LABELS and value not in seen:
                    seen.add(value)
                    chosen[row - piece.index[0]] = True
        names = ("test", "validation", "train")
        return chosen, [names[i] for i in part[chosen]]


@dataclass(frozen=True, eq=False)
class FileFeed:
    """The training rows of files: an iterable of batches, shuffled by torch's generator.

    Args:
        files: with the rows that are held out.
        found: the preprocessing.
        weight: the column of weights, if any.
        factors: what the rows of each class count besides.
        size: rows per batch.
    """

    files: Files
    found: Preprocessing
    weight: str | None = None
    factors: Tensor | None = None
    size: int = 512

    @property
    def rows(self) -> int:
        """How many rows are trained on."""
        return self.files.counts["train"]

    def batched(self, size: int) -> FileFeed:
        """The same in batches of another size."""
        return dataclasses.replace(self, size=size)

    def weighed(self, factors: Tensor) -> FileFeed:
        """The same with factors on the weights by class."""
        return dataclasses.replace(self, factors=factors)

    def __len__(self) -> int:
        return (self.rows + self.size - 1) // self.size

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        generator = torch.Generator().manual_seed(int(torch.randint(2**62, ())))
        return _mixed(self._pieces(generator), self.size, generator)

    def _pieces(self, generator: torch.Generator) -> Iterator[tuple[Tensor, ...]]:
        files, columns = self.files, {c.name for c in self.found.columns} | {self.found.target}
        wanted = columns if self.weight is None else columns | {self.weight}
        for i in torch.randperm(len(files.paths), generator=generator).tolist():
            for piece in read_chunks(files.paths[i], wanted, as_texts(self.found)):
                first = files.begins[i] + int(piece.index[0])
                rows = piece[files.parting.parts(first, len(piece)) == 2]
                if len(rows):
                    yield self._tensors(rows, files.paths[i])

    def _tensors(self, rows: pandas.DataFrame, source: str) -> tuple[Tensor, ...]:
        y = self.found.targets(rows[self.found.target], source)
        parts = (self.found.inputs(rows, source), y)
        if self.weight is None and self.factors is None:
            return parts
        weight = torch.ones(len(y)) if self.weight is None else self._weights(rows, source)
        return (*parts, weight if self.factors is None else weight * self.factors[y])

    def _weights(self, rows: pandas.DataFrame, source: str) -> Tensor:
        found = torch.tensor(numbers(rows[self.weight], source).to_numpy(copy=True)).float()
        if not bool((found >= 0).all()):
            raise VardropError(
                f"Expected weights in column '{self.weight}' of {source} that are at least 0, one "
                "in every row."
            )
        return found


def _mixed(
    pieces: Iterable[tuple[Tensor, ...]], size: int, generator: torch.Generator
) -> Iterator[tuple[Tensor, ...]]:
    """Batches from a buffer: when it is full, a random half of it goes out."""
    held: list[tuple[Tensor, ...]] = []
    for piece in pieces:
        held.append(piece)
        if sum(len(part[0]) for part in held) >= BUFFER:
            together = _shuffled(held, generator)
            out = max(size, len(together[0]) // 2 // size * size)
            yield from _split([t[:out] for t in together], size)
            held = [tuple(t[out:] for t in together)]
    if held:
        yield from _split(_shuffled(held, generator), size)


def _shuffled(held: Sequence[tuple[Tensor, ...]], generator: torch.Generator) -> list[Tensor]:
    order = torch.randperm(sum(len(part[0]) for part in held), generator=generator)
    return [torch.cat(column)[order] for column in zip(*held, strict=True)]


def _split(together: Sequence[Tensor], size: int) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(t.split(size) for t in together), strict=True)
