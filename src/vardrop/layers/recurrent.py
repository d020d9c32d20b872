"""Recurrent layers and cells with noisy weights, on torch's fused kernels.

The weights are drawn once per call, and one draw serves every step and every sequence of the
batch: the hidden state is multiplied by the same weights at each step, so noise of its own per step
would be another model (and local reparameterisation with it). Whatever estimator a recipe names,
recurrent layers draw weights.

A gate has one mask per sequence, the same at every step, on the inputs and on the state of every
layer: dropout for recurrent nets. The steps then run one by one, because torch's kernel multiplies
the state of all sequences by the same weights.

Fortunato, Blundell & Vinyals 2017, "Bayesian recurrent neural networks", sec. 3; Lobacheva,
Chirkova & Vetrov 2017, "Bayesian sparsification of recurrent neural networks", sec. 3; Gal &
Ghahramani 2016, "A theoretically grounded application of dropout in recurrent neural networks",
sec. 4 (masks).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from vardrop._core.errors import VardropError
from vardrop.gates import FeatureNoise, Gate, Side
from vardrop.layers.base import Variational
from vardrop.layers.dense import Linear
from vardrop.posteriors import Axes


def _lstm(x: Tensor, h: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
    enter, keep, new, show = (x + h).chunk(4, -1)
    cell = keep.sigmoid() * cell + enter.sigmoid() * new.tanh()
    return show.sigmoid() * cell.tanh(), cell


def _gru(x: Tensor, h: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
    (xr, xz, xn), (hr, hz, hn) = x.chunk(3, -1), h.chunk(3, -1)
    keep, new = (xz + hz).sigmoid(), (xn + (xr + hr).sigmoid() * hn).tanh()
    return new + keep * (hidden - new), cell


def _rnn(activation: Callable[[Tensor], Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    return lambda x, h, hidden, cell: (activation(x + h), cell)


# One step by the mode of torch's layer: from the projected input and state, the new state.
STEPS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "LSTM": _lstm,
    "GRU": _gru,
    "RNN_TANH": _rnn(torch.tanh),
    "RNN_RELU": _rnn(torch.relu),
}
_WEIGHT = re.compile(r"weight_(ih|hh|hr)(_l\d+(_reverse)?)?")
_BIAS = re.compile(r"bias_(ih|hh)(_l\d+(_reverse)?)?")


class _Recurrent(Variational):
    plain: ClassVar[type[nn.Module]]  # the torch layer
    hidden_size: int
    input_size: int
    batch_first: bool
    bidirectional: bool
    dropout: float
    mode: str
    proj_size: int
    _all_weights: list[list[str]]

    @classmethod
    def weights_of(cls, layer: nn.Module) -> Mapping[str, Axes]:
        return dict.fromkeys(filter(_WEIGHT.fullmatch, layer._parameters), Linear.axes)

    @classmethod
    def refuse(cls, layer: nn.Module, gate: FeatureNoise | None) -> str:
        if gate is not None and gate.input_dependent:
            return "a mask per sequence cannot depend on what comes at each step"
        if gate is not None and not isinstance(layer, nn.RNNBase):
            return "a cell sees one step, and a mask is for a sequence; use the layer of its name"
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

    @torch.no_grad()
    def scale_units(self, factor: Tensor, side: Side) -> None:
        """Multiply every input, and the state, by one number, in the weights that read it."""
        for name, weight in self.gated_weights().items():
            weight.mul_(self.per_feature(factor, name))

    @property
    def bias_names(self) -> tuple[str, ...]:
        return tuple(filter(_BIAS.fullmatch, self._parameters))

    @property
    def inputs(self) -> int:
        return self.input_size

    @property
    def outputs(self) -> int:
        return self.hidden_size

    def forward(self, input: Any, hx: Any = None, noise: Mapping[str, Tensor] | None = None) -> Any:
        """Torch's layer with drawn weights while sampling, or for noise by the name of a weight."""
        weights: dict[str, Tensor] = {}
        if self.posterior is not None and (self.is_sampling or noise is not None):
            weights = self._drawn_weights(noise)
        if self.gate is None:
            return self._called(weights, input, hx)
        if self.gate.is_sampling:
            return self._masked(weights, input, hx)
        mean = self.gate.unit_mean()
        if mean is not None:
            for name, weight in self.gated_weights().items():
                factor = self.per_feature(mean, name).to(weight.dtype)
                weights[name] = weights.get(name, weight) * factor
        return self._called(weights, input, hx)

    def _drawn_weights(self, noise: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
        if self.prior is not None:
            self.count_pass()
        found = {}
        for name, tensor in self.noisy_tensors().items():
            own = tensor.draw() if noise is None else noise[name]
            found[name] = tensor.in_step(self.training).sample(own)
        return found

    def _called(self, weights: Mapping[str, Tensor], input: Any, hx: Any) -> Any:
        """Torch's own kernel, on other weights where there are some."""
        if not weights:
            return super().forward(input, hx)  # type: ignore[misc]
        return self.plain.forward(self._with(weights), input, hx)

    def _masked(self, weights: Mapping[str, Tensor], input: Any, hx: Any) -> Any:
        """One mask per sequence, the same at every step, on inputs and on the state."""
        assert self.gate is not None
        if not isinstance(input, Tensor):
            raise VardropError(
                "Expected a padded tensor where masks are drawn per sequence, but got "
                f"{type(input).__name__}. Pad the sequences, or switch the noise off."
            )
        batched, axis = input.dim() == 3, 0 if self.batch_first else 1
        x = input if batched else input.unsqueeze(axis)
        outputs = x.transpose(0, 1) if self.batch_first else x  # (length, N, inputs)
        masks = self.gate(outputs.new_ones(outputs.shape[1], self.gate.units))
        states = self._states(outputs, hx, batched)
        last: list[tuple[Tensor, ...]] = []
        for layer, names in enumerate(self._layers()):
            if layer and self.dropout:
                outputs = functional.dropout(outputs, self.dropout, self._drops)
            each = []
            for reverse, own in enumerate(names):
                found = {n: weights.get(n, getattr(self, n)) for n in own}
                view = outputs.flip(0) if reverse else outputs
                y, state = self._unrolled(found, view, [s[len(last)] for s in states], masks)
                each.append(y.flip(0) if reverse else y)
                last.append(state)
            outputs = torch.cat(each, -1)
        y = outputs.transpose(0, 1) if self.batch_first else outputs
        hidden = tuple(torch.stack(parts) for parts in zip(*last, strict=True))
        if not batched:
            y, hidden = y.squeeze(axis), tuple(h.squeeze(1) for h in hidden)
        return y, hidden if self._has_cell else hidden[0]

    def _layers(self) -> list[list[list[str]]]:
        """The names of the weights by layer and direction."""
        flat, per_layer = self._all_weights, 2 if self.bidirectional else 1
        return [flat[i : i + per_layer] for i in range(0, len(flat), per_layer)]

    @property
    def _has_cell(self) -> bool:
        return self.mode == "LSTM"

    def _states(self, steps: Tensor, hx: Any, batched: bool) -> list[Tensor]:
        """The initial state (and cell), (layers, N, units)."""
        if hx is not None:
            given = list(hx) if self._has_cell else [hx]
            return given if batched else [h.unsqueeze(1) for h in given]
        sizes = [self.proj_size or self.hidden_size, *([self.hidden_size] * self._has_cell)]
        return [steps.new_zeros(len(self._all_weights), steps.shape[1], size) for size in sizes]

    def _unrolled(
        self, weights: Mapping[str, Tensor], steps: Tensor, state: list[Tensor], masks: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """One layer in one direction: its outputs and its last state."""
        w_in, w_state, *others = weights
        biases: list[Any] = [weights[n] for n in others if n.startswith("bias_")] or [None, None]
        projection = next((weights[n] for n in others if n.startswith("weight_hr")), None)
        mask_in, mask_state = (self.per_feature(masks, n) for n in (w_in, w_state))
        projected = functional.linear(steps * mask_in, weights[w_in], biases[0])
        hidden, cell, outputs = state[0], state[-1], []
        for step in projected:
            from_state = functional.linear(hidden * mask_state, weights[w_state], biases[1])
            hidden, cell = STEPS[self.mode](step, from_state, hidden, cell)
            if projection is not None:
                hidden = functional.linear(hidden, projection)
            outputs.append(hidden)
        return torch.stack(outputs), (hidden, cell) if self._has_cell else (hidden,)

    @property
    def _drops(self) -> bool:
        """Whether dropout between layers is drawn."""
        return self.training or self.is_sampling

    def _reset_means(self) -> None:
        own = {*self.weight_axes, *self.bias_names}
        twin = self._with({})
        vars(twin)["_parameters"] = {n: p for n, p in self._parameters.items() if n in own}
        self.plain.reset_parameters(twin)  # type: ignore[attr-defined]

    def _with(self, drawn: Mapping[str, Tensor]) -> nn.Module:
        """The torch layer with other weights: a bare object for one call, nothing is changed."""
        twin = object.__new__(self.plain)
        state = vars(twin)
        state.update(vars(self), training=self._drops)
        state["_parameters"] = {**self._parameters, **drawn}
        if "_flat_weights_names" in state:
            names = state["_flat_weights_names"]
            state["_flat_weights"] = [state["_parameters"].get(name) for name in names]
            # By which torch would notice that these are not the parameters.
            state["_flat_weight_refs"] = [None] * len(names)
        return twin


class RNN(_Recurrent, nn.RNN):
    """`nn.RNN` with posteriors on its weights."""

    plain: ClassVar[type[nn.Module]] = nn.RNN


class LSTM(_Recurrent, nn.LSTM):
    """`nn.LSTM` with posteriors on its weights: layers, directions, projections, packed sequences.

    >>> import torch, vardrop as vd
    >>> layer = vd.convert(torch.nn.LSTM(4, 3, batch_first=True), vd.sparse_vd())
    >>> output, (hidden, cell) = layer(torch.zeros(2, 5, 4))
    >>> output.shape, sorted(vd.log_alpha(layer))
    (torch.Size([2, 5, 3]), ['weight_hh_l0', 'weight_ih_l0'])
    """

    plain: ClassVar[type[nn.Module]] = nn.LSTM


class GRU(_Recurrent, nn.GRU):
    """`nn.GRU` with posteriors on its weights."""

    plain: ClassVar[type[nn.Module]] = nn.GRU


class RNNCell(_Recurrent, nn.RNNCell):
    """`nn.RNNCell` with posteriors on its weights, drawn anew at every call."""

    plain: ClassVar[type[nn.Module]] = nn.RNNCell


class LSTMCell(_Recurrent, nn.LSTMCell):
    """`nn.LSTMCell` with posteriors on its weights, drawn anew at every call."""

    plain: ClassVar[type[nn.Module]] = nn.LSTMCell


class GRUCell(_Recurrent, nn.GRUCell):
    """`nn.GRUCell` with posteriors on its weights, drawn anew at every call."""

    plain: ClassVar[type[nn.Module]] = nn.GRUCell
