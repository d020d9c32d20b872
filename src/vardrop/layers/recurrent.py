"""Recurrent layers and cells with noisy weights, on torch's fused kernels.

The weights are drawn once per call, and one draw serves every step and every sequence of the
batch: the hidden state is multiplied by the same weights at each step, so noise of its own per step
would be another model (and local reparameterisation with it). Whatever estimator a recipe names,
recurrent layers draw weights.

Fortunato, Blundell & Vinyals 2017, "Bayesian recurrent neural networks", sec. 3; Lobacheva,
Chirkova & Vetrov 2017, "Bayesian sparsification of recurrent neural networks", sec. 3.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from vardrop.gates import FeatureNoise
from vardrop.layers.base import Variational
from vardrop.layers.dense import Linear
from vardrop.posteriors import Axes

_WEIGHT = re.compile(r"weight_(ih|hh|hr)(_l\d+(_reverse)?)?")
_BIAS = re.compile(r"bias_(ih|hh)(_l\d+(_reverse)?)?")


class _Recurrent(Variational):
    plain: ClassVar[type[nn.Module]]  # the torch layer
    hidden_size: int
    input_size: int

    @classmethod
    def weights_of(cls, layer: nn.Module) -> Mapping[str, Axes]:
        return dict.fromkeys(filter(_WEIGHT.fullmatch, layer._parameters), Linear.axes)

    @classmethod
    def refuse(cls, layer: nn.Module, gate: FeatureNoise | None) -> str:
        if gate is not None:
            return (
                "a gate on its inputs alone would change from step to step; use "
                "vardrop.recurrent_dropout"
            )
        return ""

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
        if self.posterior is None or not (self.is_sampling or noise is not None):
            return super().forward(input, hx)  # type: ignore[misc]
        if self.prior is not None:
            self.count_pass()
        drawn = {}
        for name, tensor in self.noisy_tensors().items():
            own = tensor.draw() if noise is None else noise[name]
            drawn[name] = tensor.in_step().sample(own)
        return self.plain.forward(self._with(drawn), input, hx)

    def _reset_means(self) -> None:
        own = {*self.weight_axes, *self.bias_names}
        twin = self._with({})
        vars(twin)["_parameters"] = {n: p for n, p in self._parameters.items() if n in own}
        self.plain.reset_parameters(twin)  # type: ignore[attr-defined]

    def _with(self, drawn: Mapping[str, Tensor]) -> nn.Module:
        """The torch layer with other weights: a bare object for one call, nothing is changed."""
        twin = object.__new__(self.plain)
        state = vars(twin)
        state.update(vars(self))
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
