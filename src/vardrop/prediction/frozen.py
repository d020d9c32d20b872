"""`freeze`: a net with its likelihood as one module of buffers that answers with mean and doubt.

All that does not depend on the input is computed once: the variances of weights, BatchNorm folded
into the layer before it, the likelihood with its noise. A predictor is for serving: it follows no
later change of the net, and `predictor.graph` is what `export_onnx` and `export_program` write.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import pairwise
from statistics import NormalDist
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn

from vardrop._core.calls import Picked, call, mapped, one_tensor, rows, tensors_in, untouched
from vardrop._core.checks import check_choice, check_integer, check_number, check_type
from vardrop._core.errors import VardropError
from vardrop._core.modules import clone_modules
from vardrop.functional import (
    GeneratorNoise,
    RandomOpMode,
    TensorNoise,
    draw_from,
    log_square,
    restore_state_on_error,
)
from vardrop.gates import Gate, check_functional_dropout
from vardrop.layers import Variational
from vardrop.likelihoods import Likelihood, Objective, Values, net_and_likelihood
from vardrop.noisy import named_modules_of
from vardrop.posteriors import Axes, Posterior, Sharing, Tensors
from vardrop.prediction.calibration import Conformal
from vardrop.prediction.functions import seed_of_a_call
from vardrop.prediction.moments import analytic, output_noise, passed
from vardrop.prediction.predictor import Draw, Engine, Options, batches_on
from vardrop.prediction.preparation import (
    check_noise,
    is_random,
    plain_forward,
    prepared,
    watched,
    whole_rows,
)
from vardrop.prediction.result import Interval, Prediction, join
from vardrop.prediction.ways import Chain, LocalLayer, chain, has_known_product, local_layer

NoiseOf = Literal["runtime", "input"]
_CLASSES = ("probs", "aleatoric", "epistemic", "entropy", "lower", "upper")
_NUMBERS = ("mean", "aleatoric", "epistemic", "std", "lower", "upper")
_SET = "set"
_PIECES, _ROUNDS = 32, 6


def freeze(
    net: nn.Module | Objective,
    mode: Literal["sample", "moments"] = "sample",
    draws: int = 32,
    *,
    draw: Draw = "estimator",
    likelihood: Likelihood | None = None,
    conformal: Conformal | None = None,
    level: float = 0.95,
    memory: int = 2**28,
    output: Callable[[Any], Tensor] | None = None,
) -> Predictor:
    """A trained net as a predictor of its own: buffers, all that no input changes computed once.

    It answers as `predict` with the same arguments and seed does. It is a copy: training, pruning
    or loading the net afterwards changes nothing in it.

    Args:
        net: a noisy net in evaluation mode, or an ELBO, which brings its likelihood along.
        mode: "sample", or "moments": one analytic pass that carries mean and variance.
        draws: how many draws; in moments mode, at the output.
        draw: as for `predict`.
        likelihood: as for `predict`; with its temperature, where `calibrate` has fitted one.
        conformal: the rule of `conformal`, fitted on predictions of the same mode: it then gives
            the interval, or sets of classes.
        level: of the interval without such a rule.
        memory: bytes that draws may take at once.
        output: picks the tensor from what the net returns.

    >>> import torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Linear(4, 3), vd.bayes_by_backprop()).eval()
    >>> predictor, x = vd.freeze(net, draws=8), torch.randn(5, 4)
    >>> predictor(x)
    Prediction(5 rows, Categorical, 8 draws)
    >>> dict(zip(predictor.output_names, predictor.outputs(x)))["epistemic"].shape
    torch.Size([5])
    """
    check_choice("mode", mode, ("sample", "moments"))
    check_integer("draws", draws)
    check_type("conformal", conformal, Conformal | None, "a rule of vardrop.conformal")
    check_number("level", level, above=0, below=1)
    if conformal is not None:
        conformal.check_mode(mode == "moments")
    model, meaning = net_and_likelihood(net, likelihood)
    check_noise(model)
    _check_evaluating(model)
    pick = getattr(net, "output", None) if output is None else output
    kept = copy.deepcopy(meaning.fixed()).requires_grad_(False)
    options = Options(draws, mode, draw, kept, memory, None, None)
    settled = _settled(model if pick is None else Picked(model, pick), options)
    return Predictor(settled, options, conformal, level, _described(model))


def _check_evaluating(net: nn.Module) -> None:
    """Refuse a net that is being trained: its statistics and weights are still moving."""
    for name, module in net.named_modules():
        if module.training:
            raise VardropError(
                f"Expected `net` in evaluation mode, but got '{name or '(net)'}' "
                f"({type(module).__name__}) in training mode: a net in the middle of its training "
                "would be frozen as it happens to be. Call net.eval() once it is trained."
            )


def _described(net: nn.Module) -> str:
    """Posteriors and gates, for the metadata of a file."""
    layers = named_modules_of(net, Variational).values()
    found = [repr(m.posterior) for m in layers if m.posterior is not None]
    found += [repr(m.noise) for m in named_modules_of(net, Gate).values()]
    return "; ".join(dict.fromkeys(found))


@dataclass(frozen=True)
class KnownNoise(Posterior):
    """A Gaussian posterior whose deviations, which may have a sign, have been computed."""

    zero_mean: bool = False

    @property
    def gaussian(self) -> bool:
        return True

    @property
    def noise_per(self) -> Sharing:
        return "weight"

    @property
    def learned(self) -> bool:
        return False

    def initial(self, weight: Tensor, axes: Axes) -> dict[str, Tensor]:
        return {"deviation": torch.zeros_like(weight)}

    def variance(self, weight: Tensor, tensors: Tensors) -> Tensor:
        return tensors["deviation"].square()

    def perturbation(self, weight: Tensor, noise: Tensor, tensors: Tensors) -> Tensor:
        return tensors["deviation"] * noise

    def log_alpha(self, weight: Tensor, tensors: Tensors) -> Tensor:
        return log_square(tensors["deviation"]) - log_square(weight)


@torch.no_grad()
def _settled(net: nn.Module, options: Options) -> nn.Module:
    """A copy of a net in buffers of its own, with the variances of its weights computed."""
    twin = clone_modules(net)
    instead: dict[nn.Module, nn.Module] = {}
    for layer in named_modules_of(twin, Variational).values():
        found = _known_layer(layer, options)
        if found is not None:
            instead[layer] = found
        elif layer.posterior is not None and layer.posterior.gaussian:
            _know_noise(layer)
    twin = clone_modules(twin, instead)
    _fold_norms(twin)
    _own_buffers(twin)
    return twin.requires_grad_(False)


def _known_layer(layer: Variational, options: Options) -> LocalLayer | None:
    """The layer with its variances, in a mode that draws outputs or carries moments."""
    if options.draw == "weights" and options.mode == "sample":
        return None  # whole functions draw weights
    if options.mode == "sample":
        return local_layer(layer, options.draw == "local")
    if not has_known_product(layer) or not layer.affine().weight.adds_variances():
        return None
    return LocalLayer(layer, floor=0.0).with_squares()


def _know_noise(layer: Variational) -> None:
    assert layer.posterior is not None
    noise = {
        name: {"deviation": tensor.perturbation(torch.ones_like(tensor.mean))}
        for name, tensor in layer.noisy_tensors().items()
    }
    layer.replace_posterior(KnownNoise(layer.posterior.zero_mean), noise)


def _fold_norms(net: nn.Module) -> None:
    """Fold BatchNorm into the layer before it, where the two stand in a row."""
    for row in whole_rows(net):
        for (_, layer), (name, norm) in pairwise(list(row.named_children())):
            alone = plain_forward(layer) and plain_forward(norm)
            if alone and isinstance(layer, LocalLayer) and _folds(norm):
                layer.scale_outputs(*_scale_and_shift(norm))
                setattr(row, name, nn.Identity())


def _folds(norm: nn.Module) -> bool:
    known = type(norm) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    return known and getattr(norm, "running_mean", None) is not None


def _scale_and_shift(norm: Any) -> tuple[Tensor, Tensor]:
    scale = torch.rsqrt(norm.running_var + norm.eps)
    scale = scale if norm.weight is None else scale * norm.weight
    shift = -norm.running_mean * scale
    return scale, shift if norm.bias is None else shift + norm.bias


_BY_PARAMETERS = (nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)  # they ask which they have


def _own_buffers(net: nn.Module) -> None:
    """Turn every parameter and buffer into a buffer of this net's own; ties stay."""
    own: dict[int, Tensor] = {}

    def copied(tensor: Tensor) -> Tensor:
        return own.setdefault(id(tensor), tensor.detach().clone())

    for module in net.modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue  # a replica has copied it whole
        kept = isinstance(module, _BY_PARAMETERS)
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is None:
                continue
            if kept and module._parameters.pop(name, None) is not None:
                setattr(module, name, nn.Parameter(copied(tensor), requires_grad=False))
            else:
                module._parameters.pop(name, None)
                module._buffers[name] = copied(tensor)


class Predictor(nn.Module):
    """A frozen net that answers with its predictive distribution; made by `vardrop.freeze`.

    Called, it gives the `Prediction` of `vardrop.predict`. It holds buffers only, stays in
    evaluation mode and follows no later change of the net that it was made from: freeze again. It
    may be used from several threads, copied, and moved to another device.
    """

    def __init__(
        self,
        net: nn.Module,
        options: Options,
        conformal: Conformal | None,
        level: float,
        noise: str,
    ) -> None:
        super().__init__()
        self.net, self.likelihood = net, options.likelihood
        self.options, self.conformal, self.level, self.noise = options, conformal, level, noise
        super().train(False)

    def train(self, mode: bool = True) -> Predictor:
        """Nothing: a predictor stays in evaluation mode."""
        return self

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self.__dict__.pop("_engine", None)  # what it has computed is on another device
        return super()._apply(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "_engine"}

    def extra_repr(self) -> str:
        options = self.options
        return f"frozen, mode={options.mode!r}, draws={options.samples}, draw={options.draw!r}"

    @restore_state_on_error
    def forward(self, x: Any, seed: int | None = None) -> Prediction:
        """The predictive distribution of a batch or of a loader, as `predict` gives it."""
        sampled = self.options.mode == "sample"
        own: AbstractContextManager[None] = nullcontext()
        if sampled:
            own = draw_from(GeneratorNoise(seed_of_a_call(seed)))
        with own, torch.no_grad():
            engine = self._prepared_engine()
            return join([p for b in batches_on(engine.device, x) for p in engine(b, seed or 0)])

    def _prepared_engine(self) -> Engine:
        if self.options.mode == "sample" and self.options.draw == "weights":
            return Engine(self.net, self.options)  # it draws into weights of its own
        with _preparing:
            found = self.__dict__.get("_engine")
            if found is None:
                found = self.__dict__["_engine"] = Engine(self.net, self.options)
        return found

    @property
    def output_names(self) -> tuple[str, ...]:
        """The names of `outputs`, in their order."""
        names = _NUMBERS if self.likelihood.class_axis is None else _CLASSES
        return (*names, _SET) if self.conformal is not None and names is _CLASSES else names

    def outputs(self, x: Any, seed: int | None = None) -> tuple[Tensor, ...]:
        """The prediction as a flat tuple of tensors, named by `output_names`.

        `probs` or `mean`; `aleatoric` and `epistemic` (nats of classes, variances of values); their
        sum as `entropy` or as the deviation `std`; `lower` and `upper` of the interval; and `set`,
        True for the classes of a conformal set.
        """
        return self.answers(self(x, seed), self.output_names)

    def answers(self, p: Prediction, names: Sequence[str]) -> tuple[Tensor, ...]:
        """Tensors of a prediction, by name."""
        found: dict[str, Tensor] = {}
        if {"lower", "upper"} & set(names):
            found["lower"], found["upper"] = self._interval(p)
        if _SET in names:
            assert self.conformal is not None
            found[_SET] = self.conformal.classes(p)
        return tuple(found[n] if n in found else getattr(p, n) for n in names)

    def _interval(self, p: Prediction) -> Interval:
        if self.conformal is not None and not p.classifies:
            return self.conformal.interval(p)
        if not torch.compiler.is_compiling():
            return p.interval(self.level)
        tails = (1 - self.level) / 2, (1 + self.level) / 2
        parts = self.likelihood.parts(p.draws)
        if parts.probs is None and not isinstance(self.likelihood, Values):
            std = parts.aleatoric.sqrt()
            return Interval(*(_mixture_quantile(parts.location, std, q) for q in tails))
        values = parts.location if parts.probs is None else parts.probs
        return Interval(*(_quantile(values, q) for q in tails))

    def graph(
        self, x: Any, outputs: Sequence[str] | None = None, noise: NoiseOf = "runtime"
    ) -> Graph:
        """The predictor as a module from tensors to tensors, for an exporter.

        Args:
            x: an example input.
            outputs: which of `output_names`, in the order wanted; all by default.
            noise: of sample mode: "runtime", drawn inside the graph; or "input", a last argument
                (draws, N, F) of standard normal numbers, which makes the answer repeatable.
        """
        names = self.output_names if outputs is None else tuple(outputs)
        for name in names:
            check_choice("outputs", name, self.output_names)
        check_choice("noise", noise, ("runtime", "input"))
        with torch.no_grad():
            return Graph(self, x, names, noise)

    def metadata(self) -> dict[str, str]:
        """What a file of this predictor says of itself."""
        options = self.options
        found = {
            "vardrop": version("vardrop"),
            "mode": options.mode,
            "draws": str(options.samples),
            "draw": options.draw,
            "noise": self.noise,
            "likelihood": repr(self.likelihood),
            "level": str(self.level if self.conformal is None else self.conformal.level),
        }
        return found if self.conformal is None else {**found, "conformal": repr(self.conformal)}


_preparing = threading.Lock()


def _quantile(values: Tensor, level: float) -> Tensor:
    """torch.quantile along axis 0, of operations that every runtime has."""
    place = level * (len(values) - 1)
    low = math.floor(place)
    ordered = values.sort(0).values
    return torch.lerp(ordered[low], ordered[min(low + 1, len(values) - 1)], place - low)


def _mixture_quantile(mean: Tensor, std: Tensor, level: float) -> Tensor:
    """Quantile of the equal mixture of normals along axis 0, in few operations.

    Each round looks at the ends of 32 pieces at once and keeps one of them: as exact as thirty
    bisections.
    """
    each = mean + std * NormalDist().inv_cdf(level)
    low, width = each.amin(0), each.amax(0) - each.amin(0)
    places = torch.arange(1, _PIECES, device=mean.device).view(-1, *(1,) * mean.dim())
    for _ in range(_ROUNDS):
        width = width / _PIECES
        ends = low + width * places  # (pieces - 1, 1, N, ...)
        below = torch.erf((ends - mean) / std * math.sqrt(0.5)).mean(1) < 2 * level - 1
        low = low + width * below.sum(0)
    return low + width / 2


def _reduced(likelihood: Likelihood, draws: Tensor) -> Prediction:
    """The prediction of draws (S, N, ...), without a look at their values."""
    parts, count = likelihood.parts(draws), len(draws)
    settling = parts.location if parts.probs is None else parts.probs
    mean = parts.location.mean(0)
    variance = (parts.location - mean).square().sum(0) / max(count - 1, 1)
    logs = None
    if parts.log_probs is not None:
        logs = (torch.logsumexp(parts.log_probs, 0) - math.log(count)).clamp(max=0)
    return Prediction(
        likelihood,
        mean,
        variance,
        parts.aleatoric.mean(0),
        settling.new_zeros(()),
        settling.new_full((), count),
        draws,
        logs,
        None if parts.probs is None else parts.probs.mean(0),
    )


class Graph(nn.Module):
    """A predictor as a function of tensors, of operations that a graph can hold.

    Takes the inputs of the net and, with `noise="input"`, standard normal numbers (draws, N, F) as
    the last; gives the tensors of `output_names`. All draws run at once, as rows beside each other.
    """

    normal: Tensor

    def __init__(self, predictor: Predictor, x: Any, names: tuple[str, ...], noise: str) -> None:
        super().__init__()
        self.predictor, self.output_names, self.takes_noise = predictor, names, False
        net, options = predictor.net, predictor.options
        check_functional_dropout(net, x)
        self.names = list(x) if isinstance(x, Mapping) else None
        self.input_names = self.names or ["x", *(f"x{i}" for i in range(1, len(_arguments(x))))]
        if options.mode == "moments":
            self.net = analytic(prepared(net, noise=False))
            self.register_buffer(
                "normal", output_noise(passed(self.net, x).mean, options.samples, 0)
            )
            return
        self.takes_noise = noise == "input"
        self.input_names = [*self.input_names, "noise"] if self.takes_noise else self.input_names
        self.links = _linked(net, x, options.draw == "local") if isinstance(x, Tensor) else None
        if self.links is not None:
            self.net = nn.ModuleList([*self.links.before, self.links.first, *self.links.after])
            self.width = sum(self.links.widths)
        else:
            _check_drawn_by_row(net, options.draw)
            self.net = prepared(net, noise=True, local=options.draw == "local")
            self.width = _noise_of_a_row(self.net, x)
            _check_rows_alone(net, x)

    def arguments(self, x: Any) -> tuple[Tensor, ...]:
        """An example of the graph's inputs."""
        noise = [self.noise_like(x)] if self.takes_noise else []
        return (*_arguments(x), *noise)

    def noise_like(self, x: Any) -> Tensor:
        """Standard normal noise for a batch, (draws, N, F)."""
        first = tensors_in(x)[0]
        shape = (self.predictor.options.samples, rows(x), self.width)
        return torch.randn(shape, device=first.device)

    def forward(self, *args: Tensor) -> tuple[Tensor, ...]:
        """The tensors of `output_names`."""
        likelihood, samples = self.predictor.likelihood, self.predictor.options.samples
        if self.predictor.options.mode == "moments":
            found = passed(self.net, args[0])
            draws = torch.addcmul(found.mean, found.variance.sqrt(), self.normal)
            p = _reduced(likelihood, draws)
            mean, variance = likelihood.locations(found.mean), likelihood.locations(found.variance)
            p = replace(p, mean=mean, output_variance=variance, analytic=True)
        else:
            if not self.takes_noise:
                args = (*args, torch.randn(samples, args[0].shape[0], self.width))
            *inputs, noise = args
            draw = self._in_a_row if self.links is None else self._along_chain
            p = _reduced(likelihood, draw(inputs, noise))
        return self.predictor.answers(p, self.output_names)

    def _along_chain(self, inputs: list[Tensor], noise: Tensor) -> Tensor:
        """Outputs (S, N, ...) of a chain; what stands before the first noise runs once."""
        assert self.links is not None
        (x,), links = inputs, self.links
        for module in links.before:
            x = module(x)
        pieces = iter(noise.split(links.widths, 2))
        std = links.first.deviation(x * x)
        mean = links.first.mean(x).expand_as(std)
        # Repeated, not broadcast: torch.export cannot split axes again that a view has merged.
        times = (len(noise), *(1,) * (std.dim() - 1))
        y = mean.repeat(times) + std.repeat(times) * next(pieces).reshape(-1, *std.shape[1:])
        for step in links.after:
            if isinstance(step, LocalLayer):
                shape = step.output_shape(y)
                y = step(y, next(pieces).reshape(-1, *shape))
            else:
                y = step(y)
        return y.unflatten(0, noise.shape[:2])

    def _in_a_row(self, inputs: list[Tensor], noise: Tensor) -> Tensor:
        """Outputs (S, N, ...) of any net whose rows do not meet, all draws in one pass."""
        flat, start = noise.flatten(0, 1), 0

        def take(shape: Any) -> Tensor:
            nonlocal start
            width = math.prod(shape[1:])
            piece, start = flat.narrow(1, start, width), start + width
            return piece.reshape(-1, *shape[1:])

        samples = self.predictor.options.samples
        batch = [t.expand(samples, *t.shape).flatten(0, 1) for t in inputs]
        given: Any = (
            tuple(batch) if self.names is None else dict(zip(self.names, batch, strict=True))
        )
        with draw_from(TensorNoise(take)):
            y = one_tensor(call(self.net, given))
        return y.unflatten(0, noise.shape[:2])


def _linked(net: nn.Module, x: Tensor, local: bool) -> Chain | None:
    """The net as a chain in which nothing but local reparameterisation draws, or None."""
    found = chain(net, x, local)
    steps = [] if found is None else found.after
    return None if any(is_random(s) and not isinstance(s, LocalLayer) for s in steps) else found


def _arguments(x: Any) -> tuple[Tensor, ...]:
    return tuple(x.values()) if isinstance(x, Mapping) else x if isinstance(x, tuple) else (x,)


def _check_drawn_by_row(net: nn.Module, draw: str) -> None:
    """Refuse weights that are drawn once for all rows: a graph cannot hold so many numbers."""
    for name, layer in named_modules_of(net, Variational).items():
        whole = layer.posterior is not None and layer.estimator.whole_weights_per == "batch"
        if draw == "weights" or (whole and draw != "local"):
            raise VardropError(
                f"Expected noise that is drawn for every row by itself, but got '{name}' "
                f"({type(layer).__name__}), which draws its weights once for all rows. Freeze with "
                'draw="local" or mode="moments".'
            )


def _check_rows_alone(net: nn.Module, x: Any) -> None:
    """Refuse a net whose rows change each other: draws could not lie beside each other."""
    quiet = prepared(net, noise=False)
    twice = mapped(lambda t: torch.cat([t, 0.5 * t.flip(0) if t.is_floating_point() else t]), x)
    alone, beside = one_tensor(call(quiet, x)), one_tensor(call(quiet, twice))[: rows(x)]
    if not torch.allclose(alone, beside, rtol=1e-3, atol=1e-5):
        raise VardropError(
            "Expected a net that treats every row of a batch alone, but the answer to a row "
            'changes with the rows beside it. Freeze with mode="moments", or predict in Python.'
        )


def _noise_of_a_row(net: nn.Module, x: Any) -> int:
    """How many numbers one row needs for one draw; noise that cannot be handed in is refused."""
    width, count = 0, rows(x)

    def take(shape: Any) -> Tensor:
        nonlocal width
        if shape[0] != count:
            raise _CannotTakeError(f"noise of shape {tuple(shape)}")
        width += math.prod(shape[1:])
        return torch.zeros(shape)

    with ExitStack() as hooks:
        entered = watched(net, hooks)
        try:
            with draw_from(TensorNoise(take)), RandomOpMode(_refuse):
                call(net, untouched(x))
        except _CannotTakeError as error:
            name, module = entered[-1] if entered else ("(net)", net)
            raise VardropError(
                f"Expected noise that can be handed to a graph row by row, but got '{name}' "
                f'({type(module).__name__}), which draws {error}. Freeze with mode="moments", or '
                "predict in Python."
            ) from None
    return width


class _CannotTakeError(Exception):
    """Noise that does not come row by row."""


def _refuse(function: Any, *_: Any) -> NoReturn:
    raise _CannotTakeError(f"by {function.overloadpacket.__name__}")
