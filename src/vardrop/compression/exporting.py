"""Hand a net to other runtimes: `torch.export` and ONNX, with a batch of any size.

A shrunken net is plain torch, so int8 quantisation takes it as it is: in onnxruntime
`quantize_dynamic` on the exported file, in torch `torchao.quantization.quantize_` on the net.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vardrop.compression.extras import require
from vardrop.compression.flow import Inputs, as_inputs, evaluating, hooks, run
from vardrop.compression.rebuild import densify
from vardrop.errors import VardropError
from vardrop.estimators import LocalReparameterization
from vardrop.layers import Variational
from vardrop.noisy import noisy_modules


def _batched(inputs: Inputs) -> Inputs:
    """Inputs with two examples at least: torch.export takes a batch of one for a constant."""
    return tuple(torch.cat([t, t]) if isinstance(t, Tensor) and len(t) == 1 else t for t in inputs)


def export_program(net: nn.Module, example_input: Any) -> torch.export.ExportedProgram:
    """The net as a `torch.export` program in evaluation mode, for a batch of any size.

    >>> import torch
    >>> program = export_program(torch.nn.Linear(3, 2), torch.zeros(1, 3))
    >>> program.module()(torch.zeros(5, 3)).shape
    torch.Size([5, 2])
    """
    dense, _ = densify(net)
    return _program(dense, _batched(as_inputs(example_input)), batch_axes=None)


def _program(
    net: nn.Module, inputs: Inputs, batch_axes: tuple[int, ...] | None
) -> torch.export.ExportedProgram:
    axes = batch_axes or (0,) * len(inputs)
    batch = torch.export.Dim("batch")
    shapes = tuple({axis: batch} for axis in axes)
    with evaluating(net):
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
        net: a plain net, such as the result of `shrink`; with `samples`, a noisy one.
        path: the file.
        example_input: one input (a tensor, or a tuple of arguments) of the usual shape.
        samples: draw this many times inside the graph. It then has the input `noise` of shape
            (samples, batch, F), standard normal, last in order, and returns all draws as
            (samples, batch, ...): average their probabilities. For local reparameterisation.

    Returns:
        The bytes on disk.
    """
    require("onnx", "onnx")
    require("onnxscript", "onnxscript")
    inputs = _batched(as_inputs(example_input))
    dense: nn.Module = densify(net)[0]
    axes = (0,) * len(inputs)
    if samples is not None:
        dense = Draws(net, inputs, samples)
        inputs, axes = (*inputs, dense.noise_like(inputs)), (*axes, 1)
    with _quiet():
        torch.onnx.export(
            _program(dense, inputs, axes), (), str(path), dynamo=True, verbose=False,
            external_data=False,
        )  # fmt: skip
    return Path(path).stat().st_size


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


class Draws(nn.Module):
    """A noisy net as a function of its inputs and of all the noise it needs.

    noise has shape (samples, batch, F): for every noisy layer in the order of its call, one
    standard normal an output. Returns the outputs of all draws, (samples, batch, ...).

    Kingma, Salimans & Welling 2015, eq. 6.
    """

    def __init__(self, net: nn.Module, inputs: Inputs, samples: int) -> None:
        super().__init__()
        if samples < 1:
            raise VardropError(f"Expected `samples` to be at least 1, but got {samples}.")
        for name, module in noisy_modules(net).items():
            local = isinstance(getattr(module, "estimator", None), LocalReparameterization)
            if not isinstance(module, Variational) or not local or module.gate is not None:
                raise VardropError(
                    "Expected noise on weights drawn by local reparameterisation, but got "
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
