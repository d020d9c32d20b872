"""Export a model for other runtimes: a `torch.export` program, or ONNX.

A small model is plain torch, so int8 quantisation needs no special support: use `quantize_dynamic`
of onnxruntime on the exported file, or `torchao.quantization.quantize_` on the model.
"""

from __future__ import annotations

import inspect
import logging
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from os import PathLike
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from vardrop._core.calls import Batch, call_arguments
from vardrop._core.checks import check_choice
from vardrop._core.errors import VardropError, import_optional, report_errors
from vardrop._core.files import write_atomically
from vardrop._core.modules import evaluating
from vardrop._core.torch_private import tree_map_only
from vardrop.compression.mask import check_means
from vardrop.compression.probes import Inputs, check_runs, to_arguments
from vardrop.compression.save import as_path
from vardrop.likelihoods import check_model
from vardrop.prediction import Predictor
from vardrop.prediction.graph import Graph, NoiseInput

if TYPE_CHECKING:
    from onnx import ModelProto


def export_program(
    net: nn.Module,
    example_input: Batch,
    *,
    outputs: Sequence[str] | None = None,
    noise: NoiseInput = "runtime",
) -> ExportedProgram:
    """Export a model as a `torch.export` program in evaluation mode, for any batch size.

    Args:
        net: a plain model, a noisy model, which is exported at its means, or a predictor of
            `freeze`, which returns predictions with uncertainty.
        example_input: one input of the usual shape.
        outputs: of a predictor, as in `export_onnx`.
        noise: of a predictor, as in `export_onnx`.

    Returns:
        The program.

    >>> import torch
    >>> program = export_program(torch.nn.Linear(3, 2), torch.zeros(1, 3))
    >>> program.module()(torch.zeros(5, 3)).shape
    torch.Size([5, 2])
    """
    return _trace(net, example_input, outputs, noise)[0]


def export_onnx(
    net: nn.Module,
    example_input: Batch,
    path: str | PathLike[str],
    *,
    outputs: Sequence[str] | None = None,
    noise: NoiseInput = "runtime",
) -> int:
    """Write a model as ONNX in evaluation mode, for any batch size.

    Args:
        net: a plain model, such as the result of `shrink`; a noisy model, which is written at its
            means; or a predictor of `freeze`, whose graph returns predictions with uncertainty
            under the names of its `output_names`.
        example_input: one input (a tensor, or a tuple of arguments) of the usual shape.
        path: the file. An existing file is replaced only by a complete one.
        outputs: of a predictor, which outputs and in which order; all by default. `draws` are the
            outputs of all draws, (samples, batch, ...).
        noise: of a predictor that draws: "runtime", drawn by the runtime in every call; or "input",
            the last input `noise`, (samples, batch, F) standard normal numbers, for repeatable
            predictions.

    Returns:
        The bytes on disk. The metadata of a predictor's file describe its outputs.
    """
    onnx = import_optional("onnx", "compress")
    import_optional("onnxscript", "compress")
    target = as_path(path)
    program, graph = _trace(net, example_input, outputs, noise)
    model = _convert(program, graph)
    if graph is not None:
        onnx.helper.set_model_props(model, graph.predictor.metadata())
    raw = model.SerializeToString()
    write_atomically(target, raw)
    return len(raw)


def _trace(
    net: nn.Module, example_input: Batch, outputs: Sequence[str] | None, noise: NoiseInput
) -> tuple[ExportedProgram, Graph | None]:
    """The program of a model, and the graph of a predictor."""
    if isinstance(net, Predictor):
        (example,) = _with_two_examples((example_input,))
        graph = net.graph(example, outputs, noise)
        axes = tuple(int(name == "noise") for name in graph.input_names)
        return _export(graph, graph.arguments(example), axes), graph
    check_choice("noise", noise, get_args(NoiseInput))
    if outputs is not None or noise != "runtime":
        raise VardropError(
            "`outputs` and `noise` require a predictor of vardrop.freeze, but got another model. "
            "Freeze it first, for predictions with uncertainty."
        )
    check_model(net)
    if isinstance(net, torch.jit.ScriptModule):
        raise VardropError(
            "TorchScript is not supported by export. Pass the Python model that it was made from."
        )
    inputs = to_arguments(example_input)
    check_runs(net, inputs)
    check_means(net, "to export")
    return _export(net, _with_two_examples(inputs), (0,) * len(inputs)), None


def _with_two_examples(inputs: Inputs) -> Inputs:
    """Inputs with at least two examples, because torch.export treats a size of one as constant."""
    return tree_map_only(Tensor, lambda t: torch.cat([t, t]) if len(t) == 1 else t, inputs)


def _export(net: nn.Module, inputs: Inputs, batch_axes: tuple[int, ...]) -> ExportedProgram:
    """The program for any batch size.

    A forward that uses `len(x)` gets a Python number, which would fix the batch size. Only strict
    tracing, which is slower and supports less code, keeps it symbolic.
    """
    batch = Dim("batch")
    args, kwargs = (inputs, {}) if len(inputs) != 1 else call_arguments(net, inputs[0])
    shapes: Any = {name: {0: batch} for name in kwargs}
    if not kwargs:
        shapes = tuple({axis: batch} for axis in batch_axes)
        parameters = inspect.signature(net.forward).parameters.values()
        shapes = (shapes,) if any(p.kind is p.VAR_POSITIONAL for p in parameters) else shapes
    report = report_errors(
        lambda e: f"Expected `net` to be exportable by torch.export, but got: {e}"
    )
    with torch.no_grad(), evaluating(net), _disable_cache(net), report:
        try:
            return torch.export.export(net, args, kwargs, dynamic_shapes=shapes)
        except torch._dynamo.exc.UserError:
            return torch.export.export(net, args, kwargs, dynamic_shapes=shapes, strict=True)


@contextmanager
def _disable_cache(net: nn.Module) -> Iterator[None]:
    """Let decoders of transformers return no cache of keys and values, which is not a tensor."""
    configs: list[Any] = [getattr(module, "config", None) for module in net.modules()]
    caching = [config for config in configs if getattr(config, "use_cache", False) is True]
    try:
        for config in caching:
            config.use_cache = False
        yield
    finally:
        for config in caching:
            config.use_cache = True


def _convert(program: ExportedProgram, graph: Graph | None) -> ModelProto:
    """A program as an ONNX model. The error for an unsupported operation names its module."""
    names: dict[str, Any] = {}
    if graph is not None:
        outputs = [f"vardrop_{i}" for i in range(len(graph.output_names))]
        names = {"input_names": graph.input_names, "output_names": outputs}
    try:
        with _silence_exporter():
            exported = torch.onnx.export(program, (), dynamo=True, verbose=False, **names)
    except Exception as failure:
        raise VardropError(
            f"Expected operations that ONNX has, but got {_find_unsupported(program, failure)}. "
            "Use vardrop.export_program, or replace the operation."
        ) from failure
    assert exported is not None
    model = exported.model_proto
    for node in model.graph.node:
        del node.metadata_props[:]  # lines of source code, most of the bytes of a small model
    # The optimizer leaves shapes of weights that it has transposed, which break quantisation.
    del model.graph.value_info[:]
    ports = [port.type.tensor_type.shape.dim for port in (*model.graph.input, *model.graph.output)]
    symbols = {sizes[0].dim_param for sizes in ports[:1] if sizes}  # a name such as s77
    for size in (size for sizes in ports for size in sizes if size.dim_param in symbols - {""}):
        size.dim_param = "batch"
    if graph is not None:  # inner tensors may already have the names of the outputs
        new_names = {name: f"{name}_inside" for name in graph.output_names}
        new_names |= dict(zip(outputs, graph.output_names, strict=True))
        for node in model.graph.node:
            for tensor_names in (node.input, node.output):
                tensor_names[:] = [new_names.get(name, name) for name in tensor_names]
        for tensor in (*model.graph.initializer, *model.graph.output):
            tensor.name = new_names.get(tensor.name, tensor.name)
    return model


def _find_unsupported(program: ExportedProgram, failure: BaseException) -> str:
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
def _silence_exporter() -> Iterator[None]:
    """Hide the exporter's messages about its internals and about optional packages."""
    log = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)
