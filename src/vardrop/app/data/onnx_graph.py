"""The preprocessing of a table as an ONNX graph in front of a net: raw rows in, answers out."""

from __future__ import annotations

import json
import math
from functools import singledispatch
from typing import TYPE_CHECKING, Any

from vardrop._core.errors import VardropError, needed
from vardrop.app.data.parsing import MISSING
from vardrop.app.data.preprocessing import (
    Category,
    Column,
    Date,
    ManyCategories,
    Number,
    Preprocessing,
)

if TYPE_CHECKING:
    import onnx

_NET = "net/"  # before all names of the net's own graph, so that a column may have any name
_TEXTS = 20  # the version of ONNX's operators that divides texts
_LABELS = 3  # that of ai.onnx.ml, whose LabelEncoder looks up texts
_DAYS_TO_2000 = 730426  # of the years from 0 on, counted from the first of March
_ISO = r"\s*\d{4}-\d{1,2}-\d{1,2}([T ]\d{1,2}:\d{2}(:\d{2}(\.\d+)?)?)?\s*"
_ABSENT = sorted({f(m) for m in (*MISSING, "NaT", "NaN", "<NA>") for f in (str, str.upper)})


def with_preprocessing(model: onnx.ModelProto, found: Preprocessing) -> onnx.ModelProto:
    """A graph that takes the raw columns of a table in the place of its first input.

    Every column that the net uses is an input of its own under its own name, with one value per
    row: numbers in double precision (NaN where one is missing), texts for categories (a new or
    empty one is none) and for dates (`2020-01-31`, `2020-01-31 12:30:00` or with a T; empty where
    one is missing). Other inputs and outputs stay; one that is called as a column gets an
    underscore after its name.

    Args:
        model: any graph whose first input has the shape (batch, features) and type float.
        found: the preprocessing of the rows that its net was trained on.

    Returns:
        The new graph; its metadata have `columns`, the kind of each, and `target`, `task` and
        `classes`.
    """
    onnx = needed("onnx", "compress")
    outputs = [value.name for value in model.graph.output]
    others = [value.name for value in model.graph.input][1:]
    inside = onnx.compose.add_prefix(model, _NET)
    if any(isinstance(column, Date) for column in found.columns):
        inside = _upgraded(inside)
    graph = _Graph(onnx)
    parts = [graph.input(column) for column in found.columns]
    first = inside.graph.input[0]
    _check_width(first, found)
    graph.add("Concat", parts, out=first.name, axis=1)
    taken = {column.name for column in found.columns}
    for value, name in zip(list(inside.graph.input)[1:], others, strict=True):
        own = name if name not in taken else f"{name}_"
        graph.inputs.append(graph.called(value, own))
        graph.add("Identity", [own], out=value.name)
    for value, name in zip(inside.graph.output, outputs, strict=True):
        graph.last(value, name if name not in taken else f"{name}_")
    nodes = [*graph.nodes, *inside.graph.node, *graph.after]
    made = onnx.helper.make_graph(
        nodes,
        "raw rows",
        graph.inputs,
        graph.outputs,
        [*graph.constants, *inside.graph.initializer],
        value_info=inside.graph.value_info,
    )
    return _whole(onnx, inside, made, found)


def _whole(
    onnx: Any, inside: onnx.ModelProto, graph: onnx.GraphProto, found: Preprocessing
) -> onnx.ModelProto:
    """The model around a graph, with what a reader has to know of it."""
    versions = {o.domain: o.version for o in inside.opset_import}
    versions["ai.onnx.ml"] = max(_LABELS, versions.get("ai.onnx.ml", 0))
    made = onnx.helper.make_model(
        graph,
        producer_name="vardrop",
        opset_imports=[onnx.helper.make_opsetid(*pair) for pair in versions.items()],
        ir_version=inside.ir_version,
        functions=inside.functions,
    )
    kinds = {c.name: type(c).__name__ for c in found.columns}
    own = {
        "columns": json.dumps(kinds, ensure_ascii=False),
        "target": found.target,
        "task": found.task,
        "classes": json.dumps(found.classes, ensure_ascii=False),
    }
    onnx.helper.set_model_props(made, {**{p.key: p.value for p in inside.metadata_props}, **own})
    onnx.checker.check_model(made)
    return made


def _upgraded(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same with operators new enough to divide texts."""
    onnx = needed("onnx.version_converter", "compress")
    own = next(o.version for o in model.opset_import if o.domain in ("", "ai.onnx"))
    return model if own >= _TEXTS else onnx.convert_version(model, _TEXTS)


def _check_width(first: onnx.ValueInfoProto, found: Preprocessing) -> None:
    sizes = [d.dim_value for d in first.type.tensor_type.shape.dim]
    if len(sizes) != 2 or sizes[1] not in (0, found.features):
        raise VardropError(
            f"Expected a graph whose first input has the shape (batch, {found.features}), as this "
            f"preprocessing makes it, but got '{first.name.removeprefix(_NET)}' with {sizes}."
        )


class _Graph:
    """Nodes, inputs, outputs and constants as they are made; names are numbers."""

    def __init__(self, onnx: Any) -> None:
        self.onnx, self.about = onnx, "rows"  # what the nodes are for, which errors show
        self.inputs: list[Any] = []
        self.outputs: list[Any] = []
        self.nodes: list[Any] = []
        self.after: list[Any] = []
        self.constants: list[Any] = []

    def add(self, kind: str, names: list[str], out: str | None = None, **more: Any) -> str:
        """One operation; the name of its result."""
        name = out or f"raw/{len(self.nodes)}"
        self._node(kind, names, [name], **more)
        return name

    def divide(self, name: str, mark: str) -> str:
        """Texts divided at a mark, (batch, parts); at blanks where it is empty."""
        divided, number = (f"raw/{len(self.nodes)} {i}" for i in range(2))
        self._node("StringSplit", [name], [divided, number], delimiter=mark)
        return divided

    def _node(self, kind: str, names: list[str], made: list[str], **more: Any) -> None:
        label = f"{self.about} ({len(self.nodes)})"
        self.nodes.append(self.onnx.helper.make_node(kind, names, made, name=label, **more))

    def constant(self, values: Any, kind: str) -> str:
        """The name of a constant of type int64, double, float or object (texts)."""
        numpy = needed("numpy")
        name = f"raw/constant {len(self.constants)}"
        array = numpy.array(values, dtype=kind)
        self.constants.append(self.onnx.numpy_helper.from_array(array, name))
        return name

    def input(self, column: Column) -> str:
        """An input for a column, and the name of its columns of the tensor, (batch, width)."""
        proto = self.onnx.TensorProto
        kind = proto.DOUBLE if isinstance(column, Number) else proto.STRING
        made = self.onnx.helper.make_tensor_value_info(column.name, kind, ["batch"])
        self.inputs.append(made)
        self.about = f"column '{column.name}'"
        return _columns(column, self)

    def last(self, value: Any, name: str) -> None:
        """An output under its own name."""
        self.after.append(self.onnx.helper.make_node("Identity", [value.name], [name]))
        self.outputs.append(self.called(value, name))

    def called(self, value: Any, name: str) -> Any:
        """The type and shape of an input or output under another name."""
        kept = self.onnx.ValueInfoProto()
        kept.CopyFrom(value)
        kept.name = name
        return kept

    def cast(self, name: str, kind: str) -> str:
        """Another type: FLOAT, DOUBLE, INT64 or BOOL."""
        return self.add("Cast", [name], to=getattr(self.onnx.TensorProto, kind))

    def upright(self, names: list[str]) -> str:
        """Rows of values (batch,), in single precision, as columns (batch, count)."""
        axis = self.constant([1], "int64")
        parts = [self.add("Unsqueeze", [self.cast(name, "FLOAT"), axis]) for name in names]
        return parts[0] if len(parts) == 1 else self.add("Concat", parts, axis=1)

    def label(self, name: str, keys: list[str], values: list[int], default: int) -> str:
        """The numbers of texts."""
        return self.add(
            "LabelEncoder",
            [name],
            domain="ai.onnx.ml",
            keys_strings=keys,
            values_int64s=values,
            default_int64=default,
        )

    def math(self, kind: str, name: str, other: float, type_: str = "double") -> str:
        """An operation with a constant."""
        return self.add(kind, [name, self.constant(other, type_)])


@singledispatch
def _columns(column: Column, graph: _Graph) -> str:
    """The name of what a column becomes, (batch, width) in single precision."""
    raise VardropError(f"Expected a column of a known kind, but got {column!r}.")


@_columns.register
def _(column: Number, graph: _Graph) -> str:
    absent = graph.add("IsNaN", [column.name])
    median = graph.constant(column.median, "double")
    filled = graph.add("Where", [absent, median, column.name])
    scaled = graph.math("Div", graph.math("Sub", filled, column.mean), column.std)
    return graph.upright([scaled, absent] if column.missing else [scaled])


@_columns.register
def _(column: Category, graph: _Graph) -> str:
    keys = list(column.categories)
    codes = graph.label(column.name, keys, list(range(len(keys))), -1)
    upright = graph.add("Unsqueeze", [codes, graph.constant([1], "int64")])
    each = graph.constant([list(range(len(keys)))], "int64")
    return graph.cast(graph.add("Equal", [upright, each]), "FLOAT")


@_columns.register
def _(column: ManyCategories, graph: _Graph) -> str:
    keys = list(column.categories)
    return graph.upright([graph.label(column.name, keys, list(range(1, len(keys) + 1)), 0)])


@_columns.register
def _(column: Date, graph: _Graph) -> str:
    graph.about += ", dates such as 2020-01-31 or 2020-01-31 12:30:00"
    missing = graph.cast(graph.label(column.name, _ABSENT, [1] * len(_ABSENT), 0), "BOOL")
    some, none = (graph.constant(text, "object") for text in ("2000-01-01", "no date"))
    texts = graph.add("Where", [missing, some, column.name])
    known = graph.add("RegexFullMatch", [texts], pattern=_ISO)
    days = _days(graph.add("Where", [known, texts, none]), graph)  # what is no date fails there
    filled = graph.add("Where", [missing, graph.constant(column.mean, "double"), days])
    parts = [graph.math("Div", graph.math("Sub", filled, column.mean), column.std)]
    for period in (365.2425, 7.0, *([1.0] if column.hours else [])):
        angle = graph.math("Mul", filled, 2 * math.pi / period)
        parts += [graph.add(kind, [angle]) for kind in ("Sin", "Cos")]
    return graph.upright([*parts, missing] if column.missing else parts)


def _days(texts: str, graph: _Graph) -> str:
    """Days since the year 2000 of texts such as 2020-01-31, 2020-01-31 12:30, 2020-01-31T12:30:15.

    The date is counted as in "days_from_civil" of Hinnant, "chrono-compatible low-level date
    algorithms": years begin in March, so that the day of a leap year is the last.
    """
    mark = graph.constant(["T 0:0:0"], "object")
    day, time = _parts(graph.add("StringConcat", [texts, mark]), "T", 2, graph)
    blank = graph.constant([" "], "object")
    joined = graph.add("StringConcat", [graph.add("StringConcat", [day, blank]), time])
    day, time = _parts(joined, "", 2, graph)
    year, month, of_month = (graph.cast(p, "INT64") for p in _parts(day, "-", 3, graph))
    early = graph.cast(graph.math("Less", month, 3, "int64"), "INT64")
    years = graph.add("Sub", [year, early])
    months = graph.math("Mod", graph.math("Add", month, 9, "int64"), 12, "int64")
    before = graph.math("Add", graph.math("Mul", months, 153, "int64"), 2, "int64")
    terms = [graph.math("Mul", years, 365, "int64"), graph.math("Div", before, 5, "int64")]
    terms += [graph.math("Div", years, n, "int64") for n in (4, 400)]
    total = graph.add("Sub", [of_month, graph.math("Div", years, 100, "int64")])
    for term in terms:
        total = graph.add("Add", [total, term])
    whole = graph.math("Sub", graph.cast(total, "DOUBLE"), _DAYS_TO_2000)
    clock = graph.add("StringConcat", [time, graph.constant([":0:0"], "object")])
    for part, seconds in zip(_parts(clock, ":", 3, graph), (3600, 60, 1), strict=True):
        share = graph.math("Div", graph.cast(part, "DOUBLE"), 86400 / seconds)
        whole = graph.add("Add", [whole, share])
    return whole


def _parts(texts: str, mark: str, count: int, graph: _Graph) -> list[str]:
    """The first so many parts of texts, divided at a mark; at blanks where it is empty."""
    divided = graph.divide(texts, mark)
    return [
        graph.add("Gather", [divided, graph.constant(i, "int64")], axis=1) for i in range(count)
    ]
