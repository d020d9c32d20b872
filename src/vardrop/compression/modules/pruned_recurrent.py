"""Recurrent layers as plain dense layers, step by step, and back to torch's layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from vardrop.layers.dense import dense
from vardrop.layers.recurrent import State, run_steps

RecurrentOutput = tuple[Tensor | PackedSequence, State]


class Recurring(nn.Linear):
    """A dense layer that reads a state at every step: a part of `Unrolled`."""


class Unrolled(nn.Module):
    """A recurrent layer of torch as dense layers, step by step, so that its units can be followed.

    For every layer and direction, `ih` reads the input, `hh` reads the state, and `hr` projects it
    if there is a projection. Arguments and outputs are the same as in torch, also for packed
    sequences.

    Args:
        layer: an `nn.RNN`, `nn.LSTM` or `nn.GRU`.

    >>> import torch
    >>> layer, x = torch.nn.GRU(3, 4), torch.randn(5, 2, 3)
    >>> torch.allclose(Unrolled(layer)(x)[0], layer(x)[0], atol=1e-6)
    True
    """

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.make, self.mode = recurrent_like(layer), layer.mode
        self.dropout, self.batch_first = layer.dropout, layer.batch_first
        self.bidirectional, self.num_layers = layer.bidirectional, layer.num_layers
        self.proj_size = layer.proj_size
        self.suffixes = [names[0].removeprefix("weight_ih") for names in layer._all_weights]
        for end in self.suffixes:
            for name in ("ih", "hh", "hr") if layer.proj_size else ("ih", "hh"):
                weight = getattr(layer, f"weight_{name}{end}")
                bias = getattr(layer, f"bias_{name}{end}", None)
                kind = nn.Linear if name == "ih" else Recurring
                self.add_module(f"{name}{end}", dense(weight, bias, kind))
        self.train(layer.training)

    def recompose(self) -> nn.RNNBase:
        """Torch's layer with these weights."""
        parts = {n: part for n, part in self.named_children() if isinstance(part, nn.Linear)}
        first, bias = parts["ih_l0"], any(part.bias is not None for part in parts.values())
        layer = self.make(first.in_features, self.hidden_size, bias=bias)
        for name, part in parts.items():
            setattr(layer, f"weight_{name}", part.weight)
            if hasattr(layer, f"bias_{name}"):
                zeros = nn.Parameter(part.weight.detach().new_zeros(part.out_features))
                setattr(layer, f"bias_{name}", zeros if part.bias is None else part.bias)
        return layer.train(self.training)

    def forward(self, input: Tensor | PackedSequence, hx: State | None = None) -> RecurrentOutput:
        """The outputs and the last state."""
        modules = dict(self.named_children())
        parts = [
            (modules[f"ih{end}"], modules[f"hh{end}"], modules.get(f"hr{end}", nn.Identity()))
            for end in self.suffixes
        ]
        return run_steps(self, parts, input, hx, self.training)

    @property
    def hidden_size(self) -> int:
        """The number of units of the state before a projection."""
        return self.get_parameter("hr_l0.weight" if self.proj_size else "hh_l0.weight").shape[1]


def recurrent_like(layer: nn.RNNBase) -> Callable[..., nn.RNNBase]:
    """A constructor of layers with the options of a recurrent layer, on the meta device.

    It takes the input size, the hidden size and `bias`.
    """
    names = ["num_layers", "batch_first", "dropout", "bidirectional"]
    names += {"GRU": [], "LSTM": ["proj_size"]}.get(layer.mode, ["nonlinearity"])
    return partial(type(layer), device="meta", **{name: getattr(layer, name) for name in names})
