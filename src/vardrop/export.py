"""A model as a file for other runtimes: a `torch.export` program, an AOTInductor package, ONNX.

A shrunken net is plain torch, so int8 quantisation takes it as it is: in onnxruntime
`quantize_dynamic` on the exported file, in torch `torchao.quantization.quantize_` on the net.
"""

from __future__ import annotations

import inspect
import logging
import re
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from vardrop._core.calls import call_arguments
from vardrop._core.checks import check_net
from vardrop._core.errors import VardropError, import_optional
from vardrop._core.files import write_atomically
from vardrop._core.torch_private import tree_map_only
from vardrop.compression.mask import check_means
from vardrop.compression.probes import Inputs, check_runs, to_arguments
from vardrop.compression.save import as_path, to_dense
from vardrop.noisy import evaluating
from vardrop.prediction import Predictor
from vardrop.prediction.graph import Graph, NoiseInput


def _batched(inputs: Inputs) -> Inputs:
    """Inputs with two examples at least: torch.export takes a batch of one for a constant."""
    return tree_map_only(Tensor, lambda t: torch.cat([t, t]) if len(t) == 1 else t, inputs)


def export_program(
    net: nn.Module,
    example_input: Any,
    *,
    outputs: Sequence[str] | None = None,
    noise: NoiseInput = "runtime",
) -> ExportedProgram:
    """The net as a `torch.export` program in evaluation mode, for a batch of any size.

    A noisy net is exported at its means; a predictor of `freeze` with its doubt, see `export_onnx`.

    >>> import torch
    >>> program = export_program(torch.nn.Linear(3, 2), torch.zeros(1, 3))
    >>> program.module()(torch.zeros(5, 3)).shape
    torch.Size([5, 2])
    """
    if isinstance(net, Predictor):
        return _answering(net, example_input, outputs, noise)[1]
    _check_no_answers(outputs, noise)
    inputs = _checked(net, example_input)
    check_means(net, "to export")
    return _program(to_dense(net)[0], inputs, batch_axes=None)


def export_package(
    net: nn.Module,
    path: str | PathLike[str],
    example_input: Any,
    *,
    outputs: Sequence[str] | None = None,
    noise: NoiseInput = "runtime",
) -> int:
    """Compile a net ahead of time into an AOTInductor package, for C++ or Python with torch.

    `torch._inductor.aoti_load_package(path)` gives a function of the inputs; no Python code of the
    net or of vardrop runs there. It needs a C++ compiler, and minutes the first time.

    Args:
        net: as of `export_program`: a plain net, or a predictor of `freeze`.
        path: the file, which ends in .pt2; it is there whole or not at all.
        example_input: one input of the usual shape.
        outputs, noise: of a predictor, as of `export_onnx`.

    Returns:
        The bytes on disk.
    """
    target = as_path(path)
    if target.suffix != ".pt2":
        raise VardropError(f"Expected `path` to end in .pt2, but got {target}. Name it so.")
    program = export_program(net, example_input, outputs=outputs, noise=noise)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = Path(folder) / "net.pt2"
        try:
            torch._inductor.aoti_compile_and_package(program, package_path=str(made))
        except Exception as failure:
            found = (str(failure).strip().splitlines() or [type(failure).__name__])[0]
            raise VardropError(
                f"Expected torch to compile the net, but got: {found}. It needs a C++ compiler "
                "(CXX, or g++ on the path); where there is none, write vardrop.export_onnx."
            ) from failure
        raw = made.read_bytes()
    write_atomically(target, raw)
    return len(raw)


def _answering(
    net: Predictor, example_input: Any, outputs: Sequence[str] | None, noise: NoiseInput
) -> tuple[Graph, ExportedProgram]:
    """The graph of a predictor, and its program."""
    (example,) = _batched((example_input,))
    graph = net.graph(example, outputs, noise)
    inputs = graph.arguments(example)
    axes = tuple(int(name == "noise") for name in graph.input_names)
    return graph, _program(graph, inputs, axes)


def _check_no_answers(outputs: object, noise: object) -> None:
    if outputs is not None or noise != "runtime":
        raise VardropError(
            "Expected a predictor of vardrop.freeze with `outputs` or `noise`, but got another "
            "net. Freeze it first: it then answers with its doubt."
        )


def _checked(net: nn.Module, example_input: Any) -> Inputs:
    """The arguments of a net with two examples at least, after a try."""
    check_net(net)
    inputs = to_arguments(example_input)
    check_runs(net, inputs)
    return _batched(inputs)


def _program(net: nn.Module, inputs: Inputs, batch_axes: tuple[int, ...] | None) -> ExportedProgram:
    axes = batch_axes or (0,) * len(inputs)
    batch = torch.export.Dim("batch")
    args, kwargs = (inputs, {}) if len(inputs) != 1 else call_arguments(net, inputs[0])
    shapes: Any = {name: {0: batch} for name in kwargs}
    if not kwargs:
        shapes = _named(net, tuple({axis: batch} for axis in axes))
    with torch.no_grad(), evaluating(net):
        try:
            return _traced(net, args, kwargs, shapes)
        except VardropError:
            raise
        except Exception as failure:
            raise VardropError(
                f"Expected `net` to be exportable by torch.export, but got: {failure}"
            ) from failure


def _traced(net: nn.Module, args: Inputs, kwargs: dict[str, Any], shapes: Any) -> ExportedProgram:
    """The program for any batch size.

    A forward that asks for `len(x)` gets a Python number, which would fix the batch size to that of
    the example. Only strict tracing, which is slower and follows less code, keeps it symbolic.
    """
    try:
        return torch.export.export(net, args, kwargs, dynamic_shapes=shapes)
    except torch._dynamo.exc.UserError:
        return torch.export.export(net, args, kwargs, dynamic_shapes=shapes, strict=True)


def _named(net: nn.Module, shapes: tuple[Any, ...]) -> tuple[Any, ...]:
    """Shapes as torch.export wants them for `forward(*args)` and for named arguments."""
    takes_any = inspect.signature(net.forward).parameters.values()
    return (shapes,) if any(p.kind is p.VAR_POSITIONAL for p in takes_any) else shapes


def export_onnx(
    net: nn.Module,
    path: str | PathLike[str],
    example_input: Any,
    *,
    outputs: Sequence[str] | None = None,
    noise: NoiseInput = "runtime",
) -> int:
    """Write a net as ONNX in evaluation mode, for a batch of any size.

    Args:
        net: a plain model, such as the result of `shrink`; a noisy model, which is written at its
            means; or a predictor of `freeze`, whose graph returns predictions with uncertainty
            under the names of its `output_names`.
        path: the file; it is there whole or not at all.
        example_input: one input (a tensor, or a tuple of arguments) of the usual shape.
        outputs: of a predictor, which outputs and in which order; all by default. `draws` are the
            outputs of all draws, (samples, batch, ...).
        noise: of a predictor that draws: "runtime", drawn by the runtime in every call; or "input",
            the last input `noise`, (samples, batch, F) standard normal numbers, for repeatable
            predictions.

    Returns:
        The bytes on disk. The metadata of a predictor's file name what is in it.
    """
    onnx = import_optional("onnx", "compress")
    import_optional("onnxscript", "compress")
    target = as_path(path)
    if isinstance(net, Predictor):
        graph, program = _answering(net, example_input, outputs, noise)
        model = _converted(program, graph.input_names, list(graph.output_names))
        onnx.helper.set_model_props(model, net.metadata())
        return _written(model, target)
    _check_no_answers(outputs, noise)
    inputs = _checked(net, example_input)
    dense: nn.Module = to_dense(net)[0]
    check_means(net, "to export")
    program = _program(dense, inputs, (0,) * len(inputs))
    return _written(_converted(program, None, None), target)


def _written(model: Any, target: Path) -> int:
    raw: bytes = model.SerializeToString()
    write_atomically(target, raw)
    return len(raw)


def _converted(
    program: ExportedProgram, inputs: list[str] | None, outputs: list[str] | None
) -> Any:
    """A program as an ONNX model; an operation that ONNX lacks is named, with its module."""
    placeholders = None if outputs is None else [f"vardrop_{i}" for i in range(len(outputs))]
    try:
        with _quiet():
            exported = torch.onnx.export(
                program,
                (),
                input_names=inputs,
                output_names=placeholders,
                dynamo=True,
                verbose=False,
            )
    except Exception as failure:
        raise VardropError(
            f"Expected operations that ONNX has, but got {_lacking(program, failure)}. "
            "Write the net with vardrop.export_program, or put another operation in its place."
        ) from failure
    assert exported is not None
    model = exported.model_proto
    for node in model.graph.node:
        del node.metadata_props[:]  # lines of source code, most of the bytes of a small net
    # The optimizer leaves shapes of weights that it has transposed, which quantisers stumble over.
    del model.graph.value_info[:]
    if outputs is not None and placeholders is not None:
        _rename_outputs(model.graph, dict(zip(placeholders, outputs, strict=True)))
    return model


def _rename_outputs(graph: Any, names: dict[str, str]) -> None:
    """Give the outputs their names, and other names to values inside that have them already."""
    renamed = {name: f"{name}_inside" for name in names.values()} | names
    for node in graph.node:
        for values in (node.input, node.output):
            values[:] = [renamed.get(value, value) for value in values]
    for value in (*graph.initializer, *graph.output):
        value.name = renamed.get(value.name, value.name)


def _lacking(program: ExportedProgram, failure: BaseException) -> str:
    """The operation that failed, and the module that calls it."""
    while failure.__cause__ is not None:
        failure = failure.__cause__
    name = re.search(r"op='\w+\.(\w+)'", str(failure))
    if name is None:
        return (str(failure).strip().splitlines() or [type(failure).__name__])[0]
    for node in program.graph.nodes:
        stack = list(node.meta.get("nn_module_stack", {}).values())
        if name[1] in str(node.target) and stack and stack[-1][0]:
            return f"`{name[1]}` in '{stack[-1][0]}' ({stack[-1][1].rpartition('.')[2]})"
    return f"`{name[1]}`"


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's words about parts of itself and packages that are not installed."""
    log = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)
