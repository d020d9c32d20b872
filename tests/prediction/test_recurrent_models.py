"""Predictions of models with packed sequences and of recurrent layers with gates."""

import pytest
import torch
from torch import nn

import vardrop as vd


class Packed(nn.Module):
    """Embeds tokens, packs them by length and classifies the last state of an LSTM."""

    def __init__(self):
        super().__init__()
        self.embed, self.last = nn.Embedding(20, 8), nn.Linear(12, 3)
        self.recurrent = nn.LSTM(8, 12, 2, batch_first=True)

    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embed(x), lengths, batch_first=True, enforce_sorted=False
        )
        return self.last(self.recurrent(packed)[1][0][-1])


BATCH = {
    "x": torch.randint(20, (4, 9), generator=torch.Generator().manual_seed(0)),
    "lengths": torch.tensor([9, 4, 7, 2]),
}
RECIPES = {"bayes_by_backprop": vd.bayes_by_backprop(), "sparse_vd": vd.sparse_vd()}


class Padded(Packed):
    def forward(self, x, lengths):
        return self.last(self.recurrent(self.embed(x))[1][0][-1])


def model(recipe):
    torch.manual_seed(0)
    return vd.convert(Packed(), RECIPES[recipe]).eval()


@pytest.mark.parametrize("recipe", RECIPES)
def test_packed_sequences_are_predicted_and_frozen(recipe):
    net = model(recipe)
    assert vd.predict(net, BATCH, samples=4, seed=0).probs.shape == (4, 3)
    assert vd.freeze(net, samples=4)(BATCH, seed=0).probs.shape == (4, 3)


@pytest.mark.parametrize("recipe", RECIPES)
def test_packed_sequences_by_whole_functions(recipe):
    assert vd.predict(model(recipe), BATCH, 4, seed=0, draw="functions").probs.shape == (4, 3)


def test_recurrent_dropout_by_whole_functions():
    net = vd.convert(Padded(), vd.recurrent_dropout(0.25)).eval()
    assert vd.predict(net, BATCH, 4, draw="functions").probs.shape == (4, 3)


def test_a_function_drawn_from_recurrent_dropout():
    net = vd.convert(Padded(), vd.recurrent_dropout(0.25)).eval()
    function, other = vd.draw(net, seed=0), vd.draw(net, seed=1)
    torch.testing.assert_close(function(**BATCH), function(**BATCH))
    assert not torch.allclose(function(**BATCH), other(**BATCH))
