"""Calls that are refused: a VardropError, and what it says."""

import pytest

from vardrop._core.errors import VardropError


def assert_refused(match, call, /, *args, **kwargs):
    """The call raises a VardropError whose text matches."""
    with pytest.raises(VardropError, match=match):
        call(*args, **kwargs)
