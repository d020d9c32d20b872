"""Nets that tests of prediction share."""

from torch import Tensor, nn


class Wrapped(nn.Module):
    """A net inside another module, so that its structure has to be found by running it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)
