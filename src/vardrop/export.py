"""A model as a file for other runtimes: a `torch.export` program, an AOTInductor package, ONNX.

A shrunken net is plain torch, so int8 quantisation takes it as it is: in onnxruntime
`quantize_dynamic` on the exported file, in torch `torchao.quantization.quantize_` on the net.
"""

from __future__ import annotations

import inspect
import logging
import math
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import singledispatch
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from vardrop._core.calls import arguments
from vardrop._core.checks import check_integer, check_net
from vardrop._core.errors import VardropError, needed
from vardrop._core.files import write_atomically
from vardrop._core.torch_private import tree_map_only
from vardrop.compression.mask import check_means
from vardrop.compression.probes import Inputs, as_inputs, check_runs, hooks, run
from vardrop.compression.save import as_path, densify
from vardrop.estimators import LocalReparameterization
from vardrop.layers import Variational
from vardrop.noisy import evaluating, noisy_modules
from vardrop.prediction.frozen import Graph, NoiseOf, Predictor


def _batched(inputs: Inputs) -> Inputs:
    """Inputs with two examples at least: torch.export takes a batch of one for a constant."""
    return tree_map_only(Tensor, lambda t: torch.cat([t, t]) if len(t) == 1 else t, inputs)


def export_program(
    net: nn.Module,
    example_input: Any,
    *,
    outputs: Sequence[str] | None = None,
    noise: NoiseOf = "runtime",
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
    return _program(densify(net)[0], inputs, batch_axes=None)


def export_package(
    net: nn.Module,
    path: str | PathLike[str],
    example_input: Any,
    *,
    outputs: Sequence[str] | None = None,
    noise: NoiseOf = "runtime",
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
    net: Predictor, example_input: Any, outputs: Sequence[str] | None, noise: NoiseOf
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
    inputs = as_inputs(example_input)
    check_runs(net, inputs)
    return _batched(inputs)


def _program(net: nn.Module, inputs: Inputs, batch_axes: tuple[int, ...] | None) -> ExportedProgram:
    axes = batch_axes or (0,) * len(inputs)
    batch = torch.export.Dim("batch")
    args, kwargs = (inputs, {}) if len(inputs) != 1 else arguments(net, inputs[0])
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
    samples: int | None = None,
    *,
    outputs: Sequence[str] | None = None,
    noise: NoiseOf = "runtime",
) -> int:
    """Write a net as ONNX in evaluation mode, for a batch of any size.

    Args:
        net: a plain net, such as the result of `shrink`; with `samples`, a noisy one. Without
            `samples` a noisy net is written at its means. Or a predictor of `freeze`: the graph
            then answers with mean and doubt, under the names of its `output_names`.
        path: the file; it is there whole or not at all.
        example_input: one input (a tensor, or a tuple of arguments) of the usual shape.
        samples: draw this many times inside the graph. It then has the input `noise` of shape
            (samples, batch, F), standard normal, last in order, and returns all draws as
            (samples, batch, ...): average their probabilities. For local reparameterisation.
        outputs: of a predictor, which outputs and in which order; all by default.
        noise: of a predictor that draws: "runtime", which draws anew in each call; or "input", the
            last input `noise`, (draws, batch, F) standard normal numbers, for repeatable answers.

    Returns:
        The bytes on disk. The metadata of a predictor's file name what is in it.
    """
    onnx = needed("onnx", "compress")
    needed("onnxscript", "compress")
    target = as_path(path)
    if isinstance(net, Predictor):
        graph, program = _answering(net, example_input, outputs, noise)
        model = _converted(program, graph.input_names, list(graph.output_names))
        onnx.helper.set_model_props(model, net.metadata())
        return _written(model, target)
    _check_no_answers(outputs, noise)
    inputs = _checked(net, example_input)
    dense: nn.Module = densify(net)[0]
    axes = (0,) * len(inputs)
    names = None
    if samples is None:
        check_means(net, "to export")
    else:
        dense = Draws(net, inputs, samples)
        names = [*_argument_names(net, len(inputs)), "noise"]
        inputs, axes = (*inputs, dense.noise_like(inputs)), (*axes, 1)
    return _written(_converted(_program(dense, inputs, axes), names, None), target)


def _written(model: Any, target: Path) -> int:
    raw: bytes = model.SerializeToString()
    write_atomically(target, raw)
    return len(raw)


def _converted(
    program: ExportedProgram, inputs: list[str] | None, outputs: list[str] | None
) -> Any:
    """A program as an ONNX model; an operation that ONNX lacks is named, with its module."""
    try:
        with _quiet():
            found = torch.onnx.export(
                program, (), input_names=inputs, output_names=outputs, dynamo=True, verbose=False
            )
    except Exception as failure:
        raise VardropError(
            f"Expected operations that ONNX has, but got {_lacking(program, failure)}. "
            "Write the net with vardrop.export_program, or put another operation in its place."
        ) from failure
    assert found is not None
    model = found.model_proto
    for node in model.graph.node:
        del node.metadata_props[:]  # lines of source code, most of the bytes of a small net
    # The optimizer leaves shapes of weights that it has transposed, which quantisers stumble over.
    del model.graph.value_info[:]
    return model


def _lacking(program: ExportedProgram, failure: BaseException) -> str:
    """The operation that failed, and the module that calls it."""
    while failure.__cause__ is not None:
        failure = failure.__cause__
    name = re.search(r"op='\w+\.(\w+)'", str(failure))
    if name is None:
        return (str(failure).strip().splitlines() or [type(failure).__name__])[0]
    for node in program.graph.nodes:
        stack = list(node.meta.get("nn_module_stack", {}).values())
        if name[1] in str(node.target) and stack:
            return f"`{name[1]}` in '{stack[-1][0]}' ({stack[-1][1].rpartition('.')[2]})"
    return f"`{name[1]}`"


def _argument_names(net: nn.Module, count: int) -> list[str]:
    """What the net calls its arguments, as a graph without draws names its inputs."""
    return list(inspect.signature(net.forward).parameters)[:count]


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


@singledispatch
def _takes_outputs(module: nn.Module) -> bool:
    """Whether the noise of a module is one standard normal number per output."""
    return False


@_takes_outputs.register
def _(module: Variational) -> bool:
    local = isinstance(module.estimator, LocalReparameterization)
    return local and len(module.weight_axes) == 1 and module.gate is None


class Draws(nn.Module):
    """A noisy net as a function of its inputs and of all the noise it needs.

    noise has shape (samples, batch, F): for every noisy layer in the order of its call, one
    standard normal per output. Returns the outputs of all draws, (samples, batch, ...).

    Kingma, Salimans & Welling 2015, eq. 6.
    """

    def __init__(self, net: nn.Module, inputs: Inputs, samples: int) -> None:
        super().__init__()
        check_integer("samples", samples)
        for name, module in noisy_modules(net).items():
            if not _takes_outputs(module):
                raise VardropError(
                    "Expected noise on single weights drawn by local reparameterisation, but got "
                    f"'{name}' ({module}). Use estimator=vardrop.local_reparameterization."
                )
        self.net, self.samples = net, samples
        self.shapes = self._output_shapes(inputs)

    def _output_shapes(self, inputs: Inputs) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}

        def note(name: str) -> Callable[..., None]:
            return lambda layer, args, output: shapes.update({name: tuple(output.shape[1:])})

        found = noisy_modules(self.net)
        with hooks(*(m.register_forward_hook(note(n)) for n, m in found.items())):
            run(self.net, inputs)
        return shapes

    def noise_like(self, inputs: Inputs) -> Tensor:
        """Standard normal noise for a batch."""
        features = sum(math.prod(shape) for shape in self.shapes.values())
        return torch.randn(self.samples, len(inputs[0]), features)

    def forward(self, *args: Tensor) -> Tensor:
        """All draws."""
        *inputs, noise = args
        return torch.stack([self._draw(inputs, noise[s]) for s in range(self.samples)])

    def _draw(self, inputs: list[Tensor], noise: Tensor) -> Tensor:
        sizes = [math.prod(shape) for shape in self.shapes.values()]
        pieces = dict(zip(self.shapes, noise.split(sizes, dim=1), strict=True))

        def give(name: str) -> Callable[..., Any]:
            piece = pieces[name].unflatten(1, self.shapes[name])
            return lambda layer, args, kwargs: (args, {**kwargs, "noise": piece})

        modules = noisy_modules(self.net)
        with hooks(
            *(modules[n].register_forward_pre_hook(give(n), with_kwargs=True) for n in self.shapes)
        ):
            output: Tensor = self.net(*inputs)
        return output
