"""Torch layers with noisy weights. Each subclasses the torch layer it replaces."""

from torch import nn

from vardrop._core.checks import describe_value
from vardrop._core.errors import VardropError
from vardrop.layers.attention import MultiheadAttention as MultiheadAttention
from vardrop.layers.base import Ties as Ties, Variational as Variational
from vardrop.layers.conv import Conv1d as Conv1d, Conv2d as Conv2d, Conv3d as Conv3d
from vardrop.layers.conv import ConvTranspose1d as ConvTranspose1d
from vardrop.layers.conv import ConvTranspose2d as ConvTranspose2d
from vardrop.layers.conv import ConvTranspose3d as ConvTranspose3d
from vardrop.layers.dense import Bilinear as Bilinear, Embedding as Embedding, Linear as Linear
from vardrop.layers.dense import LinearLike as LinearLike, linear_like_class, linear_sizes
from vardrop.layers.recurrent import GRU as GRU, LSTM as LSTM, RNN as RNN, GRUCell as GRUCell
from vardrop.layers.recurrent import LSTMCell as LSTMCell, RNNCell as RNNCell

# The torch layer, by exact type, and the noisy layer of the same name that takes its place.
NOISY_TYPES: dict[type[nn.Module], type[Variational]] = {
    getattr(nn, noisy.__name__): noisy
    for noisy in (
        *(Linear, Bilinear, Embedding, MultiheadAttention),
        *(Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d),
        *(RNN, LSTM, GRU, RNNCell, LSTMCell, GRUCell),
    )
}


def register_layer(plain: type[nn.Module], noisy: type[Variational]) -> None:
    """Let `convert` turn modules of one type into noisy ones of yours, and `revert` turn them back.

    Args:
        plain: the torch layer, by exact type.
        noisy: a subclass of both `vardrop.Variational` and `plain`. Its weights are those of the
            plain layer, and its forward draws through `self.product`.

    `vardrop.testing.check_layer` is the test that such a layer should pass.

    >>> import torch, vardrop as vd
    >>> class Scaled(torch.nn.Linear):  # a layer of your own: y = 2 x w^T + b
    ...     def forward(self, x):
    ...         return super().forward(2 * x)
    >>> class NoisyScaled(vd.Linear, Scaled):
    ...     def forward(self, input, noise=None):
    ...         return super().forward(2 * input, noise)
    >>> vd.register_layer(Scaled, NoisyScaled)
    >>> type(vd.convert(Scaled(3, 2), vd.sparse_vd())).__name__
    'NoisyScaled'
    """
    if not (isinstance(plain, type) and issubclass(plain, nn.Module)):
        raise VardropError(
            f"Expected `plain` to be a type of module, but got {describe_value(plain)}."
        )
    bases = getattr(noisy, "__mro__", ())
    if Variational not in bases or plain not in bases:
        raise VardropError(
            f"Expected `noisy` to be a subclass of vardrop.Variational and of {plain.__name__}, "
            f"but got {describe_value(noisy)}. Write `class "
            f"Noisy{plain.__name__}(vardrop.Variational, {plain.__name__})`."
        )
    if NOISY_TYPES.get(plain, noisy) is not noisy or noisy in plain_types():
        raise VardropError(
            f"Expected {plain.__name__} and {noisy.__name__} to be registered once, but got a "
            "second registration. Derive a type of your own from it."
        )
    NOISY_TYPES[plain] = noisy


def register_linear_like(module: nn.Module) -> None:
    """Register the class of a dense layer of another library, such as PyTorch Geometric's.

    Args:
        module: any module. Modules that compute something else are left alone.
    """
    if type(module) not in NOISY_TYPES and (sizes := linear_sizes(module)) is not None:
        register_layer(type(module), linear_like_class(type(module), sizes))  # type: ignore[arg-type]


def plain_types() -> dict[type[Variational], type[nn.Module]]:
    """The torch layer of every noisy layer, by exact type."""
    return {noisy: plain for plain, noisy in NOISY_TYPES.items()}
