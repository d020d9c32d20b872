"""Modes of a net while it predicts: its noise all on or all off, and nothing else moved."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from vardrop.errors import VardropError
from vardrop.noisy import Noisy, sampling

_DROPOUTS = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)


def drops(module: nn.Module) -> bool:
    """Whether a plain torch module drops features at random in training mode."""
    if isinstance(module, _DROPOUTS):
        return module.p > 0
    return isinstance(module, nn.MultiheadAttention | nn.RNNBase) and module.dropout > 0


def check_noise(net: nn.Module) -> None:
    """Raise unless the net has a source of noise."""
    if not any(isinstance(m, Noisy) or drops(m) for m in net.modules()):
        kinds = sorted({type(m).__name__ for m in net.modules()})
        raise VardropError(
            f"Expected `net` to have noisy modules or dropout, but got {', '.join(kinds)}. "
            'Call vardrop.convert(net, recipe) first, or predict with mode="mean".'
        )


@contextmanager
def prepared(net: nn.Module, noise: bool) -> Iterator[nn.Module]:
    """Put a net into eval mode with its noise on or off; every module gets its own mode back."""
    modes = [(m, m.training) for m in net.modules()]
    noisy = any(isinstance(m, Noisy) for m, _ in modes)
    fastpath = torch.backends.mha.get_fastpath_enabled()
    try:
        for module, _ in modes:
            module.training = noise and drops(module)
        # torch's fused encoder path would skip the dropout inside.
        torch.backends.mha.set_fastpath_enabled(fastpath and not noise)
        with sampling(net, noise) if noisy else nullcontext(net):
            yield net
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath)
        for module, training in modes:
            module.training = training


@contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Draw from a seed of one's own; the global generators are left as they were."""
    if seed is None:
        yield
        return
    cuda = torch.cuda.is_initialized()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if cuda else []):
        torch.default_generator.manual_seed(seed)
        if cuda:
            torch.cuda.manual_seed_all(seed)
        yield


def batches(net: nn.Module, data: Tensor | Iterable[object]) -> Iterator[Tensor]:
    """The inputs of a tensor or loader, checked, on the device of the net."""
    reference = next(net.parameters(), None)
    count = 0
    for batch in [data] if isinstance(data, Tensor) else data:
        x = batch[0] if isinstance(batch, tuple | list) and batch else batch
        if not isinstance(x, Tensor):
            raise VardropError(
                f"Expected batches to be tensors, or tuples that begin with the input, but got "
                f"{type(batch).__name__}. Wrap the loader."
            )
        _check_values(x)
        count += 1
        yield x if reference is None else x.to(reference.device)
    if count == 0:
        raise VardropError("Expected `x` to give at least one batch, but got an empty loader.")


def _check_values(x: Tensor) -> None:
    if x.dim() == 0 or len(x) == 0:
        raise VardropError(f"Expected `x` to have rows, but got shape {tuple(x.shape)}.")
    # The sum is one cheap pass, and finite unless a value is not, or it overflows.
    if x.is_floating_point() and not (math.isfinite(float(x.sum())) or bool(x.isfinite().all())):
        bad = int((~x.isfinite()).sum())
        raise VardropError(
            f"Expected `x` to be finite, but got {bad} values that are NaN or infinite. "
            "Clean the input first."
        )
