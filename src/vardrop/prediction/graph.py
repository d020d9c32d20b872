"""`Graph`: a predictor as a function of tensors, which exporters write to a file."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from vardrop._core.calls import tensors_in
from vardrop._core.errors import VardropError
from vardrop._core.torch_private import PlainAttention
from vardrop.functional import TensorNoise, draw_from
from vardrop.prediction.moments import MomentDraws, Moments
from vardrop.prediction.rows import RowDraws, RowPlan
from vardrop.prediction.strategies import DrawStrategy, LoopDraws, MemberDraws

if TYPE_CHECKING:
    from vardrop.prediction.predictor import Predictor

_LOCATIONS = ("mean", "lower", "upper", "draws")
_LINEAR = (*_LOCATIONS, "std")  # in the unit of the target; others are variances
NoiseInput = Literal["runtime", "input"]
GraphInput = Tensor | tuple[Tensor, ...] | Mapping[str, Tensor]


class Graph(nn.Module):
    """A predictor as a module from tensors to tensors, of operations that exporters support.

    It takes the inputs of the model and, with `takes_noise`, standard normal numbers (samples, N,
    F) as the last argument. It returns the tensors of `output_names`.

    Args:
        predictor: the predictor.
        strategy: how it draws.
        x: an example input.
        names: the outputs.
        takes_noise: whether the noise is an argument, if the strategy draws any.
    """

    normal: Tensor
    shift: Tensor
    unit: Tensor
    plan: RowPlan
    predictor: Predictor
    strategy: DrawStrategy

    def __init__(
        self,
        predictor: Predictor,
        strategy: DrawStrategy,
        x: GraphInput,
        names: tuple[str, ...],
        takes_noise: bool,
    ) -> None:
        super().__init__()
        self.__dict__.update(predictor=predictor, strategy=strategy)
        self.output_names, self.takes_noise = names, False
        self.names = list(x) if isinstance(x, Mapping) else None
        self.input_names = self.names or ["x"]
        if isinstance(x, tuple):
            self.input_names = list(signature(predictor.net.forward).parameters)[: len(x)]
        self.likelihood = predictor.likelihood
        if isinstance(strategy, RowDraws):
            self.plan = strategy.plan(x)
            self.model = nn.ModuleList(p for p in self.plan.split if isinstance(p, nn.Module))
            self.takes_noise = takes_noise and self.plan.noise is not None
        elif isinstance(strategy, MemberDraws):
            if not all(isinstance(member, nn.Module) for member in strategy.members):
                raise VardropError(
                    "Export of an ensemble is not supported for noisy members. Pass drawn "
                    "functions as members: vardrop.draws(model, samples)."
                )
            self.model = nn.ModuleList(strategy.members)  # type: ignore[arg-type]
        elif isinstance(strategy, LoopDraws | MomentDraws):
            self.model = nn.ModuleList([strategy.net])
        else:
            raise VardropError(
                f"Export is not supported for {strategy.describe(x)}. Export drawn functions as "
                "members: vardrop.Ensemble(vardrop.draws(net, samples))."
            )
        has_noise = not isinstance(strategy, MomentDraws | MemberDraws) and predictor.mode != "mean"
        if takes_noise and has_noise and not self.takes_noise:
            raise VardropError(
                f"noise='input' is not supported for {strategy.describe(x)}, or for code that "
                "calls random functions of torch. Pass noise='runtime'."
            )
        if self.takes_noise:
            self.input_names = [*self.input_names, "noise"]
        if isinstance(strategy, MomentDraws):
            mean = strategy.propagate(x).mean
            shape, generator = (predictor.samples, 1, *mean.shape[1:]), torch.Generator(mean.device)
            normal = torch.randn(shape, generator=generator.manual_seed(0), device=mean.device)
            self.register_buffer("normal", normal)
        # Buffers, because constants of a graph are in single precision.
        shift, unit = predictor.units or (0.0, 1.0)
        self.register_buffer("shift", torch.tensor(shift, dtype=torch.float64))
        self.register_buffer("unit", torch.tensor(unit, dtype=torch.float64))

    def arguments(self, x: GraphInput) -> tuple[Tensor, ...]:
        """An example of the graph's inputs."""
        inputs = (x,) if isinstance(x, Tensor) else x.values() if isinstance(x, Mapping) else x
        return (*inputs, *([self.noise_like(x)] if self.takes_noise else []))

    def noise_like(self, x: GraphInput) -> Tensor:
        """Standard normal noise for a batch, (samples, N, F)."""
        first = tensors_in(x)[0]
        assert self.plan.noise is not None
        shape = self.predictor.samples, first.shape[0], self.plan.noise
        return torch.randn(shape, device=first.device)

    def forward(self, *args: Tensor) -> tuple[Tensor, ...]:
        """The tensors of `output_names`."""
        inputs, noise = (args[:-1], args[-1]) if self.takes_noise else (args, None)
        x: GraphInput = inputs[0] if len(inputs) == 1 else inputs
        if self.names is not None:
            x = dict(zip(self.names, inputs, strict=True))
        samples, strategy = self.predictor.samples, self.strategy
        moments: Moments | None = None
        if isinstance(strategy, MomentDraws):
            moments = strategy.propagate(x)
            draws = torch.addcmul(moments.mean, moments.variance.sqrt(), self.normal)
        elif isinstance(strategy, RowDraws):
            take: Callable[[tuple[int, ...]], Tensor] = torch.randn
            if self.plan.noise is not None:
                take = _Slices((self.noise_like(x) if noise is None else noise).flatten(0, 1))
            with PlainAttention(), draw_from(TensorNoise(take)):
                shared = self.plan.split.prefix(x)
                rows = strategy.pick(self.plan.split.suffix(samples, *shared))
            draws = rows.reshape(samples, args[0].shape[0], *rows.shape[1:])
        else:
            with PlainAttention(), draw_from(TensorNoise(torch.randn)):
                draws = torch.cat(list(strategy.draws(x, samples)))
        p = self.predictor.reduce([draws], None, moments)
        tensors = self.predictor.select_outputs(p, self.output_names)
        if self.predictor.units is None:
            return tensors
        scaled = [
            tensor.double() * self.unit ** (1 if name in _LINEAR else 2)
            for name, tensor in zip(self.output_names, tensors, strict=True)
        ]
        pairs = zip(self.output_names, scaled, strict=True)
        return tuple(y + self.shift if name in _LOCATIONS else y for name, y in pairs)


class _Slices:
    """Consecutive parts of noise (draws, F)."""

    def __init__(self, noise: Tensor) -> None:
        self.noise, self.start = noise, 0

    def __call__(self, shape: Sequence[int]) -> Tensor:
        width = math.prod(shape[1:])
        piece = self.noise.narrow(1, self.start, width)
        self.start += width
        return piece.reshape(-1, *shape[1:])
