"""Recurrent layers and cells with noisy weights, on torch's fused kernels.

The weights are drawn once per call, for every step and every sequence of the batch. The hidden
state is multiplied by the same weights at each step, so separate noise per step (as with local
reparameterisation) would be another model. Recurrent layers draw weights with any estimator.

A gate has one mask per sequence, the same at every step, on the inputs and on the state of every
layer. The steps then run one by one, because torch's kernel multiplies the state of all sequences
by the same weights.

Fortunato, Blundell & Vinyals 2017, "Bayesian recurrent neural networks", sec. 3; Lobacheva,
Chirkova & Vetrov 2017, "Bayesian sparsification of recurrent neural networks", sec. 3; Gal &
Ghahramani 2016, "A theoretically grounded application of dropout in recurrent neural networks",
sec. 4 (masks).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from vardrop._core.errors import VardropError
from vardrop._core.kl_warning import count_pass
from vardrop._core.torch_private import own_parameters, set_parameters
from vardrop.gates import FeatureNoise, Gate
from vardrop.layers.base import Variational
from vardrop.layers.dense import Linear
from vardrop.noisy import Noisy
from vardrop.posteriors import Axes


def _lstm(x: Tensor, h: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
    enter, keep, new, show = (x + h).chunk(4, -1)
    cell = keep.sigmoid() * cell + enter.sigmoid() * new.tanh()
    return show.sigmoid() * cell.tanh(), cell


def _gru(x: Tensor, h: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
    (xr, xz, xn), (hr, hz, hn) = x.chunk(3, -1), h.chunk(3, -1)
    keep, new = (xz + hz).sigmoid(), (xn + (xr + hr).sigmoid() * hn).tanh()
    return new + keep * (hidden - new), cell


# One step by the mode of torch's layer: from the projected input and state, the new state.
STEPS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "LSTM": _lstm,
    "GRU": _gru,
    "RNN_TANH": lambda x, h, hidden, cell: ((x + h).tanh(), cell),
    "RNN_RELU": lambda x, h, hidden, cell: ((x + h).relu(), cell),
}
Part = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]
Sequences = Tensor | PackedSequence
State = Tensor | tuple[Tensor, ...]  # the states of an LSTM are a pair


class Options(Protocol):
    """The options of a recurrent layer, under the names of torch."""

    mode: str
    batch_first: bool
    bidirectional: bool
    dropout: float

    @property
    def hidden_size(self) -> int: ...
    @property
    def proj_size(self) -> int: ...


def run_steps(
    layer: Options, parts: Sequence[Part], input: Sequences, hx: State | None, drops: bool
) -> tuple[Sequences, State]:
    """Run a recurrent layer of torch step by step.

    Args:
        layer: with the options of torch's layer as attributes.
        parts: for every layer and direction the projections of the inputs, of the state before a
            step and of the state after it.
        input: (length, N, inputs), or (N, length, inputs) with `batch_first`, or without N, or a
            packed sequence.
        hx: the first state, or None.
        drops: whether dropout between layers is drawn.

    Returns:
        The outputs and the last state.
    """
    x, lengths = pad_packed_sequence(input) if isinstance(input, PackedSequence) else (input, None)
    batched = x.dim() == 3
    swap = layer.batch_first and batched and lengths is None
    steps = x if batched else x.unsqueeze(1)
    steps = steps.transpose(0, 1) if swap else steps  # (length, N, inputs)
    states: list[Tensor] = []
    if hx is not None:
        states = [hx] if isinstance(hx, Tensor) and layer.mode != "LSTM" else list(hx)
        states = states if batched else [h.unsqueeze(1) for h in states]
    last: list[tuple[Tensor, ...]] = []
    directions = 2 if layer.bidirectional else 1
    for start in range(0, len(parts), directions):
        if start and layer.dropout:
            steps = functional.dropout(steps, layer.dropout, drops)
        runs = [
            _run_part(layer, parts[i], steps, [h[i] for h in states], lengths, i > start)
            for i in range(start, start + directions)
        ]
        steps = torch.cat([outputs for outputs, _ in runs], -1)
        last += [state for _, state in runs]
    hidden = tuple(torch.stack(each) for each in zip(*last, strict=True))
    steps = steps.transpose(0, 1) if swap else steps
    if not batched:
        steps, hidden = steps.squeeze(1), tuple(h.squeeze(1) for h in hidden)
    state = hidden if layer.mode == "LSTM" else hidden[0]
    if lengths is None:
        return steps, state
    return pack_padded_sequence(steps, lengths, enforce_sorted=False), state


def _run_part(
    layer: Options,
    part: Part,
    steps: Tensor,
    state: list[Tensor],
    lengths: Tensor | None,
    reverse: bool,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Run one layer in one direction. Sequences that have ended keep their state.

    Without a `state` it starts at zero.
    """
    enter, read, project = part
    projected = enter(steps)
    if not state:
        sizes = [layer.proj_size or layer.hidden_size, layer.hidden_size]
        state = [projected.new_zeros(steps.shape[1], size) for size in sizes]
    hidden, cell = state[0], state[-1]
    outputs, order = [hidden] * len(steps), range(len(steps))
    for t in reversed(order) if reverse else order:
        new, new_cell = STEPS[layer.mode](projected[t], read(hidden), hidden, cell)
        outputs[t] = new = project(new)
        if lengths is not None:
            on = (t < lengths).unsqueeze(1).to(new.device)
            outputs[t] = torch.where(on, new, 0.0)
            new, new_cell = torch.where(on, new, hidden), torch.where(on, new_cell, cell)
        hidden, cell = new, new_cell
    return torch.stack(outputs), (hidden, cell) if layer.mode == "LSTM" else (hidden,)


_WEIGHT = re.compile(r"weight_(ih|hh|hr)(_l\d+(_reverse)?)?")
_BIAS = re.compile(r"bias_(ih|hh)(_l\d+(_reverse)?)?")


class _Recurrent(Variational):
    plain: ClassVar[type[nn.Module]]  # the torch layer
    sizes: ClassVar[tuple[str, str]] = ("input_size", "hidden_size")
    hidden_size: int
    batch_first: bool
    bidirectional: bool
    dropout: float
    mode: str
    proj_size: int
    _all_weights: list[list[str]]

    def __init_subclass__(cls) -> None:
        modules = (base for base in cls.__mro__ if issubclass(base, nn.Module))
        cls.plain = next(base for base in modules if not issubclass(base, Noisy))

    @classmethod
    def weights_of(cls, layer: nn.Module) -> Mapping[str, Axes]:
        return dict.fromkeys(filter(_WEIGHT.fullmatch, own_parameters(layer)), Linear.axes)

    @classmethod
    def unsupported_reason(cls, layer: nn.Module, gate: FeatureNoise | None) -> str:
        if gate is not None and gate.input_dependent:
            return "a mask per sequence cannot depend on the input of each step"
        if gate is not None and not isinstance(layer, nn.RNNBase):
            return "a cell runs one step, and a mask is for a sequence; use the layer of its name"
        return ""

    def new_gate(self, noise: FeatureNoise) -> Gate:
        """A gate on the inputs and on the state of every layer and direction, in this order."""
        return Gate(noise, sum(w.shape[1] for w in self.gated_weights().values()), -1, "input")

    def gated_weights(self) -> dict[str, Tensor]:
        names = (n for n in self.weight_axes if not n.startswith("weight_hr"))
        return {name: getattr(self, name) for name in names}

    def per_feature(self, factor: Tensor, name: str) -> Tensor:
        weights = self.gated_weights()
        split = factor.split([w.shape[1] for w in weights.values()], -1)
        return split[list(weights).index(name)]

    @property
    def bias_names(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(filter(_BIAS.fullmatch, own_parameters(self)))

    def forward(
        self,
        input: Sequences,
        hx: State | None = None,
        noise: Mapping[str, Tensor] | None = None,
    ) -> Any:  # torch declares it for every layer and cell
        """Run torch's layer with drawn weights while sampling, or for noise by weight name."""
        weights: dict[str, Tensor] = {}
        if self.posterior is not None and (self.is_sampling or noise is not None):
            if self.prior is not None:
                count_pass(self)
            for name, tensor in self.noisy_tensors().items():
                draw = tensor.draw() if noise is None else noise[name]
                weights[name] = tensor.with_shared_variance(self.training).sample(draw)
        if self.gate is not None and self.gate.is_sampling:
            if not isinstance(input, Tensor):
                raise VardropError(
                    "Expected a padded tensor for masks per sequence, but got "
                    f"{type(input).__name__}. Pad the sequences, or switch the noise off."
                )
            count = input.shape[0 if self.batch_first else 1] if input.dim() == 3 else 1
            masks = self.gate(input.new_ones(count, self.gate.units))  # the same at every step
            parts = [self._part(names, weights, masks) for names in self._all_weights]
            return run_steps(self, parts, input, hx, self.training or self.is_sampling)
        if self.gate is not None and (mean := self.gate.unit_mean()) is not None:
            for name, weight in self.gated_weights().items():
                factor = self.per_feature(mean, name).to(weight.dtype)
                weights[name] = weights.get(name, weight) * factor
        if not weights:
            return super().forward(input, hx)  # type: ignore[misc]
        return self.plain.forward(self._with(weights), input, hx)

    def _part(self, names: list[str], drawn: Mapping[str, Tensor], masks: Tensor) -> Part:
        """The masked projections of inputs and state of one layer in one direction."""
        weights = {name: drawn.get(name, getattr(self, name)) for name in names}
        w_in, w_state, *others = names
        b_in, b_state = [weights[n] for n in others if n.startswith("bias_")] or [None, None]
        projection = next((weights[n] for n in others if n.startswith("weight_hr")), None)
        mask_in, mask_state = (self.per_feature(masks, n) for n in (w_in, w_state))
        return (
            lambda x: functional.linear(x * mask_in, weights[w_in], b_in),
            lambda h: functional.linear(h * mask_state, weights[w_state], b_state),
            lambda h: h if projection is None else functional.linear(h, projection),
        )

    def _reset_means(self) -> None:
        names = {*self.weight_axes, *self.bias_names}
        twin = self._with({})
        means = {name: p for name, p in own_parameters(self).items() if name in names}
        set_parameters(vars(twin), means)
        self.plain.reset_parameters(twin)  # type: ignore[attr-defined]

    def _with(self, drawn: Mapping[str, Tensor]) -> nn.Module:
        """A copy of the torch layer with other weights, for one call. The layer is unchanged."""
        twin = object.__new__(self.plain)
        state = vars(twin)
        state.update(vars(self), training=self.training or self.is_sampling)
        set_parameters(state, {**own_parameters(self), **drawn})
        return twin


class RNN(_Recurrent, nn.RNN):
    """`nn.RNN` with posteriors on its weights.

    Args:
        *args: the arguments of `nn.RNN`.
        **kwargs: its keyword arguments, and `posterior`, `prior`, `estimator`, `gate` and
            `noisy_bias`, as in `Variational`.
    """


class LSTM(_Recurrent, nn.LSTM):
    """`nn.LSTM` with posteriors on its weights: layers, directions, projections, packed sequences.

    Args:
        *args: the arguments of `nn.LSTM`.
        **kwargs: its keyword arguments, and `posterior`, `prior`, `estimator`, `gate` and
            `noisy_bias`, as in `Variational`.

    >>> import torch, vardrop as vd
    >>> layer = vd.convert(torch.nn.LSTM(4, 3, batch_first=True), vd.sparse_vd())
    >>> output, (hidden, cell) = layer(torch.zeros(2, 5, 4))
    >>> output.shape, sorted(vd.log_alpha(layer))
    (torch.Size([2, 5, 3]), ['weight_hh_l0', 'weight_ih_l0'])
    """


class GRU(_Recurrent, nn.GRU):
    """`nn.GRU` with posteriors on its weights.

    Args:
        *args: the arguments of `nn.GRU`.
        **kwargs: its keyword arguments, and `posterior`, `prior`, `estimator`, `gate` and
            `noisy_bias`, as in `Variational`.
    """


class RNNCell(_Recurrent, nn.RNNCell):
    """`nn.RNNCell` with posteriors on its weights, drawn at every call.

    Args:
        *args: the arguments of `nn.RNNCell`.
        **kwargs: its keyword arguments, and `posterior`, `prior`, `estimator`, `gate` and
            `noisy_bias`, as in `Variational`.
    """


class LSTMCell(_Recurrent, nn.LSTMCell):
    """`nn.LSTMCell` with posteriors on its weights, drawn at every call.

    Args:
        *args: the arguments of `nn.LSTMCell`.
        **kwargs: its keyword arguments, and `posterior`, `prior`, `estimator`, `gate` and
            `noisy_bias`, as in `Variational`.
    """


class GRUCell(_Recurrent, nn.GRUCell):
    """`nn.GRUCell` with posteriors on its weights, drawn at every call.

    Args:
        *args: the arguments of `nn.GRUCell`.
        **kwargs: its keyword arguments, and `posterior`, `prior`, `estimator`, `gate` and
            `noisy_bias`, as in `Variational`.
    """
