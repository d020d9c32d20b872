"""Recurrent layers as plain dense layers, step by step, and back into those of torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from vardrop.layers.dense import dense
from vardrop.layers.recurrent import STEPS


class Recurring(nn.Linear):
    """A dense layer that reads a state at every step: a part of `Unrolled`."""


class Unrolled(nn.Module):
    """A recurrent layer of torch as dense layers, step by step, so that its units can be followed.

    For every layer and direction `ih` reads the input, `hh` the state and `hr`, where there is one,
    projects it. Arguments and outputs are torch's, packed sequences included.

    Args:
        layer: an `nn.RNN`, `nn.LSTM` or `nn.GRU`.

    >>> import torch
    >>> layer, x = torch.nn.GRU(3, 4), torch.randn(5, 2, 3)
    >>> torch.allclose(Unrolled(layer)(x)[0], layer(x)[0], atol=1e-6)
    True
    """

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.kind, self.mode = type(layer), layer.mode
        self.dropout, self.batch_first = layer.dropout, layer.batch_first
        self.directions, self.num_layers = 1 + layer.bidirectional, layer.num_layers
        self.suffixes = [names[0].removeprefix("weight_ih") for names in layer._all_weights]
        for end in self.suffixes:
            self.add_module(f"ih{end}", _dense(layer, f"ih{end}", nn.Linear))
            self.add_module(f"hh{end}", _dense(layer, f"hh{end}", Recurring))
            if layer.proj_size:
                self.add_module(f"hr{end}", _dense(layer, f"hr{end}", Recurring))
        self.train(layer.training)

    def origins(self) -> dict[str, tuple[str, int, int]]:
        """Of which tensor of torch's layer a weight is which of how many equal parts."""
        return {f"{name}.weight": (f"weight_{name}", 0, 1) for name, _ in self.named_children()}

    def alike(self) -> list[list[str]]:
        """Layers that have to keep as many outputs, because torch has one size for them all."""
        groups = ([f"{part}{end}" for end in self.suffixes] for part in ("ih", "hr"))
        return [[n for n in names if n in self._modules] for names in groups]

    def together(self) -> nn.RNNBase:
        """Torch's layer with these weights."""
        parts: dict[str, Any] = dict(self.named_children())
        first, state = parts["ih_l0"], parts["hh_l0"]
        gates = _GATES[self.mode]
        layer = resized(
            self,
            input_size=first.in_features,
            hidden_size=first.out_features // gates,
            proj_size=state.in_features if "hr_l0" in parts else 0,
            bias=any(part.bias is not None for part in parts.values()),
        )
        for name, part in parts.items():
            setattr(layer, f"weight_{name}", part.weight)
            if hasattr(layer, f"bias_{name}"):
                none = part.bias is None
                bias = nn.Parameter(part.weight.detach().new_zeros(part.out_features))
                setattr(layer, f"bias_{name}", bias if none else part.bias)
        return layer.train(self.training)

    def steps(self, output: Any) -> int:
        """How many steps its outputs have."""
        if isinstance(output, PackedSequence):
            return len(output.batch_sizes)
        return output.shape[1 if self.batch_first and output.dim() == 3 else 0]

    def forward(self, input: Any, hx: Any = None) -> Any:
        """The outputs and the last state."""
        lengths = None
        x = input
        if isinstance(input, PackedSequence):
            x, lengths = pad_packed_sequence(input)
        batched, axis = x.dim() == 3, 0 if self.batch_first else 1
        steps = x if batched else x.unsqueeze(axis)
        if self.batch_first and lengths is None:
            steps = steps.transpose(0, 1)  # (length, N, inputs)
        given = None if hx is None else (hx if self.mode == "LSTM" else (hx,))
        if given is not None and not batched:
            given = tuple(h.unsqueeze(1) for h in given)
        y, state = self._layers(steps, given, lengths)
        if lengths is not None:
            y = pack_padded_sequence(y, lengths, enforce_sorted=False)
        elif self.batch_first:
            y = y.transpose(0, 1)
        if not batched:
            y, state = y.squeeze(axis), tuple(h.squeeze(1) for h in state)
        return y, state if self.mode == "LSTM" else state[0]

    def _layers(self, steps: Tensor, given: Any, lengths: Tensor | None) -> Any:
        last: list[tuple[Tensor, ...]] = []
        for number in range(self.num_layers):
            if number and self.dropout:
                steps = functional.dropout(steps, self.dropout, self.training)
            each = []
            for direction in range(self.directions):
                index = number * self.directions + direction
                start = None if given is None else [h[index] for h in given]
                y, state = self._unrolled(index, steps, start, lengths)
                each.append(y)
                last.append(state)
            steps = torch.cat(each, -1)
        return steps, tuple(torch.stack(parts) for parts in zip(*last, strict=True))

    def _unrolled(
        self, index: int, steps: Tensor, start: Any, lengths: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """One layer in one direction; sequences that have ended keep their state."""
        end = self.suffixes[index]
        enter, read = self.get_submodule(f"ih{end}"), self.get_submodule(f"hh{end}")
        project = self._modules.get(f"hr{end}")
        projected: Tensor = enter(steps)
        hidden, cell = self._start(projected, read, start)
        outputs = [hidden] * len(steps)
        order = range(len(steps))
        for t in reversed(order) if end.endswith("reverse") else order:
            new, new_cell = STEPS[self.mode](projected[t], read(hidden), hidden, cell)
            new = new if project is None else project(new)
            if lengths is None:
                hidden, cell = new, new_cell
                outputs[t] = hidden
                continue
            on = (t < lengths).unsqueeze(1).to(new.device)
            hidden, cell = torch.where(on, new, hidden), torch.where(on, new_cell, cell)
            outputs[t] = torch.where(on, new, 0.0)
        return torch.stack(outputs), (hidden, cell) if self.mode == "LSTM" else (hidden,)

    def _start(self, projected: Tensor, read: Any, start: Any) -> tuple[Tensor, Tensor]:
        if start is not None:
            return start[0], start[-1]
        rows, units = projected.shape[1], projected.shape[2] // _GATES[self.mode]
        return projected.new_zeros(rows, read.in_features), projected.new_zeros(rows, units)


_GATES = {"LSTM": 4, "GRU": 3, "RNN_TANH": 1, "RNN_RELU": 1}  # rows of a weight per unit


def _dense(layer: nn.RNNBase, name: str, kind: type[nn.Linear]) -> nn.Linear:
    """One weight of a recurrent layer, with its bias, as a dense layer."""
    weight, bias = getattr(layer, f"weight_{name}"), getattr(layer, f"bias_{name}", None)
    return dense(weight, bias, kind)


def resized(
    like: Any, *, input_size: int, hidden_size: int, proj_size: int, bias: bool
) -> nn.RNNBase:
    """A recurrent layer of torch in other sizes, like another or one that is unrolled.

    Its tensors are on the meta device.
    """
    unrolled = isinstance(like, Unrolled)
    kind = like.kind if unrolled else type(like)
    more = {"proj_size": proj_size} if like.mode == "LSTM" else {}
    if like.mode.startswith("RNN"):
        more = {"nonlinearity": like.mode.removeprefix("RNN_").lower()}
    found: nn.RNNBase = kind(
        input_size,
        hidden_size,
        like.num_layers,
        bias=bias,
        batch_first=like.batch_first,
        dropout=like.dropout,
        bidirectional=like.directions == 2 if unrolled else like.bidirectional,
        device="meta",
        **more,
    )
    return found
