"""Layers with recipes, to parametrize by: the covering pairs always, the others in the slow run."""

import pytest

from vardrop.testing import cases, covering

ALWAYS = set(covering(1))
PAIRS = [pytest.param(*pair, marks=[] if pair in ALWAYS else pytest.mark.slow) for pair in cases()]
