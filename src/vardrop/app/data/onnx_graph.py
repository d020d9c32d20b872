"""The preprocessing of a table as an ONNX graph in front of a model: rows in, predictions out."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from vardrop._core.errors import VardropError, import_optional
from vardrop.app.data.inputs import free_name
from vardrop.app.data.preprocessing import (
    CategoryColumn,
    Column,
    DateColumn,
    Preprocessing,
)

if TYPE_CHECKING:
    import onnx
    from numpy.typing import ArrayLike

_NET = "net/"  # prefix of all names of the model's graph, so that a column may have any name
_LABELS = 3  # the version of ai.onnx.ml with a LabelEncoder for texts


def with_preprocessing(model: onnx.ModelProto, preprocessing: Preprocessing) -> onnx.ModelProto:
    """A graph that takes the raw columns of a table instead of its first input.

    Every column that the model uses is an input with its name and one value per row:

    - numbers in double precision, NaN for a missing one
    - dates in double precision as days since 2000-01-01 (UTC), NaN for a missing one
    - texts for categories. A new or empty text is no category.

    Other inputs and outputs stay. If one has the name of a column, it gets an underscore after its
    name.

    Args:
        model: any graph whose first input has the shape (batch, features) and type float.
        preprocessing: the preprocessing of the training data.

    Returns:
        The new graph. Its metadata have `columns` with the type of each, `target`, `task` and
        `classes`.
    """
    onnx = import_optional("onnx", "compress")
    inside = onnx.compose.add_prefix(model, _NET)
    first, *others = inside.graph.input
    sizes, width = [d.dim_value for d in first.type.tensor_type.shape.dim], preprocessing.features
    if len(sizes) != 2 or sizes[1] not in (0, width):
        shape = f"'{first.name.removeprefix(_NET)}' with {sizes}"
        raise VardropError(f"Expected the first input to be (batch, {width}), but got {shape}.")
    graph = _Graph(onnx)
    parts = [graph.add_column(column) for column in preprocessing.columns]
    graph.add("Concat", *parts, out=first.name, axis=1)
    names = [column.name for column in preprocessing.columns]
    for port in others:
        inner, port.name = port.name, free_name(port.name.removeprefix(_NET), names)
        graph.add("Identity", port.name, out=inner)
    graph.nodes += inside.graph.node
    for port in inside.graph.output:
        inner, port.name = port.name, free_name(port.name.removeprefix(_NET), names)
        graph.add("Identity", inner, out=port.name)
    for field, protos in (("input", [*graph.inputs, *others]), ("node", graph.nodes)):
        inside.graph.ClearField(field)
        getattr(inside.graph, field).extend(protos)
    inside.graph.initializer.extend(graph.constants)
    versions = {"ai.onnx.ml": _LABELS} | {o.domain: o.version for o in inside.opset_import}
    inside.ClearField("opset_import")
    inside.opset_import.extend(onnx.helper.make_opsetid(*pair) for pair in versions.items())
    inside.producer_name = "vardrop"
    kinds = {column.name: type(column).__name__ for column in preprocessing.columns}
    metadata = {
        **{p.key: p.value for p in inside.metadata_props},
        "columns": json.dumps(kinds, ensure_ascii=False),
        "classes": json.dumps(preprocessing.classes, ensure_ascii=False),
        "target": preprocessing.target,
        "task": preprocessing.task,
    }
    onnx.helper.set_model_props(inside, metadata)
    onnx.checker.check_model(inside)
    return inside


class _Graph:
    """Nodes, inputs and constants of the preprocessing. Inner names are numbers."""

    def __init__(self, onnx: Any) -> None:
        self.onnx = onnx
        self.inputs: list[onnx.ValueInfoProto] = []
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []

    def add(self, kind: str, *names: str, out: str | None = None, **attributes: Any) -> str:
        """Add an operation, and return the name of its output."""
        name = out or f"raw/{len(self.nodes)}"
        self.nodes.append(self.onnx.helper.make_node(kind, names, [name], **attributes))
        return name

    def constant(self, numbers: ArrayLike, kind: str = "double") -> str:
        """Add a constant of a numpy type, and return its name."""
        name = f"raw/constant {len(self.constants)}"
        array = import_optional("numpy").array(numbers, dtype=kind)
        self.constants.append(self.onnx.numpy_helper.from_array(array, name))
        return name

    def to_columns(self, *names: str) -> str:
        """Join tensors (batch,) as columns (batch, count) in single precision."""
        float32, axis = self.onnx.TensorProto.FLOAT, self.constant([1], "int64")
        floats = [self.add("Cast", name, to=float32) for name in names]
        return self.add("Concat", *(self.add("Unsqueeze", f, axis) for f in floats), axis=1)

    def add_column(self, column: Column) -> str:
        """Add an input for a column, and return the name of its tensor (batch, width).

        A column of categories is 0 or 1 for each, or for an embedding their numbers from 1 on.
        """
        types, make = self.onnx.TensorProto, self.onnx.helper.make_tensor_value_info
        if isinstance(column, CategoryColumn):
            self.inputs.append(make(column.name, types.STRING, ["batch"]))
            numbers = list(range(len(column.categories)))
            labels: Any = {"keys_strings": column.categories, "values_int64s": numbers}
            codes = self.add("LabelEncoder", column.name, domain="ai.onnx.ml", **labels)
            if column.embedded:  # codes are -1 for other texts
                return self.to_columns(self.add("Add", codes, self.constant(1, "int64")))
            upright = self.add("Unsqueeze", codes, self.constant([1], "int64"))
            equal = self.add("Equal", upright, self.constant([numbers], "int64"))
            return self.add("Cast", equal, to=types.FLOAT)
        self.inputs.append(make(column.name, types.DOUBLE, ["batch"]))
        missing = self.add("IsNaN", column.name)
        fill = self.constant(column.mean if isinstance(column, DateColumn) else column.median)
        filled = self.add("Where", missing, fill, column.name)
        shifted = self.add("Sub", filled, self.constant(column.mean))
        parts = [self.add("Div", shifted, self.constant(column.std))]
        for period in column.periods if isinstance(column, DateColumn) else ():
            angle = self.add("Mul", filled, self.constant(2 * math.pi / period))
            parts += [self.add("Sin", angle), self.add("Cos", angle)]
        return self.to_columns(*[*parts, missing][: column.width])
