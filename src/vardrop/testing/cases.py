"""The table of layers and recipes that the contract is run on.

The name of a recipe begins with the function of `vardrop.recipes` that makes it, or with "own" if
there is none. Rows are needed for arguments other than the defaults: the recipe of every function
with its default arguments is added, unless a row has the name of the function or is equal to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vardrop import recipes as r
from vardrop.estimators import flipout, per_example, weight_sample
from vardrop.gates import BinaryDropout, GaussianDropout
from vardrop.layers import NOISY_TYPES
from vardrop.posteriors import AdditiveGaussian, Bernoulli
from vardrop.priors import ARD, LogUniform, MonteCarlo, Normal, ScaleMixture, StudentT
from vardrop.recipes import HeadRecipe, Recipe, SwitchDropout


class Layer(NamedTuple):
    """A plain layer to convert: how to make it, and the shapes of its inputs.

    Args:
        make: makes the layer.
        shapes: of the inputs.
        indices: if not None, the inputs are indices below this number.
        same: whether all inputs are one tensor.
    """

    make: Callable[[], nn.Module]
    shapes: tuple[tuple[int, ...], ...]
    indices: int | None = None
    same: bool = False

    def inputs(self) -> tuple[Tensor, ...]:
        """The same inputs at every call."""
        generator = torch.Generator().manual_seed(1)
        if self.indices is not None:
            return tuple(torch.randint(self.indices, s, generator=generator) for s in self.shapes)
        inputs = tuple(torch.randn(s, generator=generator) for s in self.shapes)
        return inputs[:1] * len(inputs) if self.same else inputs


LAYERS: dict[str, Layer] = {
    "linear": Layer(lambda: nn.Linear(6, 4), ((5, 6),)),
    "linear_sequence": Layer(lambda: nn.Linear(6, 4, bias=False), ((5, 3, 6),)),
    "linear_unbatched": Layer(lambda: nn.Linear(6, 4), ((6,),)),
    "bilinear": Layer(lambda: nn.Bilinear(4, 3, 5), ((6, 4), (6, 3))),
    "embedding": Layer(lambda: nn.Embedding(7, 4), ((5, 3),), indices=7),
    "embedding_padding": Layer(lambda: nn.Embedding(7, 4, padding_idx=0), ((5, 3),), indices=7),
    "conv1d": Layer(lambda: nn.Conv1d(4, 6, 3, padding=1, groups=2), ((3, 4, 8),)),
    "conv2d": Layer(lambda: nn.Conv2d(4, 6, 3, stride=2, dilation=2), ((3, 4, 9, 9),)),
    "conv2d_reflect": Layer(
        lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), ((2, 2, 5, 5),)
    ),
    "conv2d_depthwise": Layer(
        lambda: nn.Conv2d(4, 8, 3, padding="same", groups=4, bias=False), ((2, 4, 5, 5),)
    ),
    "conv2d_unbatched": Layer(lambda: nn.Conv2d(2, 3, 3), ((2, 5, 5),)),
    "conv3d": Layer(
        lambda: nn.Conv3d(2, 3, 2, padding=1, padding_mode="circular"), ((2, 2, 3, 3, 3),)
    ),
    "transposed1d": Layer(lambda: nn.ConvTranspose1d(4, 6, 3, groups=2), ((2, 4, 5),)),
    "transposed2d": Layer(
        lambda: nn.ConvTranspose2d(3, 4, 3, stride=2, padding=1, output_padding=1), ((2, 3, 4, 4),)
    ),
    "transposed3d": Layer(lambda: nn.ConvTranspose3d(2, 3, 2), ((2, 2, 3, 3, 3),)),
    "self_attention": Layer(
        lambda: nn.MultiheadAttention(6, 2, batch_first=True), ((3, 4, 6),) * 3, same=True
    ),
    "cross_attention": Layer(
        lambda: nn.MultiheadAttention(6, 3, bias=False), ((4, 3, 6), (5, 3, 6), (5, 3, 6))
    ),
    "separate_attention": Layer(
        lambda: nn.MultiheadAttention(6, 2, kdim=4, vdim=5, batch_first=True, add_bias_kv=True),
        ((3, 4, 6), (3, 5, 4), (3, 5, 5)),
    ),
    "rnn": Layer(lambda: nn.RNN(4, 3, 2, nonlinearity="relu"), ((5, 3, 4),)),
    "lstm": Layer(lambda: nn.LSTM(4, 3, bidirectional=True, batch_first=True), ((3, 5, 4),)),
    "gru": Layer(lambda: nn.GRU(4, 3, bias=False), ((5, 3, 4),)),
    "lstm_cell": Layer(lambda: nn.LSTMCell(4, 3), ((5, 4),)),
    "gru_cell": Layer(lambda: nn.GRUCell(4, 3), ((5, 4),)),
    "rnn_cell": Layer(lambda: nn.RNNCell(4, 3), ((5, 4),)),
}

RECIPES: dict[str, Recipe | SwitchDropout] = {
    "bayes_by_backprop-weight_sample": r.bayes_by_backprop(estimator=weight_sample),
    "bayes_by_backprop-per_example": r.bayes_by_backprop(estimator=per_example),
    "bayes_by_backprop-flipout": r.bayes_by_backprop(estimator=flipout),
    "bayes_by_backprop-mixture": r.bayes_by_backprop(MonteCarlo(ScaleMixture(), samples=2)),
    "bayes_by_backprop-student": r.bayes_by_backprop(StudentT(3.0)),
    "bayes_by_backprop-learned_prior": r.bayes_by_backprop(Normal(learned=True)),
    "bayes_by_backprop-pretrained": r.bayes_by_backprop(Normal(mean="pretrained", std=0.1)),
    "own-noisy_bias": Recipe(AdditiveGaussian(), Normal(), noisy_bias=True),
    "own-no_prior": Recipe(AdditiveGaussian(log_sigma2=-3.0)),
    "own-dropout_as_weights": Recipe(Bernoulli(0.3, per="input"), Normal(), per_example),
    "gaussian_dropout-b": r.gaussian_dropout(0.5, kind="B"),
    "variational_dropout-b_weight": r.variational_dropout("B", per="weight"),
    "variational_dropout-b_input": r.variational_dropout("B", per="input"),
    "variational_dropout-b_output": r.variational_dropout("B", per="output", prior=ARD()),
    "variational_dropout-b_layer": r.variational_dropout(
        "B", per="layer", max_alpha=1.0, prior=LogUniform("cubic")
    ),
    "sparse_vd-sigmoid": r.sparse_vd(form="sigmoid"),
    "variance_layer-sign": r.variance_layer("sign"),
    "variance_layer-uniform": r.variance_layer("uniform"),
    "dropconnect": r.dropconnect(0.3),
    "gaussian_dropout-a": r.gaussian_dropout(0.5, kind="A"),
    "variational_dropout-a": r.variational_dropout("A"),
    "variational_dropout-a2_layer": r.variational_dropout("A2", per="layer"),
    "binary_dropout": r.binary_dropout(0.3),
    "own-binary_channel": Recipe(gate=BinaryDropout(0.3, "channel", length_scale=0.1)),
    "own-binary_example": Recipe(gate=BinaryDropout(0.3, "example")),
    "own-gaussian_channel": Recipe(gate=GaussianDropout(0.5, granularity="channel")),
    "mc_dropout": r.mc_dropout(0.2, length_scale=0.1),
    "dependent_beta_bernoulli": r.dependent_beta_bernoulli(joint=True),
    "structured_pruning": r.structured_pruning(log_sigma=-1.0),
    "l0": r.l0(drop_rate=0.2),
}

RECURRENT: dict[str, Recipe] = {  # for recurrent layers only
    "recurrent_dropout": r.recurrent_dropout(),
    "recurrent_dropout-learned": r.recurrent_dropout(learned=True),
}

HEADS: dict[str, HeadRecipe] = {"dropmax-prior": r.dropmax(inference="p")}

_NAMED: dict[str, Any] = {**RECIPES, **RECURRENT, **HEADS}
for _name, _make in r.METHODS.items():
    if _name not in _NAMED and (_recipe := _make()) not in _NAMED.values():
        _table: dict[str, Any] = HEADS if isinstance(_recipe, HeadRecipe) else RECIPES
        _table[_name] = _recipe


def cases() -> Iterator[tuple[str, str]]:
    """The names of every layer with every recipe that it supports."""
    for layer, case in LAYERS.items():
        plain = case.make()
        for name, recipe in (RECIPES | RECURRENT).items():
            if not NOISY_TYPES[type(plain)].unsupported_reason(plain, recipe.gate):
                yield layer, name
