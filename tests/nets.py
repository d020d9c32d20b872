"""Small nets that several tests share."""

from torch import nn


class Parts(nn.Module):
    """Modules by name, and `run(net, *inputs)`, what is computed with them."""

    def __init__(self, run, **parts):
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs):
        return self.run(self, *inputs)


class Tied(nn.Module):
    """An embedding and a decoder, with one weight where they are tied."""

    def __init__(self, tie=True):
        super().__init__()
        self.embedding, self.decoder = nn.Embedding(11, 5), nn.Linear(5, 11, bias=False)
        if tie:
            self.decoder.weight = self.embedding.weight

    def forward(self, x):
        return self.decoder(self.embedding(x))
