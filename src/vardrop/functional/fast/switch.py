"""The switch of all fast paths."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

enabled = True  # each predicate reads it


@contextmanager
def reference() -> Iterator[None]:
    """Run plain expressions instead of all fast paths, to test them or to find an error.

    It applies to all threads.

    >>> import torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Linear(3, 2), vd.sparse_vd())
    >>> fast = vd.kl(net)
    >>> with vd.reference():
    ...     bool(torch.isclose(vd.kl(net), fast, rtol=1e-4))
    True
    """
    global enabled  # noqa: PLW0603
    before, enabled = enabled, False
    try:
        yield
    finally:
        enabled = before
