"""Hand a net to other runtimes: `torch.export` and ONNX, with a batch of any size.

A shrunken net is plain torch, so int8 quantisation takes it as it is: in onnxruntime
`quantize_dynamic` on the exported file, in torch `torchao.quantization.quantize_` on the net.
"""

from __future__ import annotations

import inspect
import logging
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import singledispatch
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from vardrop.checks import check_integer, check_net
from vardrop.compression.files import as_path, densify
from vardrop.compression.running import Inputs, as_inputs, check_runs, hooks, run
from vardrop.errors import VardropError, needed
from vardrop.estimators import LocalReparameterization
from vardrop.files import write_atomically
from vardrop.layers import Variational
from vardrop.noisy import evaluating, noisy_modules


def _batched(inputs: Inputs) -> Inputs:
    """Inputs with two examples at least: torch.export takes a batch of one for a constant."""
    return tree_map_only(Tensor, lambda t: torch.cat([t, t]) if len(t) == 1 else t, inputs)


def export_program(net: nn.Module, example_input: Any) -> torch.export.ExportedProgram:
    """The net as a `torch.export` program in evaluation mode, for a batch of any size.

    A noisy net is exported at its means.

    >>> import torch
    >>> program = export_program(torch.nn.Linear(3, 2), torch.zeros(1, 3))
    >>> program.module()(torch.zeros(5, 3)).shape
    torch.Size([5, 2])
    """
    inputs = _checked(net, example_input)
    return _program(densify(net)[0], inputs, batch_axes=None)


def _checked(net: nn.Module, example_input: Any) -> Inputs:
    """The arguments of a net with two examples at least, after a try."""
    check_net(net)
    inputs = as_inputs(example_input)
    check_runs(net, inputs)
    return _batched(inputs)


def _program(
    net: nn.Module, inputs: Inputs, batch_axes: tuple[int, ...] | None
) -> torch.export.ExportedProgram:
    axes = batch_axes or (0,) * len(inputs)
    batch = torch.export.Dim("batch")
    shapes = tuple({axis: batch} for axis in axes)
    with torch.no_grad(), evaluating(net):
        try:
            return torch.export.export(net, inputs, dynamic_shapes=_named(net, shapes))
        except Exception as failure:
            raise VardropError(
                f"Expected `net` to be exportable by torch.export, but got: {failure}"
            ) from failure


def _named(net: nn.Module, shapes: tuple[Any, ...]) -> tuple[Any, ...]:
    """Shapes as torch.export wants them for `forward(*args)` and for named arguments."""
    return (shapes,) if isinstance(net, Draws) else shapes


def export_onnx(
    net: nn.Module,
    path: str | PathLike[str],
    example_input: Any,
    samples: int | None = None,
) -> int:
    """Write a net as ONNX in evaluation mode, for a batch of any size.

    Args:
        net: a plain net, such as the result of `shrink`; with `samples`, a noisy one. Without
            `samples` a noisy net is written at its means.
        path: the file; it is there whole or not at all.
        example_input: one input (a tensor, or a tuple of arguments) of the usual shape.
        samples: draw this many times inside the graph. It then has the input `noise` of shape
            (samples, batch, F), standard normal, last in order, and returns all draws as
            (samples, batch, ...): average their probabilities. For local reparameterisation.

    Returns:
        The bytes on disk.
    """
    needed("onnx", "compress")
    needed("onnxscript", "compress")
    target, inputs = as_path(path), _checked(net, example_input)
    dense: nn.Module = densify(net)[0]
    axes = (0,) * len(inputs)
    names = None
    if samples is not None:
        dense = Draws(net, inputs, samples)
        names = [*_argument_names(net, len(inputs)), "noise"]
        inputs, axes = (*inputs, dense.noise_like(inputs)), (*axes, 1)
    with _quiet():
        program = torch.onnx.export(
            _program(dense, inputs, axes), (), input_names=names, dynamo=True, verbose=False
        )
    assert program is not None
    raw = program.model_proto.SerializeToString()
    write_atomically(target, raw)
    return len(raw)


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
